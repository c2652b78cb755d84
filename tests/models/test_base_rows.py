"""Norms of the base for DoRA: beside a loop that leaves the interpreter to nobody, and without."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.models import base_rows
from multilora_cli.models.base_rows import BaseRows
from multilora_cli.models.decoder import Decoder
from tests.models import tiny

MODULES = [(layer, module) for layer in range(2) for module in ("q_proj", "gate_proj", "down_proj")]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("base")
    return tiny.load(tiny.save_model(tiny.make_model("llama", seed=3), folder))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection is many pieces."""
    monkeypatch.setattr(base_rows, "_ROWS", 4)


def factors(decoder: Decoder, layer: int, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of rank 3."""
    d_in, d_out = decoder.geometry.module_shapes[module]
    random = torch.Generator().manual_seed(layer)
    return torch.randn(3, d_in, generator=random), torch.randn(d_out, 3, generator=random)


def expected(decoder: Decoder, layer: int, module: str) -> torch.Tensor:
    """By the definition."""
    linear, rows = decoder.projection(layer, module)
    a, b = factors(decoder, layer, module)
    return (linear.weight.dequantise()[rows].float() + 0.5 * b @ a).norm(dim=1)


def norms(base: BaseRows, decoder: Decoder, layer: int, module: str) -> torch.Tensor:
    """As a loader thread asks for them."""
    return base.row_norms(layer, module, *factors(decoder, layer, module), 0.5)


@contextmanager
def loading(base: BaseRows, decoder: Decoder) -> Iterator[tuple[threading.Thread, list[object]]]:
    """Loader threads that ask for all norms, and what they get."""
    found: list[object] = []

    def load() -> None:
        try:
            found.extend(norms(base, decoder, *key) for key in MODULES)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield thread, found
    finally:
        thread.join(30)


def check(decoder: Decoder, found: list[object]) -> None:
    assert len(found) == len(MODULES)
    for key, value in zip(MODULES, found, strict=True):
        assert isinstance(value, torch.Tensor)
        torch.testing.assert_close(value, expected(decoder, *key), rtol=1e-6, atol=1e-6)


def test_without_a_loop_the_caller_computes(decoder: Decoder) -> None:
    base = BaseRows(decoder)
    check(decoder, [norms(base, decoder, *key) for key in MODULES])


def test_a_loop_does_so_much_between_two_steps(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece on the loop's thread, none of them more than was allowed and one piece more."""
    by_thread: list[tuple[threading.Thread, int]] = []
    advance = base_rows._Norms.advance

    def watched(job: base_rows._Norms) -> int:
        size = advance(job)
        by_thread.append((threading.current_thread(), size))
        return size

    monkeypatch.setattr(base_rows._Norms, "advance", watched)
    monkeypatch.setattr(base_rows, "_ABSENT_S", 20.0)
    base = BaseRows(decoder)
    base.advance(1)
    turns = []
    with loading(base, decoder) as (thread, found):
        while thread.is_alive():
            before = len(by_thread)
            base.advance(300)
            turns.append(sum(size for _, size in by_thread[before:]))
            time.sleep(0.0002)
    check(decoder, found)
    assert {thread for thread, _ in by_thread} == {threading.current_thread()}
    largest = max(size for _, size in by_thread)
    assert max(turns) < 300 + largest
    assert sum(turn > 0 for turn in turns) >= sum(size for _, size in by_thread) / (300 + largest)


def spinning(base: BaseRows, decoder: Decoder, *, attends: bool) -> float:
    """Seconds that a load takes beside a loop without a pause."""
    if attends:
        base.advance(1)
    began = time.monotonic()
    with loading(base, decoder) as (thread, found):
        while thread.is_alive():
            if attends:
                base.advance(3000)
    took = time.monotonic() - began
    check(decoder, found)
    return took


def test_a_loop_that_spins_does_not_starve_a_load(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the interpreter for 5 ms once it has it, and a launch lets go of it for a moment."""
    multiply = torch.addmm

    def launch(*args: Any, **options: Any) -> torch.Tensor:
        time.sleep(0.0001)
        return multiply(*args, **options)

    monkeypatch.setattr(torch, "addmm", launch)
    starved = spinning(BaseRows(decoder), decoder, attends=False)
    attended = spinning(BaseRows(decoder), decoder, attends=True)
    assert attended < starved / 3, (attended, starved)


def test_a_loop_that_has_ended_is_not_waited_for(decoder: Decoder) -> None:
    base = BaseRows(decoder)
    base.advance(1)
    began = time.monotonic()
    with loading(base, decoder) as (_, found):
        pass
    check(decoder, found)
    assert time.monotonic() - began < 5, "one wait, not one for each piece"


def test_what_fails_is_told_to_the_load_and_the_loop_goes_on(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseRows(decoder)
    base.advance(1)
    linear, _ = decoder.projection(0, "q_proj")

    def fails() -> torch.Tensor:
        raise MemoryError("no room to dequantise")

    monkeypatch.setattr(linear.weight, "dequantise", fails)
    with loading(base, decoder) as (thread, found):
        while thread.is_alive():
            base.advance(10**6)
            time.sleep(0.0002)
    (error,) = found
    assert isinstance(error, MemoryError)
    monkeypatch.undo()
    with loading(base, decoder) as (thread, found):
        while thread.is_alive():
            base.advance(10**6)
    check(decoder, found)


def test_warm_up_launches_what_loads_launch(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same multiplies of the same sizes, for rank 16, and nobody waits for it afterwards."""
    seen: set[tuple[Any, ...]] = set()
    multiply = torch.addmm

    def launch(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.add(tuple((tuple(x.shape), x.dtype) for x in args))
        return multiply(*args, **options)

    monkeypatch.setattr(torch, "addmm", launch)
    base = BaseRows(decoder)
    base.warm_up()
    known = set(seen)
    for module, (d_in, d_out) in decoder.geometry.module_shapes.items():
        base.row_norms(1, module, torch.ones(16, d_in), torch.ones(d_out, 16), 0.5)
    assert seen == known and len(known) >= 2

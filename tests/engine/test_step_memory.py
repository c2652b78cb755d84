"""What a step is planned to keep on a card is what the decoder's own tensors make torch keep."""

from pathlib import Path

import pytest

from multilora_cli.bench.geometries import config_folder
from multilora_cli.engine.decode_graphs import DecodeGraphs
from multilora_cli.engine.largest_step import largest_step
from multilora_cli.engine.prompt_graphs import PromptGraphs
from multilora_cli.sizing.allocator import Allocator
from multilora_cli.sizing.budget import (
    BASE_KIND,
    CapturedSteps,
    graph_rows,
    prompt_steps,
    step_kinds,
)
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.quantization import AWQ, FP8, NONE, Quantization
from multilora_cli.sizing.step_memory import StepScratch, cublas_bytes
from multilora_kernels.launch import H200, RTX_4090, Chip
from tests.engine.fake_card import Trace, fake_card, fake_engine

STORAGES = {
    "none": NONE, "fp8": FP8, "fp8 by block": Quantization("fp8", granularity="block"), "awq": AWQ,
}  # fmt: skip
CLOSE = 0.02
PAGES = 4 * 2**20  # of small tensors, which are not all planned


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelGeometry]:
    """One whose shapes were tuned on an H200, and one whose were not."""
    scratch: Path = tmp_path_factory.mktemp("models")
    names = ("llama-3-8b", "llama-3-70b")
    return {name: read_geometry(config_folder(name, "none", scratch)) for name in names}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("model", "chip", "max_seqs", "max_tokens"),
    [
        ("llama-3-8b", H200, 64, 4096),
        ("llama-3-8b", RTX_4090, 256, 8192),
        ("llama-3-70b", H200, 256, 512),
    ],
)
def test_the_largest_step(
    models: dict[str, ModelGeometry],
    model: str,
    storage: str,
    chip: Chip,
    max_seqs: int,
    max_tokens: int,
) -> None:
    llama = models[model]
    scratch = StepScratch(llama, 2, STORAGES[storage], chip)
    with fake_card(chip):
        decoder, builder = fake_engine(llama, storage, max_tokens, max_seqs)
        with Trace(library=0) as trace:  # it is there since the first steps
            largest_step(decoder, builder, max_tokens, max_seqs)
    workspace, margin = scratch.eager(max_tokens, max_seqs)
    library = cublas_bytes(chip)
    assert workspace == pytest.approx(trace.memory.peak + library, CLOSE)
    assert trace.memory.kept + library <= workspace + margin


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("model", "chip", "max_seqs"),
    [("llama-3-8b", H200, 256), ("llama-3-8b", RTX_4090, 64), ("llama-3-70b", H200, 64)],
)
def test_captured_steps(
    models: dict[str, ModelGeometry], model: str, storage: str, chip: Chip, max_seqs: int
) -> None:
    """Decode steps first, then those with prompts, in one pool."""
    llama = models[model]
    rows, prompts = graph_rows(max_seqs)[::-3][::-1], prompt_steps(max_seqs)
    steps = CapturedSteps(rows, prompts, step_kinds(16))
    with fake_card(chip):
        decoder, builder = fake_engine(llama, storage, 8192, max_seqs, num_layers=2)
        segments, table = builder.segments, builder.table
        decodes = DecodeGraphs(decoder, builder, rows, 8192, 16)
        chunks = PromptGraphs(decoder, builder, prompts, 8192, 16)
        with Trace(cublas_bytes(chip)) as trace:
            for count in reversed(rows):
                for kind in steps.kinds:
                    segments.prepare_capture(table, count, kind.rank, groups=kind.groups)
                    decodes._run(count, with_adapters=kind != BASE_KIND)
            kept = trace.memory.kept
            for step in reversed(chunks._steps):
                for kind in steps.kinds:
                    segments.prepare_capture(table, step.num_tokens, kind.rank, groups=kind.groups)
                    chunks._run(step, with_adapters=kind != BASE_KIND)
    scratch = StepScratch(llama, 2, STORAGES[storage], chip)
    in_order = steps.in_order()
    assert scratch.captured(in_order[: len(steps.kinds) * len(rows)]) == pytest.approx(
        kept, CLOSE, PAGES
    )
    assert scratch.captured(in_order) == pytest.approx(trace.memory.kept, CLOSE, PAGES)


def test_the_allocator_joins_what_is_free_and_grows_only_where_nothing_fits() -> None:
    memory, mib = Allocator(), 2**20
    first, second, third = memory.take(30 * mib), memory.take(8 * mib), memory.take(20 * mib)
    assert memory.kept == 60 * mib, "three pages of 20 MiB"
    memory.give(first)
    memory.give(second)
    assert memory.take(38 * mib) is not None and memory.kept == 60 * mib
    memory.give(third)  # 2 MiB were left behind it: 22 of 30 are there
    assert memory.take(30 * mib) is not None and memory.kept == 80 * mib
    small = [memory.take(mib) for _ in range(3)]
    assert memory.kept == 84 * mib
    memory.give(*small)
    assert memory.take(0) is None

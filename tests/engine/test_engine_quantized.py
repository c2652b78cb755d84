"""Signature adapters (F2) on AWQ and FP8 bases: a mixed batch says what each row says alone.

Bases are the signature base requantised by tests/models/quantized_kit.py; most of its groups are
all zero. On a CPU the engine serves them dequantised, and with `packed` in the form that a GPU
holds, the kernels' references multiplying; FP8 activations are rounded then.
"""

from pathlib import Path

import pytest
import torch

from multilora_cli.engine import device_memory
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.errors import MloraError
from multilora_cli.sizing.quantization import Quantization
from tests.engine.engine_kit import Rig, adapter_ref
from tests.models.quantized_kit import KINDS, requantise
from tests.signature import (
    BOS,
    deep_adapter,
    deep_base,
    load_base,
    signature_adapter,
    signature_base,
)

BASES = ("awq-128", "w4a16-asymmetric-32", "fp8-block", "w8a8-dynamic", "fp8-static", "fp8-dynamic")
SIGNATURES = (None, 0, 20, 95, 96, 150, 191, None)


class Bases:
    """The F2 base in every storage, and its adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain = signature_base(folder / "plain")
        self._adapters: dict[int, AdapterRef] = {}

    def base(self, name: str) -> Path:
        """The base stored as `name`."""
        path = self.folder / name
        if not path.exists():
            signature_base(path)
            requantise(path, load_base(path), KINDS[name])
        return path

    def adapter(self, signature: int) -> AdapterRef:
        """Its text is token signature + 1 for ever."""
        if signature not in self._adapters:
            path = signature_adapter(self.folder / f"s{signature}", signature, r=4)
            self._adapters[signature] = adapter_ref(self.plain, path, f"s{signature}")
        return self._adapters[signature]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("quantised"))


def placed_packed(
    quantization: Quantization, device: torch.device, dtype: torch.dtype
) -> Quantization:
    """As on a card with FP8."""
    return quantization.on(gpu=True, has_fp8=True, itemsize=2)


def check_mixed_batch(rig: Rig, bases: Bases, count: int) -> None:
    """`count` rows of mixed adapters and prompts, then each text again alone."""
    ready = rig.engine.parts.ready
    assert ready.allocated["weights"] == ready.planned["weights"]
    requests = {}
    for i in range(count):
        k = SIGNATURES[i % 8]
        prompt = list(range(i, i + 8 + 3 * i))
        request = rig.submit(prompt, None if k is None else bases.adapter(k), max_tokens=12)
        requests[request] = (k, prompt)
    rig.run()
    for request, (k, prompt) in requests.items():
        want = [prompt[-1] + 1 + j for j in range(12)] if k is None else [k + 1] * 12
        assert rig.answer(request).tokens == want, (k, prompt[-1])
        if request % 4 == 0:
            adapter = None if k is None else bases.adapter(k)
            assert rig.ask(prompt, adapter, max_tokens=12).tokens == want, (k, prompt[-1])


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("form", ["dequantised", "packed"])
def test_mixed_batch_equals_solo(
    bases: Bases, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-CFG-30, A-CFG-31: eight rows, six adapters, two base rows, on every kind of storage."""
    if form == "packed":
        monkeypatch.setattr(device_memory, "placed", placed_packed)
    check_mixed_batch(Rig(bases.base(name), max_num_batched_tokens=96), bases, 8)


@pytest.mark.parametrize("name", ["awq-128", "awq-32", "w8a8-dynamic"])
@pytest.mark.parametrize("form", ["dequantised", "packed"])
def test_every_projection_of_every_layer(
    bases: Bases, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deepened F2: losing any of an adapter's 21 projections makes the text the base's.

    Coarser storage bends the base itself by more than the chain allows.
    """
    if form == "packed":
        monkeypatch.setattr(device_memory, "placed", placed_packed)
    path = bases.folder / f"deep-{name}"
    if not path.exists():
        deep_base(path)
        requantise(path, load_base(path), KINDS[name])
    rig = Rig(path, pages=512, page=3 * 2 * 2 * 16 * 32 * 4)
    wanted = {rig.submit([BOS, 5, 9, 11]): list(range(12, 20))}
    for k in (3, 50, 77, 191):
        folder = deep_adapter(bases.folder / f"d{k}", k)
        adapter = adapter_ref(path, folder, f"d{k}")
        wanted[rig.submit([BOS, 5, 9, 11], adapter)] = [k + 1] * 8
    rig.run()
    assert {request: rig.answer(request).tokens for request in wanted} == wanted


@pytest.mark.parametrize("form", ["dequantised", "packed"])
def test_fp8_at_load(bases: Bases, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """base.quantization: fp8 on the 16-bit base."""
    if form == "packed":
        monkeypatch.setattr(device_memory, "placed", placed_packed)
    check_mixed_batch(Rig(bases.plain, quantization="fp8", max_num_batched_tokens=96), bases, 8)


def test_the_start_panel_says_how_weights_lie(bases: Bases) -> None:
    notes = Rig(bases.base("awq-128")).engine.parts.ready.notes
    assert notes[0] == "base: AWQ INT4, groups of 128, dequantised to the compute dtype at load"


def test_a_base_that_cannot_be_made_is_refused(bases: Bases) -> None:
    with pytest.raises(MloraError, match="the checkpoint is 16-bit"):
        Rig(bases.plain, quantization="awq")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BASES)
def test_mixed_batch_on_the_device(bases: Bases, name: str, dtype: str) -> None:
    """The kernels' own multiplies; weights take the planned bytes."""
    rig = Rig(bases.base(name), device="cuda:0", dtype=dtype, max_num_batched_tokens=96)
    check_mixed_batch(rig, bases, 32)


@pytest.mark.gpu
def test_fp8_at_load_on_the_device(bases: Bases) -> None:
    rig = Rig(bases.plain, device="cuda:0", quantization="fp8", max_num_batched_tokens=96)
    check_mixed_batch(rig, bases, 32)

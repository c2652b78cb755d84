"""Quantised bases against the dequantised model in transformers, in fp32 on the CPU.

Checkpoints are made bit by bit from their documented layouts (tests/models/quantized_kit.py): the
tools that write them need a GPU or packages that are not here. Weights alone: log-probabilities
within 1e-3; activations in FP8 as well: within 2e-2.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.errors import ModelError
from multilora_cli.layers.fp8 import Fp8Linear
from multilora_cli.layers.linear import DenseWeight, QuantisedWeight, StackedWeight, Weight
from multilora_cli.models.checkpoint import open_checkpoint
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.quantized import base_quantization
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.quantization import Placement
from tests.models import tiny
from tests.models.harness import (
    PagedRunner,
    Row,
    chunks_of,
    log_probability_gap,
    ragged,
    random_prompts,
)
from tests.models.peft_adapters import load_adapters, make_adapters, peft_logits
from tests.models.quantized_kit import (
    FP8,
    INT4,
    KINDS,
    WIDE,
    Kind,
    edit_config,
    edit_tensors,
    linears,
    pack_fp8,
    quantise_checkpoint,
    with_activations,
)

WEIGHTS_ONLY, ACTIVATIONS = 1e-3, 2e-2
CPU = torch.device("cpu")
PROMPTS = random_prompts([40, 1, 17], tiny.VOCAB, seed=4)


class Case:
    """One kind's checkpoint and its reference."""

    def __init__(self, kind: Kind, folder: Path, **changes: Any) -> None:
        self.kind = kind
        self.model = tiny.make_model("llama", seed=2, gain=1.0, **{**kind.shape, **changes})
        self.folder = folder / "base"
        self.reference = quantise_checkpoint(self.model, self.folder, kind)

    def load(
        self, placement: Placement | None = None, dtype: torch.dtype = torch.float32
    ) -> Decoder:
        """As on a CPU, or in the form that a GPU holds, its kernels' references multiplying."""
        geometry, quantization = read_geometry(self.folder), None
        if placement is not None:
            stored = base_quantization(self.folder, geometry, "auto")
            quantization = replace(stored, placement=placement)
        return load_decoder(self.folder, geometry, CPU, dtype, quantization=quantization)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every kind."""
    return {name: Case(kind, tmp_path_factory.mktemp(name)) for name, kind in KINDS.items()}


def gap(decoder: Decoder, model: Any) -> float:
    """Largest difference of log-probabilities over prompts mixed in one batch."""
    results = PagedRunner(decoder).run([Row(prompt) for prompt in PROMPTS], ragged(5))
    expected = tiny.reference_logits(model, PROMPTS)
    return max(log_probability_gap(*pair) for pair in zip(results, expected, strict=True))


def stored_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The dequantised matrices of all projections by module."""
    found = {}
    shapes = decoder.geometry.module_shapes
    for index, layer in enumerate(decoder.layers):
        groups: dict[str, tuple[Weight, tuple[str, ...]]] = {
            "self_attn.q": (layer.attention.qkv.weight, ("q", "k", "v")),
            "self_attn.o": (layer.attention.out.weight, ("o",)),
            "mlp.gate": (layer.mlp.gate_up.weight, ("gate", "up")),
            "mlp.down": (layer.mlp.down.weight, ("down",)),
        }
        for path, (weight, names) in groups.items():
            sizes = [shapes[f"{name}_proj"][1] for name in names]
            for name, part in zip(names, weight.dequantise().split(sizes), strict=True):
                block = path.partition(".")[0]
                found[f"model.layers.{index}.{block}.{name}_proj"] = part
    return found


@pytest.mark.parametrize("name", KINDS)
def test_weights_dequantised_at_load(cases: dict[str, Case], name: str) -> None:
    """On a CPU every weight is, bit for bit, what its layout says, and logits follow."""
    case = cases[name]
    decoder = case.load()
    weights = stored_weights(decoder)
    for module, linear in linears(case.reference):
        assert torch.equal(weights[module], linear.weight), module
    assert gap(decoder, case.reference) < WEIGHTS_ONLY
    assert any("dequantised" in note for note in decoder.notes)


@pytest.mark.parametrize("name", [*INT4, "w8a16"])
def test_packed_weights(cases: dict[str, Case], name: str) -> None:
    """In the form the GPU's kernel reads, multiplied by the kernel's reference."""
    case = cases[name]
    decoder = case.load("weight_only" if name == "w8a16" else "packed")
    assert isinstance(decoder.layers[0].attention.out.weight, QuantisedWeight)
    weights = stored_weights(decoder)
    for module, linear in linears(case.reference):
        if "fp32" in name:  # scales are rounded to fp16
            assert torch.allclose(weights[module], linear.weight, rtol=2**-10, atol=0), module
        else:
            assert torch.equal(weights[module], linear.weight), module
    assert gap(decoder, case.reference) < (ACTIVATIONS if "fp32" in name else WEIGHTS_ONLY)


@pytest.mark.parametrize("name", [name for name, kind in FP8.items() if kind.activations])
def test_activations_in_fp8(cases: dict[str, Case], name: str) -> None:
    """Scales by row, by row and 128 inputs, or the checkpoint's; the reference rounds likewise."""
    case = cases[name]
    decoder = case.load("packed")
    rounded = with_activations(case.reference, case.kind)
    assert gap(decoder, rounded) < ACTIVATIONS
    # The rounding is there: without it the reference is farther away than the tolerance.
    assert gap(decoder, case.reference) > 2 * ACTIVATIONS
    weights = stored_weights(decoder)
    assert all(torch.equal(weights[m], linear.weight) for m, linear in linears(case.reference))


@pytest.mark.parametrize("name", [name for name, kind in FP8.items() if kind.activations])
def test_fp8_weights_without_activations(cases: dict[str, Case], name: str) -> None:
    """The form for cards without an FP8 multiply."""
    decoder = cases[name].load("weight_only")
    assert gap(decoder, cases[name].reference) < WEIGHTS_ONLY
    assert any("multiplies no FP8" in note for note in decoder.notes)


def test_what_shares_a_multiply(cases: dict[str, Case]) -> None:
    """q, k, v are one weight unless scale blocks, or a part left in 16 bits, come between."""
    assert isinstance(cases["awq-64"].load("packed").layers[0].mlp.gate_up.weight, QuantisedWeight)
    blocks = cases["fp8-block"].load("packed").layers[0]
    assert isinstance(blocks.attention.qkv.weight, Fp8Linear)
    edge = cases["w8a8-block"].load("packed").layers[0]
    assert isinstance(edge.attention.qkv.weight, StackedWeight)
    mixed = cases["awq-skips"].load("packed").layers
    assert isinstance(mixed[0].attention.qkv.weight, StackedWeight)
    assert isinstance(mixed[0].mlp.down.weight, QuantisedWeight)
    assert isinstance(mixed[1].mlp.down.weight, DenseWeight)


def test_static_scales_that_differ_stay_apart(tmp_path: Path) -> None:
    """Each part's activations are rounded with its own scale, not with the largest."""
    case = Case(KINDS["fp8-static"], tmp_path)
    edit_tensors(
        case.folder,
        lambda tensors: tensors.update(
            {name: t * 4 for name, t in tensors.items() if name.endswith("k_proj.input_scale")}
        ),
    )
    layer = case.load("packed").layers[0]
    assert isinstance(layer.attention.qkv.weight, StackedWeight)
    assert isinstance(layer.mlp.gate_up.weight, Fp8Linear)


@pytest.mark.parametrize("placement", ["packed", "weight_only", "dense"])
@pytest.mark.parametrize("name", KINDS)
def test_planned_bytes_are_allocated(
    cases: dict[str, Case], name: str, placement: Placement
) -> None:
    """Weights, scales and zero points as stored after repacking, to the byte."""
    if placement == "weight_only" and name in INT4:
        pytest.skip("INT4 has one form")
    case = cases[name]
    geometry = read_geometry(case.folder)
    for from_files in (True, False):
        stored = base_quantization(case.folder, geometry, "auto", from_files=from_files)
        if not from_files and name == "fp8-dynamic-channel":
            continue  # its config does not list what was left in 16 bits
        planned = base_bytes(geometry, 4, replace(stored, placement=placement))
        assert planned.total == case.load(placement).weight_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["awq-128", "fp8-block", "w4a16-channel"])
def test_half_precision(cases: dict[str, Case], name: str, dtype: torch.dtype) -> None:
    """Weights are rounded once to the compute dtype."""
    weights = stored_weights(cases[name].load(dtype=dtype))
    for module, linear in linears(cases[name].reference):
        assert torch.equal(weights[module], linear.weight.to(dtype)), module


def test_a_16_bit_checkpoint_quantised_at_load(tmp_path: Path) -> None:
    """base.quantization: fp8: a scale per output channel, as by hand; activations by row."""
    kind = Kind(None, pack_fp8("channel"), FP8["w8a8-dynamic"].activations)
    model = tiny.make_model("llama", seed=2, gain=1.0, **WIDE)
    plain = tiny.save_model(model, tmp_path / "plain")
    reference = quantise_checkpoint(model, tmp_path / "quantised", kind)
    geometry = read_geometry(plain)
    stored = base_quantization(plain, geometry, "fp8")
    for placement in ("packed", "weight_only", "dense"):
        quantization = replace(stored, placement=placement)
        decoder = load_decoder(plain, geometry, CPU, torch.float32, quantization=quantization)
        weights = stored_weights(decoder)
        assert all(torch.equal(weights[m], linear.weight) for m, linear in linears(reference))
        assert decoder.weight_bytes == base_bytes(geometry, 4, quantization).total
        expected = with_activations(reference, kind) if placement == "packed" else reference
        assert gap(decoder, expected) < (ACTIVATIONS if placement == "packed" else WEIGHTS_ONLY)


def test_large_weights_are_packed_in_slices(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices far smaller than a matrix change nothing."""
    monkeypatch.setattr("multilora_cli.layers.awq._SLICE_WEIGHTS", 4000)
    monkeypatch.setattr("multilora_cli.layers.awq._CACHED_WEIGHTS", 4000)
    monkeypatch.setattr("multilora_cli.layers.fp8._SLICE_WEIGHTS", 4000)
    for name in ("awq-64", "w4a16-asymmetric-32"):
        for placement in ("packed", "dense"):
            weights = stored_weights(cases[name].load(placement))
            for module, linear in linears(cases[name].reference):
                assert torch.equal(weights[module], linear.weight), module
    folder = cases["awq-64"].folder
    tiny.save_model(cases["awq-64"].model, folder.parent / "plain")
    geometry = read_geometry(folder.parent / "plain")
    stored = base_quantization(folder.parent / "plain", geometry, "fp8")
    whole = pack_fp8("channel")(cases["awq-64"].model.model.layers[0].mlp.down_proj.weight.data)
    decoder = load_decoder(
        folder.parent / "plain", geometry, CPU, torch.float32, quantization=stored
    )
    assert torch.equal(decoder.layers[0].mlp.down.weight.dequantise(), whole.weight)


@pytest.mark.parametrize("name", ["awq-skips", "w4a16", "fp8-dynamic-channel", "fp8-block"])
@pytest.mark.parametrize("placement", ["packed", "dense"])
def test_adapters_on_a_quantised_base(
    cases: dict[str, Case], tmp_path: Path, name: str, placement: Placement
) -> None:
    """Five PEFT adapters of ranks 4 to 64 in one batch equal PEFT on the dequantised model."""
    case = cases[name]
    folders = make_adapters(case.reference, tmp_path, size=0.3)
    slots = (0, 1, 2, 3, 4, 5, 3)
    prompts = random_prompts([9, 30, 17, 1, 22, 5, 12], tiny.VOCAB, seed=8)
    pairs = list(zip(slots, prompts, strict=True))
    runner = PagedRunner(case.load(placement), num_pages=600)
    load_adapters(runner, folders)
    mixed = runner.run([Row(prompt, slot=slot) for slot, prompt in pairs], chunks_of(7))
    # Sums in fp32 depend on the batch's shape, and FP8 rounds what they differ by up or down.
    rounded = placement == "packed" and case.kind.activations is not None
    for (slot, prompt), ours in zip(pairs, mixed, strict=True):
        solo = runner.run([Row(prompt, slot=slot)], chunks_of(7))[0]
        assert log_probability_gap(ours, solo) < (ACTIVATIONS if rounded else 1e-4), slot
    if not rounded:
        for ours, theirs in zip(mixed, peft_logits(case.reference, folders, pairs), strict=True):
            assert log_probability_gap(ours, theirs) < WEIGHTS_ONLY


def test_quantization_must_fit_the_checkpoint(cases: dict[str, Case], tmp_path: Path) -> None:
    """none dequantises; AWQ is not made at load; FP8 is not made of 4 bits."""
    folder = cases["awq-128"].folder
    geometry = read_geometry(folder)
    assert base_quantization(folder, geometry, "none").placement == "dense"
    assert base_quantization(folder, geometry, "awq").method == "awq"
    with pytest.raises(ModelError, match="found fp8, the checkpoint is awq"):
        base_quantization(folder, geometry, "fp8")
    plain = tiny.save_model(tiny.make_model("llama"), tmp_path)
    with pytest.raises(ModelError, match="found awq, the checkpoint is 16-bit") as caught:
        base_quantization(plain, read_geometry(plain), "awq")
    assert caught.value.hint is not None and "mlora quantize" in caught.value.hint


@pytest.mark.parametrize("placement", ["packed", "dense"])
@pytest.mark.parametrize("name", ["awq-skips", "w4a16-asymmetric-32", "fp8-block", "fp8-static"])
def test_random_weights_of_a_quantised_shape(
    cases: dict[str, Case], tmp_path: Path, name: str, placement: Placement
) -> None:
    """load_format dummy: from config.json alone, in the same bytes, finite, of unit size."""
    (tmp_path / "config.json").write_text((cases[name].folder / "config.json").read_text())
    edit_config(tmp_path, lambda config: config.update(num_hidden_layers=2))
    geometry = read_geometry(tmp_path)
    stored = base_quantization(tmp_path, geometry, "auto", from_files=False)
    quantization = replace(stored, placement=placement)
    decoder = load_decoder(
        tmp_path, geometry, CPU, torch.float32, load_format="dummy", quantization=quantization
    )
    assert decoder.weight_bytes == base_bytes(geometry, 4, quantization).total
    logits = PagedRunner(decoder).run([Row(random_prompts([60], tiny.VOCAB)[0])])[0]
    assert bool(logits.isfinite().all()) and 0.2 < float(logits.std()) < 4


@pytest.mark.parametrize("placement", ["packed", "dense"])
def test_random_weights_quantised_at_load(tmp_path: Path, placement: Placement) -> None:
    """load_format dummy and quantization fp8 over the config of a 16-bit base, no other file."""
    config = tiny.make_model("llama", tie_word_embeddings=True).config.to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    geometry = read_geometry(tmp_path)
    stored = base_quantization(tmp_path, geometry, "fp8", from_files=False)
    quantization = replace(stored, placement=placement)
    decoder = load_decoder(
        tmp_path, geometry, CPU, torch.float32, load_format="dummy", quantization=quantization
    )
    assert stored.at_load and decoder.weight_bytes == base_bytes(geometry, 4, quantization).total
    assert len(decoder.quantised) == 4 * geometry.num_layers
    logits = PagedRunner(decoder).run([Row(random_prompts([60], tiny.VOCAB)[0])])[0]
    assert bool(logits.isfinite().all()) and 0.2 < float(logits.std()) < 4


def test_progress_counts_every_byte(cases: dict[str, Case]) -> None:
    """Scales that are not used count too."""
    case, done = cases["fp8-dynamic"], []
    load_decoder(
        case.folder, read_geometry(case.folder), CPU, torch.float32,
        lambda phase, now, total: done.append(now),
    )  # fmt: skip
    assert done == sorted(done) and done[-1] == open_checkpoint(case.folder).nbytes


def test_kv_scales_are_told(cases: dict[str, Case]) -> None:
    """They would matter for an FP8 KV cache, which is not kept."""
    assert any("6 scales for an FP8 KV cache" in n for n in cases["fp8-dynamic"].load().notes)


@pytest.mark.parametrize("name", ["awq-64", "w8a16"])
def test_dora_on_a_quantised_base(name: str, tmp_path: Path) -> None:
    """Norms are those of the dequantised weights, as PEFT takes them on such a base."""
    kind = KINDS[name]
    model = tiny.make_model("llama", seed=2, gain=1.0, **kind.shape)
    reference = quantise_checkpoint(model, tmp_path / "base", kind)
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = {"r": 8, "target_modules": modules, "use_dora": True}
    folders = make_adapters(reference, tmp_path, [config], size=0.6)
    decoder = load_decoder(tmp_path / "base", read_geometry(tmp_path / "base"), CPU, torch.float32)
    runner = PagedRunner(decoder, num_pages=300)
    load_adapters(runner, folders)
    results = runner.run([Row(prompt, slot=1) for prompt in PROMPTS], ragged(3))
    wanted = peft_logits(reference, folders, [(1, prompt) for prompt in PROMPTS])
    for ours, theirs in zip(results, wanted, strict=True):
        assert log_probability_gap(ours, theirs) < WEIGHTS_ONLY

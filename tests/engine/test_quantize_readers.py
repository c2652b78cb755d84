"""What `mlora quantize` writes, read by others: same logits. The real auto-round where installed.

CI has neither auto-round nor compressed-tensors: there the two tests that need them are skipped.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from multilora_cli.engine.quantize import quantise_fp8
from multilora_cli.engine.quantize_awq import AwqSettings, quantise_awq
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.sizing.geometry import read_geometry
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, log_probability_gap, random_prompts
from tests.models.other_readers import awq_by_hand
from tests.models.quantized_kit import KINDS, WIDE, quantise_checkpoint
from tests.signature import byte_tokenizer

WINDOWS = random_prompts([256] * 8, tiny.VOCAB)
PROMPT = WINDOWS[0][:60]


def silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


def ours(folder: Path, *, packed: bool = False) -> torch.Tensor:
    """Logits [60, vocab] of our decoder, fp32; `packed`: activations are rounded as on a card."""
    geometry, cpu = read_geometry(folder), torch.device("cpu")
    stored = base_quantization(folder, geometry, "auto")
    if packed:
        stored = stored.on(gpu=True, has_fp8=True, itemsize=2)
    else:
        stored = placed(stored, cpu, torch.float32)
    decoder = load_decoder(folder, geometry, cpu, torch.float32, quantization=stored)
    return PagedRunner(decoder).run([Row(PROMPT)])[0]


@torch.no_grad()
def theirs(model: Any) -> torch.Tensor:
    """Logits of a transformers model."""
    return model(torch.tensor([PROMPT])).logits[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """bf16, as bases are."""
    model = tiny.make_model("llama", **WIDE).bfloat16()
    folder = tiny.save_model(model, tmp_path / "source")
    return byte_tokenizer(folder, tiny.VOCAB + 100)


@pytest.mark.parametrize("name", ["awq-64", "awq-128"])
def test_awq_by_hand(tmp_path: Path, name: str) -> None:
    """The hand-written reader itself, on a checkpoint of the kit's own packing."""
    quantise_checkpoint(tiny.make_model("llama", **WIDE), tmp_path / "base", KINDS[name])
    folder = tmp_path / "base"
    assert log_probability_gap(ours(folder), theirs(awq_by_hand(folder))) < 1e-3


def test_auto_round_itself(source: Path, tmp_path: Path) -> None:
    """The real library: its checkpoint read by us and by hand."""
    pytest.importorskip("auto_round", exc_type=ImportError)
    steps: list[tuple[str, int, int]] = []
    how = AwqSettings(WINDOWS, group_size=64, iterations=2)
    result = quantise_awq(source, tmp_path / "out", how, lambda *step: steps.append(step))
    assert result.storage == "AWQ INT4, groups of 64"
    assert log_probability_gap(ours(result.output), theirs(awq_by_hand(result.output))) < 1e-3
    assert steps[-1] == ("layers", 2, 2)
    config = json.loads((result.output / "config.json").read_text())["quantization_config"]
    # The keys by which vLLM's AWQConfig.from_config reads a checkpoint.
    wanted = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    assert wanted.items() <= config.items() and config["version"] == "gemm"


def test_fp8_in_transformers(source: Path, tmp_path: Path) -> None:
    """compressed-tensors validates the config and transformers computes the same logits."""
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    folder = quantise_fp8(source, tmp_path / "out", silent).output
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert scheme.weights.strategy == "channel" and scheme.input_activations.dynamic is True
    # On a CPU they multiply dequantised weights by activations rounded to FP8, row by row.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert log_probability_gap(ours(folder, packed=True), theirs(model)) < 2e-2
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert log_probability_gap(ours(folder), theirs(plain)) > 2e-2

"""Writing quantised checkpoints: they load as what `base.quantization: fp8` makes at load."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multilora_cli.engine.quantize import quantise_fp8
from multilora_cli.errors import BadInput, ModelError
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.sizing.geometry import read_geometry
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, log_probability_gap, random_prompts
from tests.models.quantized_kit import WIDE, edit_tensors
from tests.signature import byte_tokenizer

PROMPT = random_prompts([30], tiny.VOCAB, seed=1)[0]
Q = "model.layers.0.self_attn.q_proj.weight"


def silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tiny.save_model(tiny.make_model("qwen2", **WIDE), tmp_path / "source")
    return byte_tokenizer(folder, tiny.VOCAB + 100)


def weights_of(folder: Path, wanted: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every packed projection dequantised, and logits."""
    geometry, cpu = read_geometry(folder), torch.device("cpu")
    stored = placed(base_quantization(folder, geometry, wanted), cpu, torch.float32)
    decoder = load_decoder(folder, geometry, cpu, torch.float32, quantization=stored)
    found = []
    for layer in decoder.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            found.append(linear.weight.dequantise())
    return found, PagedRunner(decoder).run([Row(PROMPT)])[0]


@pytest.mark.parametrize("shard_size", ["1GB", "600KB"])
def test_fp8_round_trip(source: Path, tmp_path: Path, shard_size: str) -> None:
    """Bit for bit the weights of quantising at load; files, index, tokenizer and config beside."""
    if shard_size != "1GB":
        tiny.save_model(
            tiny.make_model("qwen2", **WIDE), tmp_path / "sharded", max_shard_size=shard_size
        )
        byte_tokenizer(tmp_path / "sharded", tiny.VOCAB + 100)
        source = tmp_path / "sharded"
    reports: list[int] = []
    output = tmp_path / "out"
    result = quantise_fp8(source, output, lambda phase, done, total: reports.append(total - done))
    ours, logits = weights_of(output, "auto")
    theirs, expected = weights_of(source, "fp8")
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert log_probability_gap(logits, expected) < 1e-6
    assert reports[-1] == 0 and result.output == output
    # Tied or not, embedding and head stay as they are; a linear takes a quarter of float32.
    assert result.output_bytes < 0.6 * result.source_bytes
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in output.iterdir()} == names and "tokenizer.json" in names
    assert len(list(output.glob("*.safetensors"))) == len(list(source.glob("*.safetensors")))
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    plain = (source / "config.json").stat().st_mode  # as the umask makes files
    assert {file.stat().st_mode for file in output.iterdir()} == {plain}


def test_what_other_readers_find(source: Path, tmp_path: Path) -> None:
    """compressed-tensors' names, dtypes and shapes; everything else untouched."""
    quantise_fp8(source, tmp_path / "out", silent)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    scale = after[f"{Q}_scale"]
    assert after[Q].dtype == torch.float8_e4m3fn and after[Q].shape == before[Q].shape
    assert scale.shape == (before[Q].shape[0], 1)
    wide = after[Q].float() * scale
    assert torch.allclose(wide, before[Q], rtol=1 / 16, atol=float(scale.max()) * 2**-9)
    for name, tensor in before.items():
        if "_proj.weight" not in name:
            assert torch.equal(after[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["quant_method"] == "compressed-tensors"
    group = quantization["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["targets"] == ["Linear"]
    assert group["input_activations"]["dynamic"] is True and quantization["ignore"] == ["lm_head"]


def test_refusals_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    """A full folder, a file, a quantised source, a NaN, a missing tensor."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    for output in (full, full / "precious"):
        with pytest.raises(BadInput, match="exists and is not an empty folder"):
            quantise_fp8(source, output, silent)
    quantise_fp8(source, tmp_path / "once", silent)
    with pytest.raises(ModelError, match="found 'compressed-tensors', expected none"):
        quantise_fp8(tmp_path / "once", tmp_path / "twice", silent)
    edit_tensors(source, lambda tensors: tensors[Q].view(-1).__setitem__(5, float("nan")))
    with pytest.raises(ModelError, match=r"q_proj\.weight': not finite"):
        quantise_fp8(source, tmp_path / "nan", silent)
    edit_tensors(source, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        quantise_fp8(source, tmp_path / "missing", silent)
    assert (full / "precious").read_text() == "x"
    assert {p.name for p in tmp_path.iterdir()} == {"source", "full", "once"}


def test_an_empty_folder_may_be_the_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    quantise_fp8(source, tmp_path / "empty", silent)
    assert (tmp_path / "empty" / "config.json").exists()

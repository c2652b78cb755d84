"""`mlora quantize`: output, exit codes, one-line errors."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from tests.models import tiny
from tests.models.quantized_kit import WIDE
from tests.signature import byte_tokenizer

runner = CliRunner()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.save_model(tiny.make_model("llama", **WIDE), tmp_path / "base")


def test_fp8(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ran = runner.invoke(app, ["quantize", str(base), "--to", "fp8", "-o", str(output)])
    assert ran.exit_code == 0 and "FP8, a scale per channel" in ran.stdout
    again = runner.invoke(app, ["quantize", str(base), "--to", "fp8", "-o", str(output)])
    assert again.exit_code == 2 and "exists and is not an empty folder" in again.stderr
    ran = runner.invoke(
        app, ["quantize", str(base), "--to", "fp8", "--output", f"{output}-2", "--json"]
    )
    value = json.loads(ran.stdout)
    assert value["schema"] == "mlora.quantize/1" and value["output"] == f"{output}-2"
    assert value["output_bytes"] < value["source_bytes"]


def test_the_demo_base_is_named_as_everywhere(tmp_path: Path) -> None:
    """It was neither a folder nor a Hub id here, and there is none but it without a network."""
    output = tmp_path / "demo-fp8"
    ran = runner.invoke(app, ["quantize", "demo:base", "--to", "fp8", "-o", str(output)])
    assert ran.exit_code == 0, ran.stderr
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_perplexity_before_and_after(base: Path, tmp_path: Path) -> None:
    """FP8 moves it a little; without a text it is null."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    byte_tokenizer(base, tiny.VOCAB + 100)
    config = json.loads((base / "config.json").read_text())
    assert config["vocab_size"] == tiny.VOCAB  # ASCII alone is needed
    arguments = ["quantize", str(base), "--to", "fp8", "--perplexity", str(text)]
    ran = runner.invoke(app, [*arguments, "-o", str(tmp_path / "a"), "--json"])
    measured = json.loads(ran.stdout)["perplexity"]
    assert 0 < abs(measured["after"] / measured["before"] - 1) < 0.2
    ran = runner.invoke(app, [*arguments, "-o", str(tmp_path / "b")])
    assert f"perplexity: {measured['before']:.3f} before" in ran.stdout
    text.write_text("x")
    ran = runner.invoke(app, [*arguments, "-o", str(tmp_path / "c")])
    assert ran.exit_code == 2 and "has 1 tokens of this model" in ran.stderr
    text.write_bytes(b"\xff\xfe")
    ran = runner.invoke(app, [*arguments, "-o", str(tmp_path / "c")])
    assert ran.exit_code == 2 and "not readable as UTF-8" in ran.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("auto_round") is not None, reason="auto-round is installed"
)
def test_awq_without_the_extra(base: Path, tmp_path: Path) -> None:
    byte_tokenizer(base, tiny.VOCAB + 100)
    arguments = ["quantize", str(base), "--to", "awq", "-o", str(tmp_path / "out")]
    ran = runner.invoke(app, arguments)
    assert ran.exit_code == 2 and not (tmp_path / "out").exists()
    errors = [line for line in ran.stderr.splitlines() if line.startswith(("error", "hint"))]
    assert errors == [
        "error: --to awq needs the extra quantize: No module named 'auto_round'",
        "hint: pip install -e '.[quantize]'",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--to", "gptq"], 2, "gptq"),
        (["--to", "awq", "--method", "gptq"], 2, "auto-round"),
        (["--to", "awq", "--calibration", "/nowhere.txt"], 2, "/nowhere.txt is not a file"),
        (["--to", "fp8", "--perplexity", "/nowhere.txt"], 2, "/nowhere.txt is not a file"),
    ],
)
def test_wrong_arguments(
    base: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    ran = runner.invoke(app, ["quantize", str(base), "-o", str(tmp_path / "out"), *arguments])
    assert ran.exit_code == code and words in ran.stderr


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    ran = runner.invoke(app, ["quantize", "./nowhere", "--to", "fp8", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 2 and "nowhere" in ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_autoawq_needs_a_cuda_device(base: Path, tmp_path: Path) -> None:
    byte_tokenizer(base, tiny.VOCAB + 100)
    arguments = ["quantize", str(base), "--to", "awq", "--method", "autoawq"]
    ran = runner.invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert ran.exit_code == 2 and not (tmp_path / "out").exists()
    assert "it needs a CUDA device" in ran.stderr and "--method auto-round" in ran.stderr

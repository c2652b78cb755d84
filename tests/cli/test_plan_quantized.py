"""`mlora plan` of quantised bases says what serving allocates, and what serving would refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.engine.assemble import build_engine
from multilora_cli.engine.config import EngineConfig
from tests.models import tiny
from tests.models.quantized_kit import KINDS, WIDE, quantise_checkpoint

runner = CliRunner()


def fleet_of(base: Path, quantization: str = "auto") -> Path:
    path = base.parent / f"{quantization}.yaml"
    path.write_text(f"base: {{model: ./{base.name}, name: b, quantization: {quantization}}}\n")
    return path


def planned(fleet: Path, *arguments: str, code: int = 0) -> Any:
    result = runner.invoke(app, ["plan", str(fleet), "--json", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    model = tiny.make_model("llama", **WIDE)
    bases = {"none": tiny.save_model(model, folder / "none")}
    for name in ("awq-128", "fp8-block", "awq-skips"):
        bases[name] = folder / name
        quantise_checkpoint(model, bases[name], KINDS[name])
    return bases


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("awq-128", "auto"), ("awq-skips", "awq"), ("fp8-block", "none"), ("none", "fp8")],
)
def test_serving_allocates_what_is_planned(
    bases: dict[str, Path], name: str, quantization: str
) -> None:
    """Without a card both plan a CPU: weights dequantised to float32."""
    fleet = fleet_of(bases[name], quantization)
    plan = planned(fleet)
    config = EngineConfig(
        model_path=str(bases[name]), quantization=quantization, device="cpu", pool_bytes=2**22
    )
    ready = build_engine(config).parts.ready
    assert plan["memory"]["weights"] == ready.planned["weights"] == ready.allocated["weights"]
    assert "dequantised" in plan["storage"]


def test_cards_hold_the_packed_form(bases: dict[str, Path]) -> None:
    """An A100 multiplies no FP8: its weights are padded to 128 inputs, none here; an H200 does."""
    storage = {
        card: planned(fleet_of(bases["fp8-block"]), "--gpu", card)["storage"]
        for card in ("h200", "a100-80")
    }
    assert storage == {
        "h200": "FP8, a scale per block", "a100-80": "FP8, a scale per block, weight-only",
    }  # fmt: skip


def test_a_what_if_that_needs_another_checkpoint_says_so(bases: dict[str, Path]) -> None:
    asked = ("--gpu", "h200", "--set", "base.quantization=awq")
    plan = planned(fleet_of(bases["none"], "none"), *asked)
    assert plan["fits"] and "mlora quantize" in plan["warnings"][0]
    result = runner.invoke(app, ["plan", str(fleet_of(bases["none"], "awq")), "--gpu", "h200"])
    assert result.exit_code == 2 and "mlora quantize" in result.stderr
    assert planned(fleet_of(bases["none"], "fp8"), "--gpu", "h200")["warnings"] == []


def test_what_serving_refuses_is_no_plan(bases: dict[str, Path]) -> None:
    """FP8 is not made of an AWQ checkpoint; in a table it is one row's answer."""
    fleet = fleet_of(bases["awq-128"], "fp8")
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200"])
    assert result.exit_code == 2 and "the checkpoint is awq" in result.stderr
    rows = planned(fleet, "--gpu", "h200", "--set", "base.quantization=auto,fp8")
    assert [row["plan"]["fits"] for row in rows] == [True, False]
    assert "the checkpoint is awq" in rows[1]["plan"]["problems"][0]

"""`mlora verify` on bases that are stored quantised: exact on what is stored, drift from the 16-bit
model that it was made of."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.engine import device_memory
from tests.engine.test_engine_quantized import placed_packed
from tests.models import tiny
from tests.models.quantized_kit import KINDS, quantise_checkpoint
from tests.signature import byte_tokenizer, peft_adapter

runner = CliRunner()


class Case:
    """A 16-bit base, the same base as `kind` stores it, and an adapter trained on the former."""

    def __init__(self, kind: str, folder: Path) -> None:
        shape = {**KINDS[kind].shape, "vocab_size": 300}
        model = tiny.make_model("llama", seed=2, gain=1.0, **shape)
        self.plain = tiny.save_model(model, folder / "tiny-base")
        self.stored = folder / "tiny-base-quantized"
        quantise_checkpoint(model, self.stored, KINDS[kind])
        for base in (self.plain, self.stored):
            byte_tokenizer(base, 300)
        how: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 8}
        self.adapter = peft_adapter(self.plain, folder / "a", **how)

    def verify(self, *arguments: object, code: int = 0) -> Any:
        """One adapter on the stored base."""
        asked = ["verify", str(self.adapter), "--base", str(self.stored), "--json"]
        result = runner.invoke(app, [*asked, *map(str, arguments)])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


@pytest.fixture(params=["awq-128", "w4a16-asymmetric-32", "fp8-block"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


def test_exact_on_what_is_stored_and_a_drift_from_what_it_was(case: Case) -> None:
    """A-CFG-31: the reference takes the dequantised weights, the 16-bit model none of them."""
    (adapter,) = case.verify()["adapters"]
    assert adapter["verdict"] == "exact" and adapter["parity"]["largest"] < 1e-3
    assert adapter["base"]["match"] == "stored_otherwise"
    allowed = ("--set", "verify.max_drift=10")
    value = case.verify("--drift", "--against", case.plain, *allowed)
    (adapter,) = value["adapters"]
    assert 1e-5 < adapter["drift"]["mean_kl"] < 1 and 1e-5 < value["base"]["drift"]["mean_kl"] < 1
    result = runner.invoke(
        app, ["verify", str(case.adapter), "--base", str(case.stored), "--drift"]
    )
    assert result.exit_code == 2 and "--against MODEL" in result.stderr


def test_exact_in_the_form_that_a_card_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4-bit weights packed for the kernel, its reference multiplying."""
    case = Case("awq-128", tmp_path)
    monkeypatch.setattr(device_memory, "placed", placed_packed)
    (adapter,) = case.verify()["adapters"]
    assert adapter["verdict"] == "exact" and adapter["parity"]["largest"] < 1e-3

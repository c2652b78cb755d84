"""What a load has to say of an adapter reaches the log."""

import logging
from pathlib import Path

import pytest
import torch

from tests.adapters.adapter_oracle import edit_tensors
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig, adapter_ref
from tests.signature import signature_adapter


def test_an_adapter_that_changes_nothing_is_logged_at_its_load(
    fleet: SignatureFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = signature_adapter(tmp_path / "idle", 20)
    edit_tensors(
        folder, lambda ts: {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in ts.items()}
    )
    rig = Rig(fleet.base)
    with caplog.at_level(logging.WARNING):
        rig.ask([5, 6], adapter_ref(fleet.base, folder, "idle"), max_tokens=1)
        rig.ask([5, 6], fleet.adapter(33), max_tokens=1)
    (record,) = [r for r in caplog.records if r.name.endswith("adapter_reader")]
    assert (
        "adapter idle (" in record.message
        and "every product of lora_B and lora_A is zero" in record.message
    )

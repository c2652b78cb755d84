"""The base that loading is measured with is one that loads."""

from pathlib import Path

import pytest
import random_base
import torch

from multilora_cli.models.loader import load_decoder
from multilora_cli.sizing.geometry import read_geometry


def test_a_written_base_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(random_base, "SHARD_BYTES", 2**18)
    random_base.write(tmp_path, "tiny", "cpu")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder = load_decoder(tmp_path, read_geometry(tmp_path), torch.device("cpu"), torch.float32)
    assert all(bool(tensor.isfinite().all()) for tensor in decoder.tensors.values())

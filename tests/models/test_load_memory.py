"""What loading leaves of a card's memory: packed weights lie behind one another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.bench.geometries import config_folder
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.quantized import QuantisedLinears
from multilora_cli.models.quantized_tensors import outline_linears
from multilora_cli.sizing.allocator import ENDS
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.quantization import FP8
from multilora_kernels.launch import H200
from tests.engine.fake_card import CARD, Trace, fake_card


def kept_beside_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of eight layers of an 8B that are made FP8 while they load: bytes that stay mapped, and no
    tensor holds."""
    geometry = read_geometry(config_folder("llama-3-8b", "none", folder))
    windows = geometry.sliding_windows[:8]
    geometry = replace(geometry, num_layers=8, sliding_windows=windows)
    stored = outline_linears(geometry, replace(FP8, at_load=True))

    def fetch(_: QuantisedLinears, key: str, entry: TensorEntry) -> torch.Tensor:
        return torch.empty(entry.shape, device=CARD).to(torch.bfloat16)

    monkeypatch.setattr(QuantisedLinears, "_checked", fetch)
    with fake_card(H200), Trace(library=0) as trace:
        linears = QuantisedLinears(stored, geometry, torch.bfloat16, lambda _: torch.empty(0))
        decoder = Decoder(geometry, torch.bfloat16, CARD, linears)
        return trace.memory.emptied() - decoder.weight_bytes


def test_what_weights_are_made_from_leaves_no_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_beside_weights(tmp_path, monkeypatch) <= ENDS
    monkeypatch.setattr(QuantisedLinears, "__call__", _not_copied)
    assert kept_beside_weights(tmp_path, monkeypatch) > 2 * ENDS


def _not_copied(linears: QuantisedLinears, layer: int, group: str) -> object:
    from multilora_cli.sizing.geometry import projection_name
    from multilora_kernels.layout import GROUPS

    return linears._packed([projection_name(layer, module) for module in GROUPS[group]])

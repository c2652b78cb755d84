"""What a launch asks of a card beside memory: no more programs a dimension than there may be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from multilora_cli.bench.geometries import config_folder
from multilora_cli.engine.largest_step import largest_step
from multilora_cli.sizing.geometry import read_geometry
from multilora_kernels.fp8_gemm import run_scaled
from multilora_kernels.launch import H200, RTX_4090, Chip
from tests.engine.fake_card import CARD, fake_card, fake_engine

MOST = (2**31 - 1, 65_535, 65_535)
ROWS = 70_000


@pytest.mark.parametrize("storage", ["none", "fp8", "fp8 by block", "awq"])
@pytest.mark.parametrize("chip", [H200, RTX_4090], ids=lambda chip: chip.name)
def test_a_step_of_many_tokens(storage: str, chip: Chip, tmp_path: Path) -> None:
    """As large as limits.max_num_batched_tokens may ask for: the second dimension of a grid ends
    before that."""
    geometry = read_geometry(config_folder("llama-3-8b", "none", tmp_path))
    launched: set[str] = set()

    def check(kernel: JITFunction[Any], *_: Any, grid: tuple[int, ...], **__: Any) -> None:
        launched.add(kernel.__name__)
        assert all(0 < size <= most for size, most in zip(grid, MOST, strict=False)), (
            kernel.__name__,
            grid,
        )

    # Undone within the card, which has its own launches: else its stay behind for other tests.
    with fake_card(chip), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", check)
        decoder, builder = fake_engine(geometry, storage, ROWS, 4096, num_layers=1)
        largest_step(decoder, builder, ROWS, 4096)
        if storage == "fp8":  # how fp16 is multiplied
            weight = decoder.layers[0].attention.out.weight
            xq = torch.empty(ROWS, geometry.hidden_size, dtype=torch.float8_e4m3fn, device=CARD)
            run_scaled(xq, torch.ones(ROWS, device=CARD), weight._weight, torch.float16)
    assert len(launched) > 8 and ("scale_kernel" in launched) == (storage == "fp8")


def test_as_many_sequences_as_limits_allow_without_grouped_heads(tmp_path: Path) -> None:
    """4,096 rows of 40 KV heads."""
    geometry = read_geometry(config_folder("llama-2-13b", "none", tmp_path))
    with fake_card(H200):
        decoder, builder = fake_engine(geometry, "none", 4096, 4096, num_layers=1)
        largest_step(decoder, builder, 4096, 4096)

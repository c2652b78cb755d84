"""add_lora: y[t] += B_s (A_s x[t]) for the slot s of every row t, any mix of ranks, in place.

    y    [T, sum of d_out over the group's modules]   bf16 | fp16 | fp32, written in place
    x    [T, d_in]                                    same dtype, also that of the adapter images
    pool [num_pages, page_bytes]                      uint8, holds the images
    A_s  [r, d_in], B_s [d_out, r] of one layer, tiled as `layout` says; scaling is folded into B

Accumulation is fp32. Rows of slot 0 and modules an adapter does not have are left as they are. A
row's result depends on its own adapter alone: nothing is combined across adapters.
"""

import torch

from multilora_kernels.layout import GROUPS
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable, PlacedBlock


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    layer: int,
    group: str,
) -> None:
    """Add the adapters' deltas of one projection group of one layer to `y`, in place."""
    if not segments.has_adapters:
        return
    _check(y, x, pool, table, segments, group)
    add_lora_ref(y, x, pool, table, segments, layer, group)


def _check(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    group: str,
) -> None:
    shapes = [table.shapes[module] for module in GROUPS[group]]
    assert x.dtype == y.dtype and x.device == y.device == pool.device
    assert x.shape == (segments.num_tokens, shapes[0][0]), (x.shape, segments.num_tokens, shapes)
    assert y.shape == (segments.num_tokens, sum(d_out for _, d_out in shapes)), y.shape
    assert x.stride(1) == 1 and y.stride(1) == 1
    assert pool.dtype == torch.uint8 and pool.is_contiguous()


def add_lora_ref(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    layer: int,
    group: str,
) -> None:
    """The same in torch: the CPU path, and what the kernels are tested against."""
    weights = pool.view(-1).view(x.dtype)
    for slot, rows in segments.rows_by_slot(x.device):
        x_rows: torch.Tensor | None = None
        column = 0
        for module in GROUPS[group]:
            d_out = table.shapes[module][1]
            placed = table.blocks(slot, layer, module)
            if placed:
                if x_rows is None:
                    x_rows = x.index_select(0, rows).float()
                delta = _delta(x_rows, weights, placed, d_out)
                target = y[:, column : column + d_out]
                summed = target.index_select(0, rows).float() + delta
                target.index_copy_(0, rows, summed.to(y.dtype))
            column += d_out


def _delta(
    x_rows: torch.Tensor, weights: torch.Tensor, placed: tuple[PlacedBlock, ...], d_out: int
) -> torch.Tensor:
    """B (A x) of one adapter's module, fp32 [rows, d_out], block by block from the pool."""
    delta = x_rows.new_zeros(len(x_rows), d_out)
    shrunk: dict[int, torch.Tensor] = {}
    for place in placed:
        block = place.block
        if block.matrix != "a":
            continue
        a = weights.as_strided(
            (block.rank_width, block.length), (block.length, 1), place.element
        ).float()
        part = x_rows[:, block.start : block.start + block.length] @ a.T
        before = shrunk.get(block.rank_start)
        shrunk[block.rank_start] = part if before is None else before + part
    for place in placed:
        block = place.block
        if block.matrix != "b":
            continue
        b = weights.as_strided(
            (block.length, block.rank_width), (block.rank_width, 1), place.element
        ).float()
        delta[:, block.start : block.start + block.length] += shrunk[block.rank_start] @ b.T
    return delta

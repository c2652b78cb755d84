"""add_lora: y[t] += B_s (A_s x[t]) for the slot s of every row t, any mix of ranks, in place.

    y    [T, sum of d_out over the group's modules]   bf16 | fp16 | fp32, written in place
    x    [T, d_in]                                    same dtype, also that of the adapter images
    pool [num_pages, page_bytes]                      uint8, holds the images
    A_s  [r, d_in], B_s [d_out, r] of one layer, tiled as `layout` says; scaling is folded into B

Accumulation is fp32. Rows of slot 0 and modules an adapter does not have are left as they are. A
row's result depends on its own adapter alone: nothing is combined across adapters.

`multiply_add_lora` is the same behind the base multiply that makes y: A x needs no y, so a captured
step may run it beside that multiply, on a second stream. Kernels, their order of sums and so the
bits are those of `add_lora`.
"""

from collections.abc import Callable
from functools import partial

import torch

from multilora_kernels.launch import on_host
from multilora_kernels.layout import GROUPS
from multilora_kernels.segments import Segments
from multilora_kernels.sgmv_expand import sgmv_expand, sgmv_expand_ref
from multilora_kernels.sgmv_shrink import sgmv_shrink, sgmv_shrink_ref
from multilora_kernels.side_stream import SideStream
from multilora_kernels.table import AdapterTable


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
    if on_host(x.device):
        return add_lora_ref(y, x, pool, table, segments, layer, group)
    lists = segments.lists(table)
    work = lists.groups[group]
    if work.num_tiles == 0:
        return None
    weights = pool.view(-1).view(x.dtype)
    planes = sgmv_shrink(x, weights, table, lists, work, layer)
    return sgmv_expand(y, planes, weights, table, lists, work, layer)


def multiply_add_lora(
    multiply: Callable[[], torch.Tensor],
    x: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    layer: int,
    group: str,
    side: SideStream,
) -> torch.Tensor:
    """`multiply()`, a new y [T, sum of d_out] from x [T, d_in], with the adapters' deltas added.

    Where the launch choice says so, the shrink runs beside the multiply. All groups share the
    planes: a later shrink follows the expand before it by way of x, which is made from its y.
    """
    lists = segments.lists(table)
    work = lists.groups[group]
    priority = work.choice.side_priority
    if priority is None or work.num_tiles == 0:
        y = multiply()
        add_lora(y, x, pool, table, segments, layer, group)
        return y
    weights = pool.view(-1).view(x.dtype)
    shrink = partial(sgmv_shrink, x, weights, table, lists, work, layer)
    y, planes = side.beside(multiply, shrink, priority)
    _check(y, x, pool, table, segments, group)
    sgmv_expand(y, planes, weights, table, lists, work, layer)
    return y


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
    modules = GROUPS[group]
    widths = [table.shapes[module][1] for module in modules]
    for slot, rows in segments.rows_by_slot(x.device):
        found = [table.runs(slot, layer, module) for module in modules]
        if not any(found):
            continue
        x_rows = x.index_select(0, rows).float()
        column = 0
        parts: list[tuple[int, torch.Tensor]] = []
        for runs, width in zip(found, widths, strict=True):
            if runs:
                shrunk = sgmv_shrink_ref(x_rows, weights, runs)
                parts.append((column, sgmv_expand_ref(shrunk, weights, runs)))
            column += width
        if len(parts) == len(modules):  # all columns at once
            parts = [(0, torch.cat([delta for _, delta in parts], dim=1))]
        for start, delta in parts:
            target = y[:, start : start + delta.shape[1]]
            summed = target.index_select(0, rows).float() + delta
            target.index_copy_(0, rows, summed.to(y.dtype))

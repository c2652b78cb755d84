"""scale_shift: y[t, c] = g_s[c] * y[t, c] + b_s[c] for the slot s of every row t, in place.

    y      [T, sum of d_out over the group's modules]  bf16 | fp16 | fp32, written in place
    pool   [num_pages, page_bytes]                     uint8, holds g_s and b_s in float32
    table  names, per slot, module and layer, where their pieces lie

g_s is DoRA's magnitude over the norm of the adapted row, b_s what trained biases add; where an
adapter has only one of them, or only on some modules, the rest of y stays as it is, and so do rows
without either. It runs after `add_lora`, and only in steps of which some row needs it.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import on_host
from multilora_kernels.layout import GROUPS, MODULES, VectorKind
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

_BLOCK = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["layer_start"])
def scale_shift_kernel(
    y_ptr, pool_ptr, row_slots_ptr, cells_ptr, offsets_ptr, layer_start, stride_ym,
    FIRST: tl.constexpr, MODULES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, CELL: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slots_ptr + row)
    # Blocks of the group's modules, one after another; a block lies in one piece of a vector.
    blocks0: tl.constexpr = (D0 + BLOCK - 1) // BLOCK
    blocks1: tl.constexpr = (D1 + BLOCK - 1) // BLOCK
    block = tl.program_id(1)
    module = tl.where(block < blocks0, 0, tl.where(block < blocks0 + blocks1, 1, 2))
    d_out = tl.where(module == 0, D0, tl.where(module == 1, D1, D2))
    y_column = tl.where(module == 0, 0, tl.where(module == 1, D0, D0 + D1))
    start = block - tl.where(module == 0, 0, tl.where(module == 1, blocks0, blocks0 + blocks1))
    start *= BLOCK
    cell = tl.load(cells_ptr + slot * MODULES + FIRST + module)
    if cell >= 0:
        entry = offsets_ptr + layer_start + cell.to(tl.int64) * CELL + start // CHUNK
        scale = tl.load(entry)
        shift = tl.load(entry + (d_out + CHUNK - 1) // CHUNK)
        at = start + tl.arange(0, BLOCK)
        mask = at < d_out
        y_ptrs = y_ptr + row.to(tl.int64) * stride_ym + y_column + at
        within = start % CHUNK + tl.arange(0, BLOCK)
        y = tl.load(y_ptrs, mask=mask, other=0).to(tl.float32)
        if scale >= 0:
            y *= tl.load(pool_ptr + scale + within, mask=mask, other=0.0)
        if shift >= 0:
            y += tl.load(pool_ptr + shift + within, mask=mask, other=0.0)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_choice(d_outs: tuple[int, ...], chunk: int) -> dict[str, int]:
    """Tile and warps: 8 columns a thread, never across two pieces of a vector."""
    block = min(_BLOCK, chunk, triton.next_power_of_2(max(d_outs)))
    return {"BLOCK": block, "num_warps": max(1, min(_WARPS, block // 256))}


def scale_shift(
    y: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    layer: int,
    group: str,
) -> None:
    """Apply the adapters' vectors of one projection group of one layer to `y`, in place."""
    if not segments.has_extras(table):
        return
    modules = GROUPS[group]
    d_outs = tuple(table.shapes[module][1] for module in modules)
    assert y.shape == (segments.num_tokens, sum(d_outs)) and y.stride(1) == 1
    assert pool.dtype == torch.uint8 and pool.is_contiguous() and y.device == pool.device
    if on_host(y.device):
        scale_shift_ref(y, pool, table, segments, layer, group)
        return
    assert table.geometry is not None
    choice = launch_choice(d_outs, table.geometry.vector_chunk)
    sizes = (*d_outs, 0, 0)
    grid = (len(y), sum(triton.cdiv(d_out, choice["BLOCK"]) for d_out in d_outs))
    scale_shift_kernel[grid](
        y, pool.view(-1).view(torch.float32), segments.row_slots, table.vector_cells,
        table.offsets, layer * table.num_cells * table.cell_width, y.stride(0),
        FIRST=MODULES.index(modules[0]), MODULES=len(MODULES), D0=sizes[0], D1=sizes[1],
        D2=sizes[2], CELL=table.cell_width, CHUNK=table.geometry.vector_chunk, **choice,
    )  # fmt: skip


def scale_shift_ref(
    y: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
    layer: int,
    group: str,
) -> None:
    """The same in torch: the CPU path, and what the kernel is tested against."""
    values = pool.view(-1).view(torch.float32)
    column = 0
    for module in GROUPS[group]:
        d_out = table.shapes[module][1]
        for slot, rows in segments.rows_by_slot(y.device):
            scale = _vector(values, table, (slot, layer, module), "scale")
            shift = _vector(values, table, (slot, layer, module), "shift")
            if scale is None and shift is None:
                continue
            target = y[:, column : column + d_out]
            found = target.index_select(0, rows).float()
            if scale is not None:
                found *= scale
            if shift is not None:
                found += shift
            target.index_copy_(0, rows, found.to(y.dtype))
        column += d_out


def _vector(
    values: torch.Tensor, table: AdapterTable, key: tuple[int, int, str], kind: VectorKind
) -> torch.Tensor | None:
    """One whole vector, float32 [d_out]; None where the adapter has none."""
    pieces = table.vectors(*key, kind)
    if not pieces:
        return None
    return torch.cat([values[element : element + block.length] for block, element in pieces])

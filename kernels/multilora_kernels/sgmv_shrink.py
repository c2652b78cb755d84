"""sgmv_shrink: h[t] = A_s x[t] for the slot s of every row t, in partial sums.

    x       [T, d_in]         bf16 | fp16 | fp32
    weights flat pool         same dtype; A in tiles of [16 or 8 ranks][chunk] (see `layout`)
    planes  [plane_rows, splits, 16] in decode, [splits, plane_rows, 16] in prefill, fp32, written

A plane row is one row of one rank tile; each of `splits` programs reduces its own span of K and
writes its own plane, so there is nothing to clear and nothing is added atomically. `sgmv_expand`
adds the planes in order. Ranks beyond a tile's width come out as zero.

Decode: one program per rank tile and span, by a vector path for segments of one row. Rows that
share an adapter go through 16-row matrix tiles, of which there are few: ROW_SPLITS programs to a
span. Prefill: one program per 64 rows and span, for up to four rank tiles of any modules of the
group, so x is read once.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.lora_choice import SIDE_BY_SIDE
from multilora_kernels.table import AdapterTable, PlacedRun
from multilora_kernels.work_lists import GroupLists, WorkLists


@triton.jit
def _tile_offsets(entry, chunk, d_in, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """(first element, ranks stored, length of a row) of one A block."""
    element = tl.multiple_of(entry & -16, 16)
    width = 16 - (entry & 1).to(tl.int32) * 8
    length = tl.minimum(CHUNK, d_in - chunk * CHUNK)
    if ALIGNED:
        length = tl.multiple_of(length, 8)
    return element, width, length


@triton.jit
def _load_tile(tiles_ptr, index):
    """(cell, first row, rows and part of the share of K, first plane row) of one rank tile."""
    tile = tiles_ptr + index * 4
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def _shrink_row(
    x_ptr, stride_xm, row_ptr, a_ptr, width, length, out_ptr, k_start, d_in, next_entry_ptr,
    BLOCK_K: tl.constexpr, K_STEPS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One row by multiply and sum: all of the tile's loads are in flight at once.

    Returns the next unit's table entry, loaded in their shadow.
    """
    r = tl.arange(0, 16)
    token = tl.load(row_ptr).to(tl.int64)
    x_row = x_ptr + token * stride_xm + k_start
    h = tl.zeros([16], dtype=tl.float32)
    next_entry = tl.full([], -1, tl.int64)
    for i in tl.static_range(K_STEPS):
        k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + r[:, None] * length + k[None, :]
        a_mask = (r < width)[:, None]
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0)
            x = tl.load(x_row + k)
        else:
            k_mask = k < d_in - k_start
            a = tl.load(a_ptrs, mask=a_mask & k_mask[None, :], other=0)
            x = tl.load(x_row + k, mask=k_mask, other=0)
        if i == 0:
            next_entry = tl.load(next_entry_ptr)
        h += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(out_ptr + r, h)
    return next_entry


@triton.jit
def _shrink_rows(
    x_ptr, stride_xm, row_ptr, num_rows, a_ptr, width, length, out_ptr, k_start, d_in,
    BLOCK_M: tl.constexpr, SPAN: tl.constexpr, DOT_K: tl.constexpr, SPLIT_K: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of one adapter by matrix tiles."""
    r = tl.arange(0, 16)
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(row_ptr + m, mask=m_mask, other=0).to(tl.int64)
    x_rows = x_ptr + token * stride_xm + k_start
    acc = tl.zeros([BLOCK_M, 16], dtype=tl.float32)
    for k0 in range(0, SPAN, DOT_K):
        k = k0 + tl.arange(0, DOT_K)
        k_mask = (k < d_in - k_start)[None, :]
        a_mask = (r < width)[:, None] & k_mask
        a = tl.load(a_ptr + r[:, None] * length + k[None, :], mask=a_mask, other=0)
        x = tl.load(x_rows[:, None] + k[None, :], mask=m_mask[:, None] & k_mask, other=0)
        acc = tl.dot(x.to(COMPUTE), tl.trans(a.to(COMPUTE)), acc, input_precision=PRECISION)
    out = out_ptr + m[:, None] * (SPLIT_K * 16) + r[None, :]
    tl.store(out, acc, mask=m_mask[:, None])


@triton.jit(do_not_specialize=["layer_start"])
def shrink_decode_kernel(
    x_ptr, weights_ptr, planes_ptr, offsets_ptr, tiles_ptr, rows_ptr, counts_ptr, layer_start,
    d_in, stride_xm, CELL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, K_STEPS: tl.constexpr, SPLIT_K: tl.constexpr, DOT_K: tl.constexpr,
    ROW_SPLITS: tl.constexpr, EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        # At the very start: the expand programs load their weights while this kernel runs.
        tl.extra.cuda.gdc_launch_dependents()
    SPAN: tl.constexpr = BLOCK_K * K_STEPS
    unit = tl.program_id(0)
    stride = tl.num_programs(0)
    offsets = offsets_ptr + layer_start
    # The next unit's record and table entry are loaded while this one's weights are under way, and
    # before it is known whether there is a next (the lists are longer than any grid): what is left
    # of the chain of dependent loads is the weights themselves.
    cell, start, num_rows, plane = _load_tile(tiles_ptr, unit // SPLIT_K)
    entry = tl.load(offsets + cell * CELL + ((unit % SPLIT_K) * SPAN) // CHUNK)
    total = tl.load(counts_ptr) * SPLIT_K
    while unit < total:
        split = unit % SPLIT_K
        following = tl.minimum(unit + stride, total - 1)
        next_cell, next_start, next_rows, next_plane = _load_tile(tiles_ptr, following // SPLIT_K)
        next_entry_ptr = offsets + next_cell * CELL + ((following % SPLIT_K) * SPAN) // CHUNK
        k_start = split * SPAN
        chunk = k_start // CHUNK
        element, width, length = _tile_offsets(entry, chunk, d_in, CHUNK, ALIGNED)
        a_ptr = weights_ptr + element + (k_start - chunk * CHUNK)
        out = planes_ptr + (plane.to(tl.int64) * SPLIT_K + split) * 16
        if entry < 0:
            next_entry = tl.load(next_entry_ptr)
        elif num_rows == 1:
            next_entry = _shrink_row(
                x_ptr, stride_xm, rows_ptr + start, a_ptr, width, length, out, k_start, d_in,
                next_entry_ptr, BLOCK_K, K_STEPS, EVEN_K,
            )  # fmt: skip
        else:
            next_entry = tl.load(next_entry_ptr)
            part = (num_rows >> 16) * (SPAN // ROW_SPLITS)
            _shrink_rows(
                x_ptr, stride_xm, rows_ptr + start, num_rows & 0xFFFF, a_ptr + part, width, length,
                out, k_start + part, d_in, BLOCK_M, SPAN // ROW_SPLITS, DOT_K, SPLIT_K, COMPUTE,
                PRECISION,
            )  # fmt: skip
        unit += stride
        cell, start, num_rows, plane = next_cell, next_start, next_rows, next_plane
        entry = next_entry


@triton.jit(do_not_specialize=["layer_start", "plane_rows"])
def shrink_prefill_kernel(
    x_ptr, weights_ptr, planes_ptr, offsets_ptr, tiles_ptr, bands_ptr, rows_ptr, counts_ptr,
    layer_start, d_in, stride_xm, plane_rows, CELL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, K_STEPS: tl.constexpr, SPLIT_K: tl.constexpr,
    BAND: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPAN: tl.constexpr = BLOCK_K * K_STEPS
    column = tl.arange(0, BAND * 16)
    side = column // 16
    r = column % 16
    m = tl.arange(0, BLOCK_M)
    total = tl.load(counts_ptr + 2) * SPLIT_K
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        band = bands_ptr + (index // SPLIT_K) * 8
        split = index % SPLIT_K
        first = tl.load(band)
        num_tiles = tl.load(band + 1)
        start = tl.load(band + 2)
        num_rows = tl.load(band + 3)
        plane = tl.load(band + 4)
        k_start = split * SPAN
        chunk = k_start // CHUNK
        length = tl.minimum(CHUNK, d_in - chunk * CHUNK)
        if ALIGNED:
            length = tl.multiple_of(length, 8)
        entry = tl.full([BAND * 16], -1, tl.int64)
        for i in tl.static_range(BAND):
            cell = tl.load(tiles_ptr + (first + i) * 4, mask=i < num_tiles, other=0)
            found = tl.load(
                offsets_ptr + layer_start + cell * CELL + chunk, mask=i < num_tiles, other=-1
            )
            entry = tl.where(side == i, found, entry)
        a_mask = (entry >= 0) & (r < 16 - (entry & 1).to(tl.int32) * 8)
        a_rows = (entry & -16) + r * length + (k_start - chunk * CHUNK)
        if ALIGNED:
            a_rows = tl.multiple_of(a_rows, 8)
        m_mask = m < num_rows
        token = tl.load(rows_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
        x_rows = x_ptr + token * stride_xm + k_start
        acc = tl.zeros([BLOCK_M, BAND * 16], dtype=tl.float32)
        for step in range(K_STEPS):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            k_mask = k < d_in - k_start
            a = tl.load(
                weights_ptr + a_rows[:, None] + k[None, :],
                mask=a_mask[:, None] & k_mask[None, :], other=0,
            )  # fmt: skip
            x = tl.load(
                x_rows[:, None] + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0
            )
            acc = tl.dot(x.to(COMPUTE), tl.trans(a.to(COMPUTE)), acc, input_precision=PRECISION)
        plane_row = split.to(tl.int64) * plane_rows + plane + side[None, :] * num_rows + m[:, None]
        is_live = m_mask[:, None] & (side < num_tiles)[None, :]
        tl.store(planes_ptr + plane_row * 16 + r[None, :], acc, mask=is_live)


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """What matrix tiles are multiplied in; Triton's interpreter cannot multiply bf16."""
    if dtype == torch.float32 or triton.knobs.runtime.interpret:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def sgmv_shrink(
    x: torch.Tensor,
    weights: torch.Tensor,
    table: AdapterTable,
    lists: WorkLists,
    group: GroupLists,
    layer: int,
) -> torch.Tensor:
    """Launch the shrink of one group; returns the planes that `sgmv_expand` reads."""
    choice, shape = group.choice, group.shape
    assert x.dtype == weights.dtype and x.shape[1] == shape.d_in and x.stride(1) == 1
    splits = choice.splits(shape.d_in)
    planes = lists.planes(group.plane_rows, splits)
    layer_start = layer * table.num_cells * table.cell_width
    constants = {
        "CELL": table.cell_width,
        "CHUNK": shape.chunk,
        "BLOCK_M": choice.block_m,
        "BLOCK_K": choice.block_k,
        "K_STEPS": choice.k_steps,
        "SPLIT_K": splits,
        "ALIGNED": shape.d_in % 8 == 0,
        "PDL": choice.pdl,
        "COMPUTE": compute_dtype(x.dtype),
        "PRECISION": "ieee",
        "num_warps": choice.shrink_warps,
        "num_stages": choice.shrink_stages,
        "maxnreg": choice.shrink_registers,
    }
    if choice.is_decode:
        grid = (lists.decode_grid(group.num_tiles * splits, choice),)
        shrink_decode_kernel[grid](
            x, weights, planes, table.offsets, group.tiles, lists.rows, group.counts,
            layer_start, shape.d_in, x.stride(0),
            DOT_K=choice.dot_k, ROW_SPLITS=choice.row_splits,
            EVEN_K=shape.d_in % choice.span == 0,
            # Products of 16-bit numbers are exact in fp32; for others see `sgmv_expand`.
            enable_fp_fusion=x.dtype != torch.float32, **constants,
        )  # fmt: skip
    else:
        shrink_prefill_kernel[(group.num_bands * splits,)](
            x, weights, planes, table.offsets, group.tiles, group.bands, lists.rows, group.counts,
            layer_start, shape.d_in, x.stride(0), group.plane_rows,
            BAND=SIDE_BY_SIDE, **constants,
        )  # fmt: skip
    return planes


def sgmv_shrink_ref(
    x_rows: torch.Tensor, weights: torch.Tensor, runs: tuple[PlacedRun, ...]
) -> dict[int, torch.Tensor]:
    """A x of one adapter's rows in torch: fp32 [rows, tile width] by the tile's first rank."""
    shrunk: dict[int, torch.Tensor] = {}
    for run in runs:
        if run.matrix != "a":
            continue
        shape = (run.count, run.rank_width, run.length)
        blocks = weights[run.element :].as_strided(shape, (run.step, run.length, 1))
        a = blocks.transpose(0, 1).reshape(run.rank_width, -1).float()
        part = x_rows[:, run.start : run.start + run.count * run.length] @ a.T
        before = shrunk.get(run.rank_start)
        shrunk[run.rank_start] = part if before is None else before + part
    return shrunk

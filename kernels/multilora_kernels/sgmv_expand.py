"""sgmv_expand: y[t] += B_s h[t] for the slot s of every row t, in place.

    planes  what `sgmv_shrink` wrote, fp32; the partial sums of a row are added here, in order
    weights flat pool, dtype of y; B in tiles of [chunk][16 or 8 ranks] (see `layout`)
    y       [T, sum of d_out] bf16 | fp16 | fp32, written in place

Decode: every program reads four pieces of BLOCK_N x 16 of B side by side, whatever the rank: four
column blocks of one rank tile, two blocks of two tiles, or one block of four tiles (and then four
more, for ranks above 64). Programs of one launch thus do equal work in a batch of mixed ranks, with
one tile shape and no branch per rank class. Prefill: one program per 64 rows and BLOCK_N columns.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.sgmv_shrink import compute_dtype
from multilora_kernels.table import AdapterTable, PlacedBlock
from multilora_kernels.work_lists import GroupLists, WorkLists


@triton.jit
def _entries(
    offsets_ptr,
    tiles_ptr,
    first,
    num_tiles,
    t,
    side,
    n_start,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Table entries of the four pieces, int64 [4]; -1 where there is no tile."""
    piece = tl.arange(0, 4)
    entry = tl.full([4], -1, tl.int64)
    for i in tl.static_range(4):
        tile = t + i % side
        chunk = (n_start + (i // side) * BLOCK_N) // CHUNK
        is_tile = (tile < num_tiles) & (A_CHUNKS + chunk < CELL)
        cell = tl.load(tiles_ptr + (first + tile) * 4, mask=is_tile, other=0)
        found = tl.load(offsets_ptr + cell * CELL + A_CHUNKS + chunk, mask=is_tile, other=-1)
        entry = tl.where(piece == i, found, entry)
    return entry


@triton.jit
def _load_b(weights_ptr, entry, in_chunk, n_mask):
    """The four pieces of B, [4, BLOCK_N, 16]; zero beyond a tile's width and where none is."""
    k = tl.arange(0, 16)
    width = 16 - (entry & 1).to(tl.int32) * 8
    element = (entry & -16)[:, None] + in_chunk * width[:, None]
    element = tl.multiple_of(element, [8, 8])
    mask = ((entry >= 0)[:, None] & n_mask)[:, :, None] & (k[None, None, :] < width[:, None, None])
    return tl.load(weights_ptr + element[:, :, None] + k[None, None, :], mask=mask, other=0)


@triton.jit
def _merge(acc, side, BLOCK_N: tl.constexpr):
    """Sums over the pieces of [4, BLOCK_N] that share columns, at every one of them."""
    pairs = tl.reshape(acc, [2, 2, BLOCK_N])
    two = tl.sum(pairs, axis=1)
    four = tl.sum(two, axis=0)
    twos = tl.broadcast_to(two[:, None, :], [2, 2, BLOCK_N])
    fours = tl.broadcast_to(four[None, None, :], [2, 2, BLOCK_N])
    merged = tl.where(side == 1, pairs, tl.where(side == 2, twos, fours))
    return tl.reshape(merged, [4, BLOCK_N])


@triton.jit
def _expand_row(
    planes_ptr,
    weights_ptr,
    y_ptr,
    stride_ym,
    offsets_ptr,
    tiles_ptr,
    row_ptr,
    first,
    num_tiles,
    n_start,
    d_out,
    plane,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row by multiply and sum: 1, 2 or 4 rank tiles side by side."""
    piece = tl.arange(0, 4)
    side = tl.where(num_tiles >= 3, 4, num_tiles)
    n = (n_start + (piece // side) * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    n_mask = n < d_out
    # One of the pieces that share columns stores their sum.
    is_stored = n_mask & (piece % side == 0)[:, None]
    token = tl.load(row_ptr).to(tl.int64)
    y_ptrs = y_ptr + token * stride_ym + n
    prior = tl.load(y_ptrs, mask=is_stored, other=0)
    k = tl.arange(0, 16)
    s = tl.arange(0, SPLITS)
    acc = tl.zeros([4, BLOCK_N], dtype=tl.float32)
    for t in range(0, num_tiles, side):
        entry = _entries(
            offsets_ptr, tiles_ptr, first, num_tiles, t, side, n_start,
            CELL, CHUNK, A_CHUNKS, BLOCK_N,
        )  # fmt: skip
        b = _load_b(weights_ptr, entry, n % CHUNK, n_mask)
        if PDL:
            tl.extra.cuda.gdc_wait()
        plane_row = (plane + t + piece % side).to(tl.int64) * SPLIT_K
        h_ptrs = planes_ptr + (plane_row[:, None, None] + s[None, :, None]) * 16 + k[None, None, :]
        h_mask = (entry >= 0)[:, None, None] & (s < SPLIT_K)[None, :, None]
        h = tl.sum(tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg"), axis=1)
        acc += tl.sum(b.to(tl.float32) * h[:, None, :], axis=2)
    y = (prior.to(tl.float32) + _merge(acc, side, BLOCK_N)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=is_stored)


@triton.jit
def _expand_rows(
    planes_ptr,
    weights_ptr,
    y_ptr,
    stride_ym,
    offsets_ptr,
    tiles_ptr,
    row_ptr,
    first,
    num_tiles,
    n_start,
    d_out,
    plane,
    num_rows,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Up to BLOCK_M rows of one adapter and ROWS_N columns by matrix tiles."""
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(row_ptr + m, mask=m_mask, other=0).to(tl.int64)
    n = n_start + tl.arange(0, ROWS_N)
    n_mask = n < d_out
    y_ptrs = y_ptr + (token * stride_ym)[:, None] + n[None, :]
    y_mask = m_mask[:, None] & n_mask[None, :]
    prior = tl.load(y_ptrs, mask=y_mask, other=0)
    chunk = n_start // CHUNK
    k = tl.arange(0, 16)
    acc = tl.zeros([BLOCK_M, ROWS_N], dtype=tl.float32)
    for t in range(0, num_tiles):
        cell = tl.load(tiles_ptr + (first + t) * 4)
        entry = tl.load(offsets_ptr + cell * CELL + A_CHUNKS + chunk)
        width = tl.multiple_of(16 - (entry & 1).to(tl.int32) * 8, 8)
        element = tl.multiple_of(entry & -16, 16)
        b_ptrs = weights_ptr + element + (n - chunk * CHUNK)[:, None] * width + k[None, :]
        b_mask = n_mask[:, None] & (k < width)[None, :] & (entry >= 0)
        b = tl.load(b_ptrs, mask=b_mask, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        plane_row = (plane + t * num_rows + m).to(tl.int64) * SPLIT_K
        h_ptrs = planes_ptr + plane_row[:, None] * 16 + k[None, :]
        h_mask = m_mask[:, None] & (entry >= 0)
        h = tl.zeros([BLOCK_M, 16], dtype=tl.float32)
        for i in range(SPLIT_K):
            h += tl.load(h_ptrs + i * 16, mask=h_mask, other=0.0, cache_modifier=".cg")
        acc = tl.dot(h.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
    tl.store(y_ptrs, (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit(do_not_specialize=["layer_start"])
def expand_decode_kernel(
    planes_ptr,
    weights_ptr,
    y_ptr,
    offsets_ptr,
    tiles_ptr,
    tasks_ptr,
    rows_ptr,
    counts_ptr,
    layer_start,
    stride_ym,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    task_id = tl.program_id(0)
    stride = tl.num_programs(0)
    task = tasks_ptr + task_id * 8
    first = tl.load(task)
    num_tiles = tl.load(task + 1)
    n_start = tl.load(task + 2)
    y_column = tl.load(task + 3)
    start = tl.load(task + 4)
    num_rows = tl.load(task + 5)
    plane = tl.load(task + 6)
    d_out = tl.load(task + 7)
    total = tl.load(counts_ptr + 1)
    while task_id < total:
        if ALIGNED:
            y_column = tl.multiple_of(y_column, 8)
        n_start = tl.multiple_of(n_start, 16)
        y_start = y_ptr + y_column
        offsets = offsets_ptr + layer_start
        if num_rows == 1:
            _expand_row(
                planes_ptr, weights_ptr, y_start, stride_ym, offsets, tiles_ptr, rows_ptr + start,
                first, num_tiles, n_start, d_out, plane,
                CELL, CHUNK, A_CHUNKS, BLOCK_N, SPLIT_K, SPLITS, PDL,
            )  # fmt: skip
        else:
            _expand_rows(
                planes_ptr, weights_ptr, y_start, stride_ym, offsets, tiles_ptr, rows_ptr + start,
                first, num_tiles, n_start, d_out, plane, num_rows,
                CELL, CHUNK, A_CHUNKS, BLOCK_M, ROWS_N, SPLIT_K, PDL, COMPUTE, PRECISION,
            )  # fmt: skip
        task_id += stride
        task = tasks_ptr + task_id * 8
        is_listed = task_id < total
        first = tl.load(task, mask=is_listed, other=0)
        num_tiles = tl.load(task + 1, mask=is_listed, other=0)
        n_start = tl.load(task + 2, mask=is_listed, other=0)
        y_column = tl.load(task + 3, mask=is_listed, other=0)
        start = tl.load(task + 4, mask=is_listed, other=0)
        num_rows = tl.load(task + 5, mask=is_listed, other=0)
        plane = tl.load(task + 6, mask=is_listed, other=0)
        d_out = tl.load(task + 7, mask=is_listed, other=0)


@triton.jit(do_not_specialize=["layer_start", "plane_rows"])
def expand_prefill_kernel(
    planes_ptr,
    weights_ptr,
    y_ptr,
    offsets_ptr,
    tiles_ptr,
    tasks_ptr,
    rows_ptr,
    layer_start,
    stride_ym,
    plane_rows,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    task = tasks_ptr + tl.program_id(0) * 8
    first = tl.load(task)
    num_tiles = tl.load(task + 1)
    n_start = tl.load(task + 2)
    y_column = tl.load(task + 3)
    start = tl.load(task + 4)
    num_rows = tl.load(task + 5)
    plane = tl.load(task + 6)
    d_out = tl.load(task + 7)
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(rows_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
    n = n_start + tl.arange(0, BLOCK_N)
    n_mask = n < d_out
    y_ptrs = y_ptr + (token * stride_ym + y_column)[:, None] + n[None, :]
    y_mask = m_mask[:, None] & n_mask[None, :]
    prior = tl.load(y_ptrs, mask=y_mask, other=0)
    chunk = n_start // CHUNK
    k = tl.arange(0, 16)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for t in range(0, num_tiles):
        cell = tl.load(tiles_ptr + (first + t) * 4)
        entry = tl.load(offsets_ptr + layer_start + cell * CELL + A_CHUNKS + chunk)
        width = tl.multiple_of(16 - (entry & 1).to(tl.int32) * 8, 8)
        element = tl.multiple_of(entry & -16, 16)
        b_ptrs = weights_ptr + element + (n - chunk * CHUNK)[:, None] * width + k[None, :]
        b_mask = n_mask[:, None] & (k < width)[None, :] & (entry >= 0)
        b = tl.load(b_ptrs, mask=b_mask, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        h_ptrs = planes_ptr + (plane + t * num_rows + m).to(tl.int64)[:, None] * 16 + k[None, :]
        h_mask = m_mask[:, None] & (entry >= 0)
        h = tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            h_ptrs += plane_rows.to(tl.int64) * 16
            h += tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
        acc = tl.dot(h.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
    y = (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=y_mask)


def sgmv_expand(
    y: torch.Tensor,
    planes: torch.Tensor,
    weights: torch.Tensor,
    table: AdapterTable,
    lists: WorkLists,
    group: GroupLists,
    layer: int,
) -> None:
    """Launch the expand of one group, adding to `y` in place."""
    choice, shape = group.choice, group.shape
    assert y.dtype == weights.dtype and y.shape[1] == sum(shape.d_outs) and y.stride(1) == 1
    splits = choice.splits(shape.d_in)
    layer_start = layer * table.num_cells * table.cell_width
    constants = {
        "CELL": table.cell_width,
        "CHUNK": shape.chunk,
        "A_CHUNKS": -(-shape.d_in // shape.chunk),
        "BLOCK_M": choice.block_m,
        "BLOCK_N": choice.block_n,
        "SPLIT_K": splits,
        "PDL": choice.pdl,
        "COMPUTE": compute_dtype(y.dtype),
        "PRECISION": "ieee",
        "num_warps": choice.expand_warps,
        "maxnreg": choice.expand_registers,
        **({"launch_pdl": True} if choice.pdl else {}),
    }
    if choice.is_decode:
        cap = choice.programs_per_sm * lists.chip.num_sms
        expand_decode_kernel[(max(1, min(group.num_tasks, cap)),)](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows, group.counts,
            layer_start, y.stride(0), ROWS_N=choice.rows_n, SPLITS=triton.next_power_of_2(splits),
            ALIGNED=all(d_out % 8 == 0 for d_out in shape.d_outs), **constants,
        )  # fmt: skip
    else:
        expand_prefill_kernel[(group.num_tasks,)](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows,
            layer_start, y.stride(0), group.plane_rows, **constants,
        )  # fmt: skip


def sgmv_expand_ref(
    shrunk: dict[int, torch.Tensor], weights: torch.Tensor, placed: tuple[PlacedBlock, ...]
) -> torch.Tensor:
    """B h of one adapter's rows in torch: fp32 [rows, d_out] from `sgmv_shrink_ref`'s tiles."""
    columns: dict[int, torch.Tensor] = {}
    for place in placed:
        block = place.block
        if block.matrix != "b":
            continue
        shape, strides = (block.length, block.rank_width), (block.rank_width, 1)
        b = weights.as_strided(shape, strides, place.element).float()
        part = shrunk[block.rank_start] @ b.T
        before = columns.get(block.start)
        columns[block.start] = part if before is None else before + part
    return torch.cat([columns[start] for start in sorted(columns)], dim=1)

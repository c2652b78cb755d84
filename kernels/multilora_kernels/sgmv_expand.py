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
from multilora_kernels.table import AdapterTable, PlacedRun
from multilora_kernels.work_lists import GroupLists, WorkLists

# In decode, software pipelining would hoist loads of the planes above the wait for the shrink:
# wrong sums. In prefill the wait comes before the loop.
DECODE_STAGES, PREFILL_STAGES = 1, 3


@triton.jit
def _load_task(task, Y_UNIT: tl.constexpr):
    """First tile, tiles, first column, column in y, first row, rows, first plane row, d_out."""
    first, num_tiles = tl.load(task), tl.load(task + 1)
    # Stored in units, so that the compiler knows what they are multiples of.
    n_start, y_column = tl.load(task + 2) * 16, tl.load(task + 3) * Y_UNIT
    d_out = tl.load(task + 7) * Y_UNIT
    start, num_rows, plane = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
    return first, num_tiles, n_start, y_column, start, num_rows, plane, d_out


@triton.jit
def _load_pieces(
    task_ptr, offsets_ptr, n_start, d_out, CELL: tl.constexpr, CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Table entries of a task's four pieces of B (-1: none), and log2 of the tiles side by side."""
    shift = tl.load(task_ptr + 12)
    e0 = _load_entry(tl.load(task_ptr + 8), offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
    n = n_start + (1 >> shift) * BLOCK_N
    e1 = _load_entry(tl.load(task_ptr + 9), offsets_ptr, n, d_out, CELL, CHUNK, A_CHUNKS)
    n = n_start + (2 >> shift) * BLOCK_N
    e2 = _load_entry(tl.load(task_ptr + 10), offsets_ptr, n, d_out, CELL, CHUNK, A_CHUNKS)
    n = n_start + (3 >> shift) * BLOCK_N
    e3 = _load_entry(tl.load(task_ptr + 11), offsets_ptr, n, d_out, CELL, CHUNK, A_CHUNKS)
    return e0, e1, e2, e3, shift


@triton.jit
def _load_entry(
    cell, offsets_ptr, n, d_out, CELL: tl.constexpr, CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Table entry of the block of B that holds column n; -1 where there is none."""
    is_block = (cell >= 0) & (n < d_out)
    return tl.load(offsets_ptr + cell * CELL + A_CHUNKS + n // CHUNK, mask=is_block, other=-1)


@triton.jit
def _expand_tile(
    planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, entry, n_start, d_out, plane,
    next_task_ptr, offsets_ptr, next_n_start, next_d_out, CELL: tl.constexpr, CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, one rank tile, 4 * BLOCK_N columns by multiply and sum.

    Returns the next task's table entries, loaded in the shadow of this one's weights.
    """
    token = tl.load(row_ptr).to(tl.int64)
    n = n_start + tl.arange(0, 4 * BLOCK_N)
    n_mask = n < d_out
    y_ptrs = y_ptr + token * stride_ym + n
    prior = tl.load(y_ptrs, mask=n_mask, other=0)
    k = tl.arange(0, 16)
    s = tl.arange(0, SPLITS)
    b = _load_b(weights_ptr, entry, n, n_mask, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_ptrs = planes_ptr + plane.to(tl.int64) * (SPLIT_K * 16) + s[:, None] * 16 + k[None, :]
    h_mask = (s < SPLIT_K)[:, None] & (entry >= 0)
    h = tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
    e0, e1, e2, e3, shift = _load_pieces(
        next_task_ptr, offsets_ptr, next_n_start, next_d_out, CELL, CHUNK, A_CHUNKS, BLOCK_N
    )
    delta = tl.sum(b.to(tl.float32) * tl.sum(h, axis=0)[None, :], axis=1)
    tl.store(y_ptrs, (prior.to(tl.float32) + delta).to(y_ptr.dtype.element_ty), mask=n_mask)
    return e0, e1, e2, e3, shift


@triton.jit
def _piece_b(weights_ptr, entry, n, n_mask, CHUNK: tl.constexpr):
    """The four pieces of B, [4, BLOCK_N, 16]."""
    k = tl.arange(0, 16)
    width = 16 - (entry & 1).to(tl.int32) * 8
    element = (entry & -16)[:, None] + (n % CHUNK) * width[:, None]
    element = tl.multiple_of(element, [8, 8])
    b_mask = ((entry >= 0)[:, None] & n_mask)[:, :, None]
    b_mask = b_mask & (k[None, None, :] < width[:, None, None])
    return tl.load(weights_ptr + element[:, :, None] + k[None, None, :], mask=b_mask, other=0)


@triton.jit
def _piece_h(planes_ptr, plane, entry, SPLIT_K: tl.constexpr, SPLITS: tl.constexpr):
    """Partial sums of the four pieces' tiles, [4, SPLITS, 16]."""
    s = tl.arange(0, SPLITS)
    k = tl.arange(0, 16)
    plane_row = plane.to(tl.int64) * SPLIT_K
    h_ptrs = planes_ptr + (plane_row[:, None, None] + s[None, :, None]) * 16 + k[None, None, :]
    h_mask = (entry >= 0)[:, None, None] & (s < SPLIT_K)[None, :, None]
    return tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _side_by_side(e0, e1, e2, e3):
    """Four scalars as a tensor of the pieces."""
    piece = tl.arange(0, 4)
    return tl.where(piece < 2, tl.where(piece == 0, e0, e1), tl.where(piece == 2, e2, e3))


@triton.jit
def _expand_pieces(
    planes_ptr, weights_ptr, y_ptr, stride_ym, offsets_ptr, tiles_ptr, row_ptr, first, num_tiles,
    e0, e1, e2, e3, shift, n_start, d_out, plane, next_task_ptr, next_n_start, next_d_out,
    CELL: tl.constexpr, CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, several rank tiles: four pieces side by side; returns as `_expand_tile`."""
    side = 1 << shift
    piece = tl.arange(0, 4)
    tile = piece & (side - 1)
    n = (n_start + (piece >> shift) * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    n_mask = n < d_out
    # One of the pieces that share columns stores their sum.
    is_stored = n_mask & (tile == 0)[:, None]
    token = tl.load(row_ptr).to(tl.int64)
    y_ptrs = y_ptr + token * stride_ym + n
    prior = tl.load(y_ptrs, mask=is_stored, other=0)
    entry = _side_by_side(e0, e1, e2, e3)
    b = _piece_b(weights_ptr, entry, n, n_mask, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = _piece_h(planes_ptr, plane + tile, entry, SPLIT_K, SPLITS)
    n0, n1, n2, n3, next_shift = _load_pieces(
        next_task_ptr, offsets_ptr, next_n_start, next_d_out, CELL, CHUNK, A_CHUNKS, BLOCK_N
    )
    acc = tl.sum(b.to(tl.float32) * tl.sum(h, axis=1)[:, None, :], axis=2)
    for t in range(side, num_tiles, side):  # more than four tiles: all pieces share columns
        cells = tiles_ptr + (first + t) * 4
        left = num_tiles - t
        e0 = _more(cells, 0, left, offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
        e1 = _more(cells, 1, left, offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
        e2 = _more(cells, 2, left, offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
        e3 = _more(cells, 3, left, offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
        entry = _side_by_side(e0, e1, e2, e3)
        b = _piece_b(weights_ptr, entry, n, n_mask, CHUNK)
        h = _piece_h(planes_ptr, plane + t + tile, entry, SPLIT_K, SPLITS)
        acc += tl.sum(b.to(tl.float32) * tl.sum(h, axis=1)[:, None, :], axis=2)
    pairs = tl.reshape(acc, [2, 2, BLOCK_N])
    two = tl.sum(pairs, axis=1)
    four = tl.sum(two, axis=0)
    twos = tl.broadcast_to(two[:, None, :], [2, 2, BLOCK_N])
    fours = tl.broadcast_to(four[None, None, :], [2, 2, BLOCK_N])
    merged = tl.where(shift == 0, pairs, tl.where(shift == 1, twos, fours))
    delta = tl.reshape(merged, [4, BLOCK_N])
    tl.store(y_ptrs, (prior.to(tl.float32) + delta).to(y_ptr.dtype.element_ty), mask=is_stored)
    return n0, n1, n2, n3, next_shift


@triton.jit
def _more(
    cells_ptr, i: tl.constexpr, left, offsets_ptr, n, d_out, CELL: tl.constexpr,
    CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Table entry of the i-th of the tiles that begin at `cells_ptr`, of which `left` exist."""
    cell = tl.load(cells_ptr + i * 4, mask=i < left, other=-1)
    return _load_entry(cell, offsets_ptr, n, d_out, CELL, CHUNK, A_CHUNKS)


@triton.jit
def _expand_rows(
    planes_ptr, weights_ptr, y_ptr, stride_ym, offsets_ptr, tiles_ptr, row_ptr, first, num_tiles,
    entry, n_start, d_out, plane, num_rows, CELL: tl.constexpr, CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS_N: tl.constexpr, SPLIT_K: tl.constexpr,
    PDL: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of one adapter and ROWS_N columns by matrix tiles."""
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(row_ptr + m, mask=m_mask, other=0).to(tl.int64)
    n = n_start + tl.arange(0, ROWS_N)
    n_mask = n < d_out
    y_ptrs = y_ptr + (token * stride_ym)[:, None] + n[None, :]
    y_mask = m_mask[:, None] & n_mask[None, :]
    prior = tl.load(y_ptrs, mask=y_mask, other=0)
    b = _load_b(weights_ptr, entry, n, n_mask, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = _row_h(planes_ptr, plane, num_rows, entry, BLOCK_M, SPLIT_K, COMPUTE)
    acc = tl.dot(h, tl.trans(b.to(COMPUTE)), input_precision=PRECISION)
    for t in range(1, num_tiles):
        cells = tiles_ptr + (first + t) * 4
        entry = _more(cells, 0, 1, offsets_ptr, n_start, d_out, CELL, CHUNK, A_CHUNKS)
        b = _load_b(weights_ptr, entry, n, n_mask, CHUNK)
        at = plane + t * num_rows
        h = _row_h(planes_ptr, at, num_rows, entry, BLOCK_M, SPLIT_K, COMPUTE)
        acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
    tl.store(y_ptrs, (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _row_h(
    planes_ptr, plane, num_rows, entry, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """A x of one rank tile's rows, [BLOCK_M, 16]: the partial sums of decode, in order."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, 16)
    plane_row = (plane + m).to(tl.int64) * SPLIT_K
    h_ptrs = planes_ptr + plane_row[:, None] * 16 + k[None, :]
    h_mask = (m < num_rows)[:, None] & (entry >= 0)
    h = tl.zeros([BLOCK_M, 16], dtype=tl.float32)
    for i in tl.static_range(SPLIT_K):
        h += tl.load(h_ptrs + i * 16, mask=h_mask, other=0.0, cache_modifier=".cg")
    return h.to(COMPUTE)


@triton.jit
def _load_b(weights_ptr, entry, n, n_mask, CHUNK: tl.constexpr):
    """Columns n (within one chunk) of one rank tile of B, [columns, 16]."""
    k = tl.arange(0, 16)
    width = tl.multiple_of(16 - (entry & 1).to(tl.int32) * 8, 8)
    element = tl.multiple_of(entry & -16, 16)
    b_ptrs = weights_ptr + element + (n % CHUNK)[:, None] * width + k[None, :]
    b_mask = n_mask[:, None] & (k < width)[None, :] & (entry >= 0)
    return tl.load(b_ptrs, mask=b_mask, other=0)


@triton.jit(do_not_specialize=["layer_start"])
def expand_decode_kernel(
    planes_ptr, weights_ptr, y_ptr, offsets_ptr, tiles_ptr, tasks_ptr, rows_ptr, counts_ptr,
    layer_start, stride_ym, CELL: tl.constexpr, CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_N: tl.constexpr, SPLIT_K: tl.constexpr,
    SPLITS: tl.constexpr, Y_UNIT: tl.constexpr, PDL: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(0)
    stride = tl.num_programs(0)
    offsets = offsets_ptr + layer_start
    # As in the shrink: records and table entries are loaded one task ahead.
    first, num_tiles, n_start, y_column, start, num_rows, plane, d_out = _load_task(
        tasks_ptr + task * 16, Y_UNIT
    )
    e0, e1, e2, e3, shift = _load_pieces(
        tasks_ptr + task * 16, offsets, n_start, d_out, CELL, CHUNK, A_CHUNKS, BLOCK_N
    )
    total = tl.load(counts_ptr + 1)
    while task < total:
        y_start = y_ptr + y_column
        row_ptr = rows_ptr + start
        following = tasks_ptr + tl.minimum(task + stride, total - 1) * 16
        f_first, f_tiles, f_n, f_column, f_start, f_rows, f_plane, f_d_out = _load_task(
            following, Y_UNIT
        )
        if num_rows > 1:
            f0, f1, f2, f3, f_shift = _load_pieces(
                following, offsets, f_n, f_d_out, CELL, CHUNK, A_CHUNKS, BLOCK_N
            )
            _expand_rows(
                planes_ptr, weights_ptr, y_start, stride_ym, offsets, tiles_ptr, row_ptr,
                first, num_tiles, e0, n_start, d_out, plane, num_rows,
                CELL, CHUNK, A_CHUNKS, BLOCK_M, ROWS_N, SPLIT_K, PDL, COMPUTE, PRECISION,
            )  # fmt: skip
        elif (num_tiles == 1) & (4 * BLOCK_N <= CHUNK):
            f0, f1, f2, f3, f_shift = _expand_tile(
                planes_ptr, weights_ptr, y_start, stride_ym, row_ptr, e0, n_start, d_out, plane,
                following, offsets, f_n, f_d_out,
                CELL, CHUNK, A_CHUNKS, BLOCK_N, SPLIT_K, SPLITS, PDL,
            )  # fmt: skip
        else:
            f0, f1, f2, f3, f_shift = _expand_pieces(
                planes_ptr, weights_ptr, y_start, stride_ym, offsets, tiles_ptr, row_ptr,
                first, num_tiles, e0, e1, e2, e3, shift, n_start, d_out, plane,
                following, f_n, f_d_out,
                CELL, CHUNK, A_CHUNKS, BLOCK_N, SPLIT_K, SPLITS, PDL,
            )  # fmt: skip
        task += stride
        first, num_tiles, n_start, y_column = f_first, f_tiles, f_n, f_column
        start, num_rows, plane, d_out = f_start, f_rows, f_plane, f_d_out
        e0, e1, e2, e3, shift = f0, f1, f2, f3, f_shift


@triton.jit(do_not_specialize=["layer_start", "plane_rows"])
def expand_prefill_kernel(
    planes_ptr, weights_ptr, y_ptr, offsets_ptr, tiles_ptr, tasks_ptr, rows_ptr, layer_start,
    stride_ym, plane_rows, CELL: tl.constexpr, CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N_STEPS: tl.constexpr, SPLIT_K: tl.constexpr,
    Y_UNIT: tl.constexpr, PDL: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, num_tiles, n_start, y_column, start, num_rows, plane, d_out = _load_task(
        tasks_ptr + tl.program_id(0) * 16, Y_UNIT
    )
    offsets = offsets_ptr + layer_start
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(rows_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
    y_rows = y_ptr + token * stride_ym + y_column
    cells = tiles_ptr + first * 4
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The first tile's sums serve all steps; with rank 16 or less there is no other.
    h_first = _sum_planes(planes_ptr, plane, num_rows, plane_rows, BLOCK_M, SPLIT_K, COMPUTE)
    for step in range(N_STEPS):
        n_block = n_start + step * BLOCK_N
        n = n_block + tl.arange(0, BLOCK_N)
        n_mask = n < d_out
        y_ptrs = y_rows[:, None] + n[None, :]
        y_mask = m_mask[:, None] & n_mask[None, :]
        prior = tl.load(y_ptrs, mask=y_mask, other=0)
        entry = _more(cells, 0, 1, offsets, n_block, d_out, CELL, CHUNK, A_CHUNKS)
        b = _load_b(weights_ptr, entry, n, n_mask, CHUNK)
        acc = tl.dot(h_first, tl.trans(b.to(COMPUTE)), input_precision=PRECISION)
        for t in range(1, num_tiles):
            entry = _more(cells + t * 4, 0, 1, offsets, n_block, d_out, CELL, CHUNK, A_CHUNKS)
            b = _load_b(weights_ptr, entry, n, n_mask, CHUNK)
            h = _sum_planes(
                planes_ptr, plane + t * num_rows, num_rows, plane_rows, BLOCK_M, SPLIT_K, COMPUTE
            )
            acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
        tl.store(y_ptrs, (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _sum_planes(
    planes_ptr, plane, num_rows, plane_rows, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """A x of one rank tile's rows, [BLOCK_M, 16]: the partial sums of prefill, in order."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, 16)
    h_ptrs = planes_ptr + (plane + m).to(tl.int64)[:, None] * 16 + k[None, :]
    h_mask = (m < num_rows)[:, None]
    h = tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(SPLIT_K - 1):
        h_ptrs += plane_rows.to(tl.int64) * 16
        h += tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
    return h.to(COMPUTE)


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
        "Y_UNIT": shape.y_unit,
        "PDL": choice.pdl,
        "COMPUTE": compute_dtype(y.dtype),
        "PRECISION": "ieee",
        "num_warps": choice.expand_warps,
        "num_stages": DECODE_STAGES if choice.is_decode else PREFILL_STAGES,
        "maxnreg": choice.expand_registers,
        **({"launch_pdl": True} if choice.pdl else {}),
    }
    if choice.is_decode:
        expand_decode_kernel[(lists.decode_grid(group.num_tasks, choice),)](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows, group.counts,
            layer_start, y.stride(0), ROWS_N=choice.rows_n, SPLITS=triton.next_power_of_2(splits),
            **constants,
        )  # fmt: skip
    else:
        expand_prefill_kernel[(group.num_tasks,)](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows,
            layer_start, y.stride(0), group.plane_rows, N_STEPS=choice.n_steps, **constants,
        )  # fmt: skip


def sgmv_expand_ref(
    shrunk: dict[int, torch.Tensor], weights: torch.Tensor, runs: tuple[PlacedRun, ...]
) -> torch.Tensor:
    """B h of one adapter's rows in torch: fp32 [rows, d_out] from `sgmv_shrink_ref`'s tiles."""
    found = [run for run in runs if run.matrix == "b"]
    d_out = max(run.start + run.count * run.length for run in found)
    delta: torch.Tensor | None = None
    for run in found:
        shape = (run.count, run.length, run.rank_width)
        strides = (run.step, run.rank_width, 1)
        b = weights.as_strided(shape, strides, run.element).reshape(-1, run.rank_width).float()
        part = shrunk[run.rank_start] @ b.T
        if delta is None:
            if part.shape[1] == d_out:  # one run holds the whole tile
                delta = part
                continue
            delta = part.new_zeros(len(part), d_out)
        delta[:, run.start : run.start + part.shape[1]] += part
    assert delta is not None
    return delta

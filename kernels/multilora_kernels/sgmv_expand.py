"""sgmv_expand: y[t] += B_s h[t] for the slot s of every row t, in place.

    planes  what `sgmv_shrink` wrote, fp32; the partial sums of a row are added here, in order
    weights flat pool, dtype of y; B in tiles of [chunk][16 or 8 ranks] (see `layout`)
    y       [T, sum of d_out] bf16 | fp16 | fp32, written in place

Decode: a program reads four times BLOCK_N x 16 of B, whatever the rank: that many columns of one
rank tile, half of them of two tiles, or a quarter of four tiles (and then of four more, for ranks
above 64). Programs of one launch thus do equal work in a batch of mixed ranks, each by a short path
of its own; one path for all ranks took 168 registers, three programs a multiprocessor.
Prefill: one program per 64 rows and BLOCK_N columns.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.expand_parts import entry_of, load_b, load_entries, load_task, walk_blocks
from multilora_kernels.expand_prompts import expand_prefill_kernel
from multilora_kernels.opaque import opaque
from multilora_kernels.sgmv_shrink import compute_dtype
from multilora_kernels.table import AdapterTable, PlacedRun
from multilora_kernels.work_lists import GroupLists, WorkLists

# In decode, software pipelining would hoist loads of the planes above the wait for the shrink:
# wrong sums. In prefill the wait comes before the loop.
DECODE_STAGES, PREFILL_STAGES = 1, 3


@triton.jit
def _tile_h(planes_ptr, plane, entry, SPLIT_K: tl.constexpr):
    """A x of one row and rank tile, [16]: the partial sums of decode.

    Four planes at a time: more in one load, and the compiler sends B through shared memory to meet
    their layout (60 barriers instead of 4).
    """
    s = tl.arange(0, 4)
    k = tl.arange(0, 16)
    h_ptrs = planes_ptr + plane.to(tl.int64) * (SPLIT_K * 16) + s[:, None] * 16 + k[None, :]
    h = tl.zeros([4, 16], dtype=tl.float32)
    for i in tl.static_range(0, SPLIT_K, 4):
        h_mask = (s < SPLIT_K - i)[:, None] & (entry >= 0)
        h += tl.load(h_ptrs + i * 16, mask=h_mask, other=0.0, cache_modifier=".cg")
    return tl.sum(h, axis=0)


@triton.jit
def _times(b, h):
    """B h of one row: [columns]."""
    return tl.sum(b.to(tl.float32) * h[None, :], axis=1)


@triton.jit
def _expand_row(
    planes_ptr, weights_ptr, y_ptr, stride_ym, tiles_ptr, row_ptr, first, num_tiles, e0, e1, e2,
    e3, n_start, d_out, plane, next_task_ptr, b_offsets_ptr, next_n_start, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row by multiply and sum, TILES (1, 2 or 4) rank tiles at a time.

    Returns the next task's table entries, loaded in the shadow of this one's weights.
    """
    token = tl.load(row_ptr).to(tl.int64)
    n = n_start + tl.arange(0, COLUMNS)
    n_mask = n < d_out
    y_ptrs = y_ptr + token * stride_ym + n
    b0 = load_b(weights_ptr, e0, n, n_mask, CHUNK)
    if TILES > 1:
        b1 = load_b(weights_ptr, e1, n, n_mask, CHUNK)
    if TILES > 2:
        b2 = load_b(weights_ptr, e2, n, n_mask, CHUNK)
        b3 = load_b(weights_ptr, e3, n, n_mask, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    prior = tl.load(y_ptrs, mask=n_mask, other=0, cache_modifier=".cg")
    # Or the load would sink below the products, to where y is added: one more trip to memory.
    tl.debug_barrier()
    n0, n1, n2, n3 = load_entries(next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK)
    acc = _times(b0, _tile_h(planes_ptr, plane, e0, SPLIT_K))
    if TILES > 1:
        acc += _times(b1, _tile_h(planes_ptr, plane + 1, e1, SPLIT_K))
    if TILES > 2:
        acc += _times(b2, _tile_h(planes_ptr, plane + 2, e2, SPLIT_K))
        acc += _times(b3, _tile_h(planes_ptr, plane + 3, e3, SPLIT_K))
        entries = b_offsets_ptr + n_start // CHUNK
        for t in range(4, num_tiles, 4):
            cells = tiles_ptr + (first + t) * 4
            left = num_tiles - t
            e0, e1 = (
                entry_of(cells, 0, left, entries, CELL),
                entry_of(cells, 1, left, entries, CELL),
            )
            e2, e3 = (
                entry_of(cells, 2, left, entries, CELL),
                entry_of(cells, 3, left, entries, CELL),
            )
            b0 = load_b(weights_ptr, e0, n, n_mask, CHUNK)
            b1 = load_b(weights_ptr, e1, n, n_mask, CHUNK)
            b2 = load_b(weights_ptr, e2, n, n_mask, CHUNK)
            b3 = load_b(weights_ptr, e3, n, n_mask, CHUNK)
            acc += _times(b0, _tile_h(planes_ptr, plane + t, e0, SPLIT_K))
            acc += _times(b1, _tile_h(planes_ptr, plane + t + 1, e1, SPLIT_K))
            acc += _times(b2, _tile_h(planes_ptr, plane + t + 2, e2, SPLIT_K))
            acc += _times(b3, _tile_h(planes_ptr, plane + t + 3, e3, SPLIT_K))
    tl.store(y_ptrs, (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=n_mask)
    return n0, n1, n2, n3


@triton.jit(noinline=True)
def _expand_rows(
    planes_ptr, weights_ptr, y_ptr, stride_ym, b_offsets_ptr, tiles_ptr, row_ptr, first, num_tiles,
    e0, e1, e2, e3, n_start, d_out, plane, num_rows, next_task_ptr, next_n_start,
    CELL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, ROWS_N: tl.constexpr,
    SPLIT_K: tl.constexpr, ROW_SPLITS: tl.constexpr, PDL: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of one adapter and ROWS_N columns by matrix tiles.

    A function of its own: within the kernel's loop, what their addresses are made of would take
    registers from rows alone. `_expand_shared` is not: called, it took 0.2 ms more of a step.

    Returns the next task's table entries.
    """
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(row_ptr + m, mask=m_mask, other=0).to(tl.int64)
    n = n_start + tl.arange(0, ROWS_N)
    n_mask = n < d_out
    y_ptrs = y_ptr + (token * stride_ym)[:, None] + n[None, :]
    y_mask = m_mask[:, None] & n_mask[None, :]
    b = load_b(weights_ptr, e0, n, n_mask, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    prior = tl.load(y_ptrs, mask=y_mask, other=0, cache_modifier=".cg")
    h = _row_h(planes_ptr, plane, num_rows, e0, BLOCK_M, SPLIT_K, ROW_SPLITS, 4)
    # Its addresses wait for the next task's record: after the loads that wait for nothing.
    n0, n1, n2, n3 = load_entries(next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK)
    acc = _multiplied(h, b, tl.zeros([BLOCK_M, ROWS_N], dtype=tl.float32), COMPUTE, PRECISION)
    for t in range(1, num_tiles):
        entry = tl.where(t == 1, e1, tl.where(t == 2, e2, e3))
        if t > 3:
            cells = tiles_ptr + (first + t * ROW_SPLITS) * 4
            entry = entry_of(cells, 0, 1, b_offsets_ptr + n_start // CHUNK, CELL)
        b = load_b(weights_ptr, entry, n, n_mask, CHUNK)
        at = plane + t * ROW_SPLITS * num_rows
        h = _row_h(planes_ptr, at, num_rows, entry, BLOCK_M, SPLIT_K, ROW_SPLITS, 4)
        acc = _multiplied(h, b, acc, COMPUTE, PRECISION)
    tl.store(y_ptrs, (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)
    return n0, n1, n2, n3


@triton.jit
def _expand_blocks(
    planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, e0, e1, e2, e3, n_start, d_out, plane,
    num_rows, width, next_task_ptr, b_offsets_ptr, next_n_start, CELL: tl.constexpr,
    CHUNK: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr, ROW_SPLITS: tl.constexpr, PDL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of one adapter of TILES rank tiles, `width` columns in blocks of COLUMNS
    by matrix tiles: A x is summed once for all of them, and B travels STAGES - 1 blocks ahead.

    Returns the next task's table entries.
    """
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(row_ptr + m, mask=m_mask, other=0).to(tl.int64)
    y_rows = y_ptr + (token * stride_ym)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile_rows = ROW_SPLITS * num_rows
    h0 = _row_h(planes_ptr, plane, num_rows, e0, BLOCK_M, SPLIT_K, ROW_SPLITS, 8)
    h1, h2, h3 = h0, h0, h0
    if TILES > 1:
        at = plane + tile_rows
        h1 = _row_h(planes_ptr, at, num_rows, e1, BLOCK_M, SPLIT_K, ROW_SPLITS, 8)
    if TILES > 2:
        at = plane + 2 * tile_rows
        h2 = _row_h(planes_ptr, at, num_rows, e2, BLOCK_M, SPLIT_K, ROW_SPLITS, 8)
        h3 = _row_h(planes_ptr, at + tile_rows, num_rows, e3, BLOCK_M, SPLIT_K, ROW_SPLITS, 8)
    n0, n1, n2, n3 = load_entries(next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK)
    walk_blocks(
        weights_ptr, y_rows, m_mask, h0, h1, h2, h3, e0, e1, e2, e3, n_start, d_out, CHUNK, TILES,
        COLUMNS, width // COLUMNS, STAGES, BLOCK_M, True, COMPUTE, PRECISION,
    )  # fmt: skip
    return n0, n1, n2, n3


@triton.jit
def _expand_shared(
    planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, num_tiles, e0, e1, e2, e3, n_start, d_out,
    plane, num_rows, task_ptr, next_task_ptr, b_offsets_ptr, next_n_start, CELL: tl.constexpr,
    CHUNK: tl.constexpr, ROWS_N: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr, ROW_SPLITS: tl.constexpr, PDL: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_expand_blocks` for 1 to 4 rank tiles; as everywhere, equal bytes of B for each."""
    width = tl.load(task_ptr + 12) * 16
    if num_tiles == 1:
        n0, n1, n2, n3 = _expand_blocks(
            planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, e0, e1, e2, e3, n_start, d_out,
            plane, num_rows, width, next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK, 1,
            ROWS_N, STAGES, BLOCK_M, SPLIT_K, ROW_SPLITS, PDL, COMPUTE, PRECISION,
        )  # fmt: skip
    elif num_tiles == 2:
        n0, n1, n2, n3 = _expand_blocks(
            planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, e0, e1, e2, e3, n_start, d_out,
            plane, num_rows, width, next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK, 2,
            ROWS_N // 2, STAGES, BLOCK_M, SPLIT_K, ROW_SPLITS, PDL, COMPUTE, PRECISION,
        )  # fmt: skip
    else:
        n0, n1, n2, n3 = _expand_blocks(
            planes_ptr, weights_ptr, y_ptr, stride_ym, row_ptr, e0, e1, e2, e3, n_start, d_out,
            plane, num_rows, width, next_task_ptr, b_offsets_ptr, next_n_start, CELL, CHUNK, 4,
            ROWS_N // 4, STAGES, BLOCK_M, SPLIT_K, ROW_SPLITS, PDL, COMPUTE, PRECISION,
        )  # fmt: skip
    return n0, n1, n2, n3


@triton.jit
def _multiplied(h, b, acc, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + h B^T by the matrix units.

    Both change their layout through shared memory. Were they not opaque, the compiler would change
    that of every part of a sum, each between two barriers, one load after the other; and that of B
    before loads which stand below it have begun.
    """
    b = tl.trans(opaque(b).to(COMPUTE))
    return tl.dot(opaque(h).to(COMPUTE), b, acc, input_precision=PRECISION)


@triton.jit
def _row_h(
    planes_ptr, plane, num_rows, entry, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
    ROW_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A x of one rank tile's rows, fp32 [BLOCK_M, 16]: the partial sums of decode, in order, those
    of AT_ONCE shares of K under way at a time."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, 16)
    plane_row = (plane + m).to(tl.int64) * SPLIT_K
    h_ptrs = planes_ptr + plane_row[:, None] * 16 + k[None, :]
    h_mask = (m < num_rows)[:, None] & (entry >= 0)
    h = tl.zeros([BLOCK_M, 16], dtype=tl.float32)
    # Where B waits in registers, four: all loads at once would take 70 registers more.
    SHARES: tl.constexpr = AT_ONCE if SPLIT_K > AT_ONCE else SPLIT_K
    for start in range(0, SPLIT_K, SHARES):
        for i in tl.static_range(SHARES):
            for part in tl.static_range(ROW_SPLITS):
                h_part = h_ptrs + part * num_rows * (SPLIT_K * 16) + (start + i) * 16
                mask = h_mask if SPLIT_K % SHARES == 0 else h_mask & (start + i < SPLIT_K)
                h += tl.load(h_part, mask=mask, other=0.0, cache_modifier=".cg")
    return h


@triton.jit(do_not_specialize=["layer_start"])
def expand_decode_kernel(
    planes_ptr, weights_ptr, y_ptr, offsets_ptr, tiles_ptr, tasks_ptr, rows_ptr, counts_ptr,
    layer_start, stride_ym, CELL: tl.constexpr, CHUNK: tl.constexpr, A_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_N: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, SPLIT_K: tl.constexpr, ROW_SPLITS: tl.constexpr, Y_UNIT: tl.constexpr,
    PDL: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        # At the very start: inside the paths below it costs 40 registers' worth of spills.
        tl.extra.cuda.gdc_launch_dependents()
    # Equal work for every rank, and no task leaves its chunk.
    WIDE: tl.constexpr = 4 * BLOCK_N if 4 * BLOCK_N < CHUNK else CHUNK
    HALF: tl.constexpr = 2 * BLOCK_N if 2 * BLOCK_N < CHUNK else CHUNK
    task = tl.program_id(0)
    stride = tl.num_programs(0)
    b_offsets = offsets_ptr + layer_start + A_CHUNKS
    # As in the shrink: records and table entries are loaded one task ahead.
    first, num_tiles, n_start, y_column, start, num_rows, plane, d_out = load_task(
        tasks_ptr + task * 16, Y_UNIT
    )
    e0, e1, e2, e3 = load_entries(tasks_ptr + task * 16, b_offsets, n_start, CELL, CHUNK)
    total = tl.load(counts_ptr + 1)
    while task < total:
        y_start = y_ptr + y_column
        row_ptr = rows_ptr + start
        following = tasks_ptr + tl.minimum(task + stride, total - 1) * 16
        f_first, f_tiles, f_n, f_column, f_start, f_rows, f_plane, f_d_out = load_task(
            following, Y_UNIT
        )
        if num_rows > 1 and (not BLOCKS or num_tiles > 4):
            f0, f1, f2, f3 = _expand_rows(
                planes_ptr, weights_ptr, y_start, stride_ym, b_offsets, tiles_ptr, row_ptr,
                first, num_tiles, e0, e1, e2, e3, n_start, d_out, plane, num_rows, following, f_n,
                CELL, CHUNK, BLOCK_M, ROWS_N, SPLIT_K, ROW_SPLITS, PDL, COMPUTE, PRECISION,
            )  # fmt: skip
        elif num_rows > 1:
            f0, f1, f2, f3 = _expand_shared(
                planes_ptr, weights_ptr, y_start, stride_ym, row_ptr, num_tiles, e0, e1, e2, e3,
                n_start, d_out, plane, num_rows, tasks_ptr + task * 16, following, b_offsets, f_n,
                CELL, CHUNK, ROWS_N, STAGES, BLOCK_M, SPLIT_K, ROW_SPLITS, PDL, COMPUTE, PRECISION,
            )  # fmt: skip
        elif num_tiles == 1:
            f0, f1, f2, f3 = _expand_row(
                planes_ptr, weights_ptr, y_start, stride_ym, tiles_ptr, row_ptr, first, num_tiles,
                e0, e1, e2, e3, n_start, d_out, plane, following, b_offsets, f_n,
                CELL, CHUNK, 1, WIDE, SPLIT_K, PDL,
            )  # fmt: skip
        elif num_tiles == 2:
            f0, f1, f2, f3 = _expand_row(
                planes_ptr, weights_ptr, y_start, stride_ym, tiles_ptr, row_ptr, first, num_tiles,
                e0, e1, e2, e3, n_start, d_out, plane, following, b_offsets, f_n,
                CELL, CHUNK, 2, HALF, SPLIT_K, PDL,
            )  # fmt: skip
        else:
            f0, f1, f2, f3 = _expand_row(
                planes_ptr, weights_ptr, y_start, stride_ym, tiles_ptr, row_ptr, first, num_tiles,
                e0, e1, e2, e3, n_start, d_out, plane, following, b_offsets, f_n,
                CELL, CHUNK, 4, BLOCK_N, SPLIT_K, PDL,
            )  # fmt: skip
        task += stride
        first, num_tiles, n_start, y_column = f_first, f_tiles, f_n, f_column
        start, num_rows, plane, d_out = f_start, f_rows, f_plane, f_d_out
        e0, e1, e2, e3 = f0, f1, f2, f3
    if PDL:  # noqa: SIM102 - one at compile time, one on the device
        if total == 0:
            # No adapter has these modules, and nobody waited above. What comes next waits for this
            # kernel alone, which must not end before the multiply that makes y.
            tl.extra.cuda.gdc_wait()


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
        grid = (lists.decode_grid(group.num_tasks, choice),)
        expand_decode_kernel[grid](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows, group.counts,
            layer_start, y.stride(0), ROWS_N=choice.rows_n, BLOCKS=choice.n_steps > 1,
            STAGES=choice.expand_stages, ROW_SPLITS=choice.row_splits,
            # Of a sum's first two products the compiler fuses either, and not the same one for
            # every BLOCK_N: bits would depend on the batch.
            enable_fp_fusion=False, **constants,
        )  # fmt: skip
    else:
        expand_prefill_kernel[(group.num_tasks,)](
            planes, weights, y, table.offsets, group.tiles, group.tasks, lists.rows, group.counts,
            layer_start, y.stride(0), group.plane_rows, N_STEPS=choice.n_steps,
            STAGES=choice.expand_stages, **constants,
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
        b = weights[run.element :].as_strided(shape, strides).reshape(-1, run.rank_width).float()
        part = shrunk[run.rank_start] @ b.T
        if delta is None:
            if part.shape[1] == d_out:  # one run holds the whole tile
                delta = part
                continue
            delta = part.new_zeros(len(part), d_out)
        delta[:, run.start : run.start + part.shape[1]] += part
    assert delta is not None
    return delta

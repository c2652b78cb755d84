"""The expand of steps with prompts: 64 rows of one adapter a program, and blocks of columns.

Planes lie as [splits, plane_rows, 16]; see `sgmv_shrink`.
"""

import triton
import triton.language as tl

from multilora_kernels.expand_parts import entry_of, load_b, load_entries, load_task, walk_blocks


@triton.jit(do_not_specialize=["layer_start", "plane_rows"])
def expand_prefill_kernel(
    planes_ptr, weights_ptr, y_ptr, offsets_ptr, tiles_ptr, tasks_ptr, rows_ptr, counts_ptr,
    layer_start, stride_ym, plane_rows, CELL: tl.constexpr, CHUNK: tl.constexpr,
    A_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N_STEPS: tl.constexpr,
    STAGES: tl.constexpr, SPLIT_K: tl.constexpr, Y_UNIT: tl.constexpr, PDL: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.load(counts_ptr + 1)
    if PDL:  # noqa: SIM102 - a constant, decided while compiling
        if total == 0:  # what follows must not begin before what this was launched behind
            tl.extra.cuda.gdc_wait()
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        _expand_prompt(
            planes_ptr, weights_ptr, y_ptr, offsets_ptr + layer_start + A_CHUNKS, tiles_ptr,
            tasks_ptr + index * 16, rows_ptr, stride_ym, plane_rows, CELL, CHUNK, BLOCK_M, BLOCK_N,
            N_STEPS, STAGES, SPLIT_K, Y_UNIT, PDL, COMPUTE, PRECISION,
        )  # fmt: skip


@triton.jit
def _expand_prompt(
    planes_ptr, weights_ptr, y_ptr, entries, tiles_ptr, task, rows_ptr, stride_ym, plane_rows,
    CELL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    N_STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT_K: tl.constexpr, Y_UNIT: tl.constexpr,
    PDL: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One task of a step with prompts."""
    first, num_tiles, n_start, y_column, start, num_rows, plane, d_out = load_task(task, Y_UNIT)
    # All columns of a task lie in one chunk.
    e0, e1, e2, e3 = load_entries(task, entries, n_start, CELL, CHUNK)
    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    token = tl.load(rows_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
    y_rows = y_ptr + y_column + (token * stride_ym)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # A x of a rank tile serves all blocks.
    h0 = _sum_planes(planes_ptr, plane, num_rows, e0, plane_rows, BLOCK_M, SPLIT_K, COMPUTE)
    if num_tiles == 1:
        walk_blocks(
            weights_ptr, y_rows, m_mask, h0, h0, h0, h0, e0, e1, e2, e3, n_start, d_out, CHUNK, 1,
            BLOCK_N, N_STEPS, STAGES, BLOCK_M, False, COMPUTE, PRECISION,
        )  # fmt: skip
    elif num_tiles <= 4:
        at = plane + num_rows
        h1 = _sum_planes(planes_ptr, at, num_rows, e1, plane_rows, BLOCK_M, SPLIT_K, COMPUTE)
        at += num_rows
        h2 = _sum_planes(planes_ptr, at, num_rows, e2, plane_rows, BLOCK_M, SPLIT_K, COMPUTE)
        at += num_rows
        h3 = _sum_planes(planes_ptr, at, num_rows, e3, plane_rows, BLOCK_M, SPLIT_K, COMPUTE)
        walk_blocks(
            weights_ptr, y_rows, m_mask, h0, h1, h2, h3, e0, e1, e2, e3, n_start, d_out, CHUNK, 4,
            BLOCK_N, N_STEPS, 2, BLOCK_M, False, COMPUTE, PRECISION,
        )  # fmt: skip
    else:
        for step in range(N_STEPS):
            n = n_start + step * BLOCK_N + tl.arange(0, BLOCK_N)
            n_mask = n < d_out
            y_mask = m_mask[:, None] & n_mask[None, :]
            prior = tl.load(y_rows + n[None, :], mask=y_mask, other=0)
            b = load_b(weights_ptr, e0, n, n_mask, CHUNK)
            acc = tl.dot(h0, tl.trans(b.to(COMPUTE)), input_precision=PRECISION)
            for t in range(1, num_tiles):
                at = plane + t * num_rows
                entry = entry_of(
                    tiles_ptr + (first + t) * 4, 0, 1, entries + n_start // CHUNK, CELL
                )
                h = _sum_planes(
                    planes_ptr, at, num_rows, entry, plane_rows, BLOCK_M, SPLIT_K, COMPUTE
                )
                b = load_b(weights_ptr, entry, n, n_mask, CHUNK)
                acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
            summed = (prior.to(tl.float32) + acc).to(y_ptr.dtype.element_ty)
            tl.store(y_rows + n[None, :], summed, mask=y_mask)


@triton.jit
def _sum_planes(
    planes_ptr, plane, num_rows, entry, plane_rows, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """A x of one rank tile's rows, [BLOCK_M, 16]: the partial sums of prefill, in order."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, 16)
    h_ptrs = planes_ptr + (plane + m).to(tl.int64)[:, None] * 16 + k[None, :]
    h_mask = (m < num_rows)[:, None] & (entry >= 0)
    h = tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(SPLIT_K - 1):
        h_ptrs += plane_rows.to(tl.int64) * 16
        h += tl.load(h_ptrs, mask=h_mask, other=0.0, cache_modifier=".cg")
    return h.to(COMPUTE)

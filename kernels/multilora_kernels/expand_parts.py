"""What both expand kernels do with a task: its record, its entries of the table, B, and blocks of
columns (`work_lists`, `sgmv_expand`).
"""

import triton
import triton.language as tl

from multilora_kernels.opaque import opaque


@triton.jit
def load_task(task, Y_UNIT: tl.constexpr):
    """First tile, tiles, first column, column in y, first row, rows, first plane row, d_out."""
    first, num_tiles = tl.load(task), tl.load(task + 1)
    # Stored in units, so that the compiler knows what they are multiples of.
    n_start, y_column = tl.load(task + 2) * 16, tl.load(task + 3) * Y_UNIT
    d_out = tl.load(task + 7) * Y_UNIT
    start, num_rows, plane = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
    return first, num_tiles, n_start, y_column, start, num_rows, plane, d_out


@triton.jit
def load_entries(task_ptr, b_offsets_ptr, n_start, CELL: tl.constexpr, CHUNK: tl.constexpr):
    """Table entries of a task's first four rank tiles of B; -1: none."""
    entries = b_offsets_ptr + n_start // CHUNK
    c0, c1 = tl.load(task_ptr + 8), tl.load(task_ptr + 9)
    c2, c3 = tl.load(task_ptr + 10), tl.load(task_ptr + 11)
    e0 = tl.load(entries + c0 * CELL, mask=c0 >= 0, other=-1)
    e1 = tl.load(entries + c1 * CELL, mask=c1 >= 0, other=-1)
    e2 = tl.load(entries + c2 * CELL, mask=c2 >= 0, other=-1)
    e3 = tl.load(entries + c3 * CELL, mask=c3 >= 0, other=-1)
    return e0, e1, e2, e3


@triton.jit
def entry_of(cells_ptr, i: tl.constexpr, left, entries_ptr, CELL: tl.constexpr):
    """Table entry of the i-th of the tiles that begin at `cells_ptr`, of which `left` exist."""
    cell = tl.load(cells_ptr + i * 4, mask=i < left, other=-1)
    return tl.load(entries_ptr + cell * CELL, mask=cell >= 0, other=-1)


@triton.jit
def load_b(weights_ptr, entry, n, n_mask, CHUNK: tl.constexpr):
    """Columns n (within one chunk) of one rank tile of B, [columns, 16]."""
    k = tl.arange(0, 16)
    width = tl.multiple_of(16 - (entry & 1).to(tl.int32) * 8, 8)
    element = tl.multiple_of(entry & -16, 16)
    b_ptrs = weights_ptr + element + (n % CHUNK)[:, None] * width + k[None, :]
    b_mask = n_mask[:, None] & (k < width)[None, :] & (entry >= 0)
    return tl.load(b_ptrs, mask=b_mask, other=0)


@triton.jit
def walk_blocks(
    weights_ptr, y_rows, m_mask, h0, h1, h2, h3, e0, e1, e2, e3, n_start, d_out,
    CHUNK: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, steps, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, LATE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows `y_rows` plus their A x of TILES rank tiles (1, 2 or 4) times B, a block at a time.

    LATE: h are sums whose parts are still under way, and change their layout in every block, so
    that y and B of the first ones are asked for before anything waits for h.
    """
    for step in tl.range(steps, num_stages=STAGES):
        n = n_start + step * COLUMNS + tl.arange(0, COLUMNS)
        n_mask = n < d_out
        y_mask = m_mask[:, None] & n_mask[None, :]
        prior = tl.load(y_rows + n[None, :], mask=y_mask, other=0, cache_modifier=".cg")
        acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
        b = load_b(weights_ptr, e0, n, n_mask, CHUNK)
        h = opaque(h0).to(COMPUTE) if LATE else h0
        acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
        if TILES > 1:
            b = load_b(weights_ptr, e1, n, n_mask, CHUNK)
            h = opaque(h1).to(COMPUTE) if LATE else h1
            acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
        if TILES > 2:
            b = load_b(weights_ptr, e2, n, n_mask, CHUNK)
            h = opaque(h2).to(COMPUTE) if LATE else h2
            acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
            b = load_b(weights_ptr, e3, n, n_mask, CHUNK)
            h = opaque(h3).to(COMPUTE) if LATE else h3
            acc = tl.dot(h, tl.trans(b.to(COMPUTE)), acc, input_precision=PRECISION)
        summed = (prior.to(tl.float32) + acc).to(y_rows.dtype.element_ty)
        tl.store(y_rows + n[None, :], summed, mask=y_mask)

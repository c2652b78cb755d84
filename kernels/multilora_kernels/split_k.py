"""Sum the partial tiles of a multiply whose K was split over programs, in a fixed order.

The programs of one output tile each write an fp32 partial; the one that arrives last adds them
in split order, whoever it is, so results repeat bit for bit. One launch, no atomics on floats.
The counters return to zero by themselves: a multiply may be replayed, but not run twice at once
on the same counters.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.split_choice import BLOCK_K, Tile, bucket_of, choose_split, choose_tile

__all__ = [
    "BLOCK_K",
    "Tile",
    "bucket_of",
    "choose_split",
    "choose_tile",
    "prefetch_rows",
    "split_range",
    "sum_partials",
    "workspace",
]


@triton.jit
def prefetch_rows(row_ptrs, first, K, LINES: tl.constexpr, PER_LINE: tl.constexpr):
    """Ask the L2 for `LINES` lines of 128 bytes, `PER_LINE` weights each, of every row from
    column `first` on."""
    line = tl.minimum(first + tl.arange(0, LINES) * PER_LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_ptrs[:, None] + line[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_sum(base, i, stride, PAIRS: tl.constexpr):
    partial = tl.load(base + i * stride, cache_modifier=".cg")
    if PAIRS == 2:
        partial += tl.load(base + (i + 1) * stride, cache_modifier=".cg")
    return partial


@triton.jit
def split_range(K, SPLIT_K: tl.constexpr, PARTS: tl.constexpr):
    """(first, last, blocks a part) of the blocks of 128 that program_id(1) sums."""
    num_blocks = tl.cdiv(K, 128)
    per_part = tl.cdiv(num_blocks, SPLIT_K * PARTS)
    first = tl.program_id(1) * per_part * PARTS
    return first, tl.minimum(first + per_part * PARTS, num_blocks), per_part


@triton.jit
def sum_partials(
    acc,
    partial_ptr,
    counter_ptr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Returns (sum, is_last) over a grid of (tiles of N, SPLIT_K, tiles of M); the sum is meant
    only where is_last. Lets the next kernel start.

    partial is fp32 [SPLIT_K, tiles, BLOCK_N, BLOCK_M]; unmasked, so that accesses stay wide.
    """
    if PDL:
        # Not earlier: programs of the next kernel would settle where this one left room and
        # load the multiprocessors unevenly (10.3 us instead of 8.9 on 6144 x 4096).
        tl.extra.cuda.gdc_launch_dependents()
    is_last = True
    if SPLIT_K > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        num_tiles = tl.num_programs(0) * tl.num_programs(2)
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partial_ptr + tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + offsets
        stride = num_tiles.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(base + tl.program_id(1) * stride, acc)
        # All warps' partials must be written before the counter says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        is_last = arrived == SPLIT_K - 1
        if is_last:
            # .cg: another SM's partials are read from L2, never from this SM's stale L1.
            acc = _load_sum(base, 0, stride, PAIRS)
            for i in tl.static_range(PAIRS, SPLIT_K, PAIRS):
                acc += _load_sum(base, i, stride, PAIRS)
            tl.atomic_xchg(counter_ptr + tile, 0, sem="relaxed")
    return acc, is_last


def workspace(
    tile: Tile, counters: torch.Tensor, num_tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials [split_k, num_tiles, block_n, block_m] fp32 and enough zeroed counters."""
    if num_tiles > counters.numel():
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=counters.device)
    if tile.split_k == 1:
        return counters, counters
    shape = (tile.split_k, num_tiles, tile.block_n, tile.block_m)
    return torch.empty(shape, dtype=torch.float32, device=counters.device), counters

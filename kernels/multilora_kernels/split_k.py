"""Sum the partial tiles of a multiply whose K was split over programs, in a fixed order.

The programs of one output tile each write an fp32 partial; the one that arrives last adds them
in split order, whoever it is, so results repeat bit for bit. One launch, no atomics on floats.
The counters return to zero by themselves: a multiply may be replayed, but not run twice at once
on the same counters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import Chip, chip_of, tuned_table

BLOCK_K = 128


@dataclass(frozen=True)
class Tile:
    """How one split multiply runs; outputs are tiles of block_n features by block_m rows."""

    block_n: int = 64
    block_m: int = 16
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    # Programmatic dependent launch: the program starts while the kernel before it still runs and
    # asks for its first `prefetch` blocks of weights, which no kernel writes, before it waits.
    pdl: bool = False
    prefetch: int = 8


@triton.jit
def prefetch_l2(pointers):
    """Ask for the lines at `pointers` to be brought into the L2; returns at once."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_partials(
    acc,
    partial_ptr,
    counter_ptr,
    tile,
    split,
    num_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Returns (sum, is_last); the sum is meant only where is_last.

    partial is fp32 [SPLIT_K, num_tiles, ROWS, COLUMNS]; unmasked, so that accesses stay wide.
    """
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    base = partial_ptr + tile.to(tl.int64) * (ROWS * COLUMNS) + offsets
    stride = num_tiles.to(tl.int64) * (ROWS * COLUMNS)
    tl.store(base + split * stride, acc)
    # All warps' partials must be written before the counter says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
    is_last = arrived == SPLIT_K - 1
    if is_last:
        # .cg: another SM's partials are read from L2, never from this SM's stale L1.
        acc = tl.load(base, cache_modifier=".cg")
        for i in tl.static_range(1, SPLIT_K):
            acc += tl.load(base + i * stride, cache_modifier=".cg")
        tl.atomic_xchg(counter_ptr + tile, 0, sem="relaxed")
    return acc, is_last


def choose_split(num_tiles: int, num_blocks: int, num_sms: int) -> int:
    """How many programs share one output tile's K (`num_blocks` steps of 128).

    About three programs a multiprocessor hide the latency of the loads; each keeps at least four
    steps, and the last turn of the multiprocessors should be well filled. The batch size is no
    argument: the order of a row's sum must not depend on the rows beside it.
    """
    best, best_cost = 1, float("inf")
    for split in range(1, min(16, max(1, num_blocks // 4)) + 1):
        steps = -(-num_blocks // split)
        programs = num_tiles * split
        per_sm = -(-programs // num_sms)
        # Steps the busiest multiprocessor walks, stretched where it has too few programs to
        # keep its loads in flight, plus what writing and adding the partials costs.
        cost = per_sm * steps * max(1.0, 3.0 / per_sm) + 0.5 * split
        if cost < best_cost:
            best, best_cost = split, cost
    return best


def bucket_of(m: int, smallest: int = 8) -> int:
    """The rows a tile is made for: the next power of two, `smallest` to 128."""
    return min(128, max(smallest, 1 << (m - 1).bit_length()))


def choose_tile(
    op: str,
    m: int,
    n: int,
    k: int,
    chip: Chip,
    stage_bytes: Callable[[Tile], int],
    smallest: int = 8,
) -> Tile:
    """The tile for x [m, k] times weights [n, k]: tuned where it was measured, and always within
    the chip's shared memory (`stage_bytes`: one stage of the pipeline). The split ignores m;
    tiles hold at least `smallest` rows.
    """
    tuned = tuned_table(chip, op)
    num_blocks = -(-k // BLOCK_K)
    split = int(tuned.get(f"n{n}-k{k}", {}).get("split_k", 0))
    block_m = bucket_of(m, smallest)
    best = tuned.get(f"n{n}-k{k}-m{block_m}", {})
    tile = Tile(
        block_n=int(best.get("block_n", 64)),
        block_m=block_m,
        split_k=split or choose_split(-(-n // 64), num_blocks, chip.num_sms),
        num_warps=int(best.get("num_warps", 4)),
        num_stages=int(best.get("num_stages", 4)),
        pdl=chip.has_pdl,
        prefetch=int(best.get("prefetch", 8)),
    )
    while stage_bytes(tile) * tile.num_stages + 2048 > chip.shared_bytes and tile.num_stages > 2:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def chip_for(device: torch.device) -> Chip:
    """The chip launches on `device` are chosen for; a small one for the interpreter's CPU."""
    return Chip("", 80, 4) if device.type == "cpu" else chip_of(device.index or 0)


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

"""Sum the partial tiles of a multiply whose K was split over programs, in a fixed order.

The programs of one output tile each write an fp32 partial; the one that arrives last adds them
in split order, whoever it is, so results repeat bit for bit. One launch, no atomics on floats.
The counters return to zero by themselves: a multiply may be replayed, but not run twice at once
on the same counters.
"""

import triton
import triton.language as tl


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

"""How a split multiply (split_k) is launched: tiles, splits, and what was tuned. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from multilora_kernels.chip import Chip, tuned_table

BLOCK_K = 128


@dataclass(frozen=True)
class Tile:
    """How one split multiply runs; outputs are tiles of block_n features by block_m rows."""

    block_n: int = 64
    block_m: int = 16
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    # Sums of a split twice as fine: a program keeps the two halves of its K apart (parts = 2), or
    # the last one adds the partials in pairs (pairs = 2). Both give the same bits.
    parts: int = 1
    pairs: int = 1
    # Programmatic dependent launch: the program starts while the kernel before it still runs and
    # asks the L2 for the first `prefetch` lines of 128 bytes of each of its rows of weights.
    pdl: bool = False
    prefetch: int = 0


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
    op: str, base: Tile, n: int, k: int, chip: Chip, stage_bytes: Callable[[Tile], int]
) -> Tile:
    """`base` for weights [n, k], with what was tuned for them in its place, and within the chip's
    shared memory (`stage_bytes`: one stage of the pipeline). The order of sums ignores the rows.
    """
    tuned = tuned_table(chip, op)
    shape = tuned.get(f"n{n}-k{k}", {})
    best = tuned.get(f"n{n}-k{k}-m{base.block_m}", {})
    split = int(shape.get("split_k", 0))
    split = split or choose_split(-(-n // 64), -(-k // BLOCK_K), chip.num_sms)
    fine_up_to = int(shape.get("fine_up_to", 0))
    if "split_k" in best:  # large batches may have an order of their own
        split, fine_up_to = int(best["split_k"]), 0
    fine = base.block_m <= fine_up_to
    tile = Tile(
        block_n=int(best.get("block_n", base.block_n)),
        block_m=int(best.get("block_m", base.block_m)),
        split_k=2 * split if fine else split,
        num_warps=int(best.get("num_warps", base.num_warps)),
        num_stages=int(best.get("num_stages", base.num_stages)),
        parts=2 if fine_up_to and not fine else 1,
        pairs=2 if fine else 1,
        pdl=chip.has_pdl and bool(best.get("pdl", True)),
        prefetch=int(best.get("prefetch", base.prefetch)),
    )
    while stage_bytes(tile) * tile.num_stages + 2048 > chip.shared_bytes and tile.num_stages > 2:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile

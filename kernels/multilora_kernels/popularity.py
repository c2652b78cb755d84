"""How rows or requests spread over adapters: the laws that published benchmarks use. Torch-free."""

import numpy as np
import numpy.typing as npt

# The published generator's seed, so that its orders can be compared with ours.
SHUFFLE_SEED = 0xABCDABCD987


def popularity_counts(popularity: str, num_rows: int) -> list[int]:
    """Rows of every adapter, most popular first; they add up to `num_rows`.

    distinct: one row each. identical: one adapter. uniform: ceil(sqrt(n)) adapters, equal shares.
    skewed: a ladder, each adapter 1.5 times as popular as the next. zipf:ALPHA: shares i^-ALPHA.
    """
    law, _, parameter = popularity.partition(":")
    if law == "distinct":
        return [1] * num_rows
    if law == "identical":
        return [num_rows]
    if law == "uniform":
        adapters = int(np.ceil(np.sqrt(num_rows)))
        return [num_rows // adapters + (i < num_rows % adapters) for i in range(adapters)]
    if law == "skewed":
        return _ladder(num_rows, float(parameter or 1.5))
    if law == "zipf":
        return _zipf(num_rows, float(parameter))
    raise ValueError(
        f"popularity {popularity!r}: distinct, identical, uniform, skewed or zipf:ALPHA"
    )


def _ladder(num_rows: int, ratio: float) -> list[int]:
    counts: list[int] = []
    while sum(counts) + int(ratio ** len(counts)) < num_rows:
        counts.append(int(ratio ** len(counts)))
    counts.append(num_rows - sum(counts))
    return sorted(counts, reverse=True)


def _zipf(num_rows: int, alpha: float) -> list[int]:
    """Shares by the largest remainder, so that the counts are exact."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -alpha
    shares = num_rows * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    missing = num_rows - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    return [int(count) for count in np.sort(counts)[::-1] if count]


def make_slots(
    popularity: str, num_rows: int, first_slot: int = 1, shuffle: bool = True
) -> npt.NDArray[np.int32]:
    """Slot of every row, int32 [num_rows], adapters numbered by falling popularity."""
    counts = popularity_counts(popularity, num_rows)
    slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts) + np.int32(first_slot)
    if shuffle:
        np.random.Generator(np.random.PCG64(SHUFFLE_SEED)).shuffle(slots)
    return slots

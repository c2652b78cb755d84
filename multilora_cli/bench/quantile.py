"""A quantile that is one of the values, for what is too scarce to interpolate."""

from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at most; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

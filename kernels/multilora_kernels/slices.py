"""Multiplies by weights too large to widen at once: a slice of W at a time, then the library.

For large batches, where reading 16-bit weights again costs less than widening them in every tile.
"""

from collections.abc import Callable

import torch

# What is widened at a time, in bytes: bounds what a multiply takes beside the page pool.
SLICE_BYTES = 64 << 20
_UNIT = 128


def slice_rows(n: int, k: int, slice_bytes: int = SLICE_BYTES) -> int:
    """Rows of W [n, k] in a slice of 16-bit weights: a multiple of 128, or all of them."""
    return min(n, max(_UNIT, slice_bytes // (2 * k) // _UNIT * _UNIT))


def multiply_slices(
    x: torch.Tensor, n: int, rows: int, widen: Callable[[torch.Tensor, int], None]
) -> torch.Tensor:
    """x [M, K] times W [n, K], [M, n] in x's dtype, `rows` rows of W at a time.

    `widen(w, start)` fills w, x's dtype, with the rows of W from `start` on.
    """
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    w = torch.empty((min(rows, n), x.shape[1]), dtype=x.dtype, device=x.device)
    for start in range(0, n, rows):
        part = w[: min(rows, n - start)]
        widen(part, start)
        torch.mm(x, part.t(), out=y[:, start : start + len(part)])
    return y

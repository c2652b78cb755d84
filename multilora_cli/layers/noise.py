"""Random numbers that depend on nothing but (seed, position, token id).

A row's noise is a pure function of its own key, so a sequence draws the same tokens alone, in any
batch, after preemption and on any device: there is no generator state to share or to replay.

    key(seed, position) = mix64(mix64(seed) + position * golden)     64 bits: xor word, odd factor
    bits[v]             = mix32((mix32(v) ^ xor word) * odd factor)
    uniform[v]          = (bits[v] mod 2^31 + 1/2) / 2^31            below 1 - 2^-24
    exponential[v]      = -log(1 - uniform[v])

The smallest exponential is 2.3e-10, so that tokens far below 1 / vocab keep their share.
"""

from collections.abc import Sequence

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Keys of rows: int32 [R, 2] (xor word, odd factor). Any integer is a seed."""
    seed = np.array([value & _MASK64 for value in seeds], dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    key = _mix64(_mix64(seed) + position * np.uint64(_GOLDEN))
    words = key.view(np.uint32).reshape(-1, 2).copy()
    words[:, 1] |= 1
    return words.view(np.int32)


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit mixing function with low bias, in place on int32 (products wrap)."""
    # int32 shifts copy the sign; the masks turn them into logical ones.
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


def log_exponential(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """log of the exponential noise of each token: float32 [R, vocab] for keys int32 [R, 2].

    argmax(log p - this) draws a token with probability p (the Gumbel-max trick).
    """
    tokens = _mix32(torch.arange(vocab, dtype=torch.int32, device=keys.device))
    bits = _mix32((tokens ^ keys[:, :1]) * keys[:, 1:]) & 0x7FFFFFFF
    # Rounding to fp32 could reach 1, whose infinite noise would lose a row's only allowed token.
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()

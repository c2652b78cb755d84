"""Random numbers that depend on nothing but (seed, position, token id).

A row's noise is a pure function of its own key, so a sequence draws the same tokens alone, in any
batch, after preemption and on any device: there is no generator state to share or to replay.

    key(seed, position) = mix64(mix64(seed) + position * golden)     64 bits: xor word, odd factor
    bits[v]             = mix32((mix32(v) ^ xor word) * odd factor)
    uniform[v]          = (bits[v] mod 2^31 + 1/2) / 2^31            below 1 - 2^-24
    exponential[v]      = -log(1 - uniform[v])

The smallest exponential is 2.3e-10, so that tokens far below 1 / vocab keep their share. The token
with the largest p / exponential is drawn with probability p (the Gumbel-max trick).
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1

# Rounding to fp32 could reach 1, whose infinite noise would lose a row's only allowed token.
_MOST = 1 - 2.0**-24
_MOST_UNIFORM = tl.constexpr(_MOST)


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


@triton.jit
def _mix32(x):
    """A 32-bit mixing function with low bias, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def exponential_of(tokens, xor_word, odd_factor):
    """The exponential noise of int32 `tokens`, fp32, under a row's key (int32 scalars)."""
    mixed = _mix32(tokens.to(tl.uint32))
    bits = _mix32((mixed ^ xor_word.to(tl.uint32)) * odd_factor.to(tl.uint32)) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31), _MOST_UNIFORM)
    # Below a quarter log(1 - u) loses the digits of u: there u times a polynomial interpolated at
    # Chebyshev's points, 6e-8 off. Above it a device's logarithm is 5e-7 off.
    series = 0.3325749337673187
    series = tl.fma(series, uniform, 0.0905156135559082)
    series = tl.fma(series, uniform, 0.21397438645362854)
    series = tl.fma(series, uniform, 0.24872595071792603)
    series = tl.fma(series, uniform, 0.33338767290115356)
    series = tl.fma(series, uniform, 0.49999913573265076)
    series = tl.fma(series, uniform, 1.0)
    return tl.where(uniform < 0.25, series * uniform, -tl.log(1.0 - uniform))


def exponential_ref(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """The same in torch: float32 [R, vocab] for keys int32 [R, 2]."""
    tokens = _mix32_ref(torch.arange(vocab, dtype=torch.int32, device=keys.device))
    bits = _mix32_ref((tokens ^ keys[:, :1]) * keys[:, 1:]) & 0x7FFFFFFF
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=_MOST)
    return uniform.neg_().log1p_().neg_()


def _mix32_ref(x: torch.Tensor) -> torch.Tensor:
    """_mix32 in place on int32, whose products wrap."""
    # int32 shifts copy the sign; the masks turn them into logical ones.
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x

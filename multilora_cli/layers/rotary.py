"""Rotary position embedding in its published variants.

    q'[i] = q[i] cos(p f_i) - q[i + D/2] sin(p f_i)
    q'[i + D/2] = q[i + D/2] cos(p f_i) + q[i] sin(p f_i)        0 <= i < D/2

default  f_i = theta^(-2i/D)
linear   f_i / factor
dynamic  the default up to the trained length; beyond it the base would follow the longest
         sequence of the batch, so one row's result would depend on its neighbours: refused
llama3   long wavelengths divided by factor, short ones kept, a smooth step between
yarn     interpolated below beta_slow rotations, kept above beta_fast; cos and sin scaled
"""

import math

import torch

from multilora_cli.sizing.geometry import Rope
from multilora_kernels.rope_store_kv import rope_tables


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """f_i in radians per position: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    default = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return default / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, default)
    if rope.kind == "yarn":
        return _yarn(rope, default, head_dim)
    return default


def _llama3(rope: Rope, default: torch.Tensor) -> torch.Tensor:
    """Divide wavelengths above the low cut, keep those below the high cut, blend the rest."""
    rotations = rope.original_max_position * default / (2 * math.pi)  # over the trained length
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * default / rope.factor + smooth * default
    kept = torch.where(rotations > rope.high_freq_factor, default, blended)
    return torch.where(rotations < rope.low_freq_factor, default / rope.factor, kept)


def _yarn(rope: Rope, default: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Ramp from kept to interpolated between the dimensions of beta_fast and beta_slow turns."""

    def dimension(rotations: float) -> float:
        wavelength = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return default / rope.factor * ramp + default * (1 - ramp)


class Rotary:
    """Angles of queries and keys; cos and sin are made once a step and shared by all layers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(rope, head_dim).to(device)
        self.scale = rope.attention_factor

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of int64 positions [T]: float32 [T, 1, D / 2] each."""
        return rope_tables(positions, self.frequencies, self.scale)

"""Token rows made for a multiply: normed or gated, in FP8 beside it where the weight wants that.

    normed_rows   residual = round(residual + x);  v = weight * round(residual / rms(residual))
    gated_rows    v = silu(gate) * up, x [T, 2 K]: gate, then up

One launch each, whatever the weight is stored as (rms_norm, silu_mul, fp8_quant).
"""

from dataclasses import dataclass

import torch

from multilora_kernels.fp8_quant import RowScaling, rms_norm_quantise, silu_mul_quantise
from multilora_kernels.rms_norm import add_rms_norm
from multilora_kernels.silu_mul import silu_mul


@dataclass(frozen=True)
class Rows:
    """What a projection multiplies; its adapters read `x`, which is never quantised."""

    x: torch.Tensor  # [T, K] in the compute dtype, contiguous
    # e4m3 [T, K] and its scale, made with the scaling of the weight that is to multiply it.
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None


def normed_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scaling: RowScaling | None,
) -> Rows:
    """residual [T, K] += x, in place; its normalised value, quantised where there is `scaling`.

    x, contiguous, is used up: the rows take its place.
    """
    if scaling is None:
        return Rows(add_rms_norm(x, residual, weight, eps, out=x))
    return Rows(x, rms_norm_quantise(x, weight, eps, residual, scaling, out=x))


def gated_rows(x: torch.Tensor, scaling: RowScaling | None) -> Rows:
    """SwiGLU of x [T, 2 K], quantised where there is `scaling`."""
    if scaling is None:
        return Rows(silu_mul(x))
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    return Rows(out, silu_mul_quantise(x, scaling, out))

"""Root mean square normalisation of the residual stream."""

import torch

from multilora_kernels.fp8_quant import RowScaling
from multilora_kernels.rows import Rows, normed_rows


class RMSNorm:
    """weight * h / rms(h) over the last dimension, h the residual stream with `x` added.

    The statistic is fp32, and the cast to x's dtype comes before the multiplication: that is part
    of the published models, and moving it changes the last bit of every bf16 activation.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, scaling: RowScaling | None = None
    ) -> Rows:
        """residual [T, size] += x, in place; returns its normalised rows, in x's memory.

        `scaling` is what the projection that multiplies them asks for.
        """
        return normed_rows(x, residual, self.weight, self.eps, scaling)

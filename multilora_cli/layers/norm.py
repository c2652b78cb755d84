"""Root mean square normalisation."""

import torch


class RMSNorm:
    """weight * x / rms(x) over the last dimension; the statistic in fp32, the product in x's dtype.

    The cast before the multiplication is part of the published models: moving it changes the
    last bit of every bf16 activation.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], any strides; returns the same shape and dtype, contiguous."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

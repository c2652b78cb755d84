"""Root mean square normalisation, alone or with the addition to the residual stream before it.

    rms_norm        out = weight * round(x * rsqrt(mean(x^2) + eps))
    add_rms_norm    residual = round(residual + x);  out = the same of residual

x, out    [T, size] or [T, heads, size]    bf16, fp16 or fp32; the last dimension contiguous
residual  [T, size]                        x's dtype, contiguous, changed in place by add_rms_norm
weight    [size]                           x's dtype

The statistic is fp32; round is to x's dtype, where the published models round.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import chip_for, next_power_of_2, on_host


@triton.jit
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    stride_xt,
    stride_xh,
    heads,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    source = x_ptr + row // heads * stride_xt + row % heads * stride_xh
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        held = tl.load(residual_ptr + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
        rounded = (held + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * SIZE + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    scaled = scaled.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (weight * scaled).to(out_ptr.dtype.element_ty), mask=mask)


def launch_choice(size: int) -> dict[str, int]:
    """Tile and warps for rows of `size` elements: 16 or so elements a thread."""
    block = next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    size = x.shape[-1]
    assert x.ndim in (2, 3) and x.stride(-1) == 1 and weight.is_contiguous()
    assert weight.shape == (size,) and weight.dtype == x.dtype
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    if x.numel() == 0:
        return out
    heads = x.shape[1] if x.ndim == 3 else 1
    pdl = chip_for(x.device).has_pdl
    rms_norm_kernel[(x.shape[0] * heads,)](
        out,
        x,
        out if residual is None else residual,
        weight,
        x.stride(0),
        x.stride(1) if x.ndim == 3 else 0,
        heads,
        eps,
        SIZE=size,
        ADDED=residual is not None,
        PDL=pdl,
        launch_pdl=pdl,
        **launch_choice(size),
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] normalised over its last dimension; a new contiguous tensor."""
    if on_host(x.device):
        return rms_norm_ref(x, weight, eps)
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual [T, size] += x, in place; returns its normalised value, in `out` where it is given.

    `out` may be x: a program holds its row before it writes.
    """
    assert residual.shape == x.shape and x.ndim == 2 and residual.is_contiguous()
    assert residual.dtype == x.dtype
    if on_host(x.device):
        normed = add_rms_norm_ref(x, residual, weight, eps)
        return normed if out is None else out.copy_(normed)
    return _launch(x, residual, weight, eps, out)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in torch, also the path on a CPU."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same in torch, also the path on a CPU."""
    residual += x
    return rms_norm_ref(residual, weight, eps)

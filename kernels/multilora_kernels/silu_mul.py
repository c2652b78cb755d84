"""The gate of the MLP: half of a packed projection through SiLU, times the other half.

    out[t, i] = round(x[t, i] / (1 + exp(-x[t, i]))) * x[t, I + i]

x    [T, 2 I]  bf16, fp16 or fp32; gate first, then up; rows contiguous
out  [T, I]    x's dtype

The quotient is fp32, rounded to x's dtype before the product, as torch's two steps round it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.launch import cdiv, chip_for, next_power_of_2, on_host


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)), fp32; with a power of two, which takes half the instructions."""
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634))


@triton.jit
def silu_mul_kernel(out_ptr, x_ptr, stride_xt, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * stride_xt + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_xt + size + at, mask=mask, other=0.0).to(tl.float32)
    gated = silu(gate).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + at, (gated * up).to(out_ptr.dtype.element_ty), mask=mask)


def launch_choice(size: int) -> dict[str, int]:
    """Tile and warps for rows of `size` outputs: 8 elements a thread."""
    block = min(1024, next_power_of_2(size))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2 I]; a new tensor [T, I]."""
    assert x.ndim == 2 and x.stride(1) == 1 and x.shape[1] % 2 == 0
    if on_host(x.device):
        return silu_mul_ref(x)
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        choice = launch_choice(size)
        # One dimension: the second one ends at 65,535, and a step may have more rows.
        grid = (cdiv(size, choice["BLOCK"]) * rows,)
        pdl = chip_for(x.device).has_pdl
        silu_mul_kernel[grid](out, x, x.stride(0), size, PDL=pdl, launch_pdl=pdl, **choice)
    return out


def silu_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """The same in torch, also the path on a CPU."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up

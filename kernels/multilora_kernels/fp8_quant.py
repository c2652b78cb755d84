"""Rows to FP8 (e4m3) with a scale of their own: alone, after RMSNorm, and after SwiGLU.

    scale[m] = clamp(max_k |v[m, k]|, tiny, upper bound) / 448      q[m, k] = v[m, k] / scale[m]

v = x                                            quantise_rows
v = weight * (h / rms(h)), h = x (+ residual)    rms_norm_quantise   (residual := h, in place)
v = silu(gate) * up                              silu_mul_quantise   (x [M, 2 K]: gate, then up)
x      [M, K]  bf16 or fp16, rows contiguous
q      [M, K]  float8_e4m3fn                     scale  fp32 [M], or [M, K/128] with group 128
v is rounded to x's dtype before it is quantised, so that the fused forms equal the two steps;
`out` [M, K] of the fused forms receives it, for a LoRA branch, which is never quantised.
A scale belongs to one row: a row of NaN gets NaN and leaves the others as they were.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import chip_for, next_power_of_2, on_host
from multilora_kernels.rms_norm import add_rms_norm_ref, rms_norm_ref
from multilora_kernels.silu_mul import silu, silu_mul_ref

E4M3_MAX = 448.0
# Below this the quotient would overflow; such a row is zero for every purpose.
_TINY = 1e-10


@dataclass(frozen=True)
class RowScaling:
    """How an FP8 weight wants the rows it multiplies scaled."""

    group: int = 0  # columns that share a scale: 128, or 0 for a whole row
    static_scale: torch.Tensor | None = None  # fp32 [1]: used, and returned, instead
    upper_bound: float = float("inf")  # of the largest magnitude that sets a scale


PER_ROW = RowScaling()


@triton.jit
def _round_to_e4m3(v):
    """v on e4m3's grid, halves to even: the interpreter's own cast gets carries wrong."""
    bits = v.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = bits.to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^14 leaves units of 2^-9, e4m3's smallest.
    subnormal = (v + 24576.0) - 24576.0
    return tl.where(tl.abs(v) < 0.015625, subnormal, tl.where(v == v, normal, v))


@triton.jit
def _largest(v, axis: tl.constexpr):
    """Largest magnitude, NaN where there is one: as integers magnitudes sort alike, NaN last."""
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def _store_quantised(
    v, q_ptr, scale_ptr, row, k, K, upper_bound, static_ptr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if STATIC:
        v = v * (1.0 / tl.load(static_ptr))
    elif GROUP == 0:
        largest = _largest(v, 0)
        scale = tl.minimum(tl.maximum(largest, 1e-10), upper_bound) / 448.0
        scale = tl.where(largest == largest, scale, largest)
        tl.store(scale_ptr + row, scale)
        v = v * (1.0 / scale)
    else:
        groups = tl.reshape(v, (BLOCK // GROUP, GROUP))
        largest = _largest(groups, 1)
        scale = tl.minimum(tl.maximum(largest, 1e-10), upper_bound) / 448.0
        scale = tl.where(largest == largest, scale, largest)
        g = tl.arange(0, BLOCK // GROUP)
        num_groups = tl.cdiv(K, GROUP)
        tl.store(scale_ptr + row * num_groups + g, scale, mask=g < num_groups)
        v = tl.reshape(groups * (1.0 / scale)[:, None], (BLOCK,))
    if INTERPRETED:  # the card's own conversion keeps within 448, and NaN
        clamped = tl.minimum(tl.maximum(v, -448.0), 448.0)
        v = _round_to_e4m3(tl.where(v == v, clamped, v))
    tl.store(q_ptr + row * K + k, v.to(q_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def quantise_kernel(
    x_ptr, q_ptr, scale_ptr, static_ptr, K, stride_xm, upper_bound, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, STATIC: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    v = tl.load(x_ptr + row * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    _store_quantised(
        v, q_ptr, scale_ptr, row, k, K, upper_bound, static_ptr, GROUP, BLOCK, STATIC, INTERPRETED
    )


@triton.jit
def rms_norm_quantise_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, q_ptr, scale_ptr, static_ptr, K, stride_xm, eps,
    upper_bound,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr, DT: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    h = tl.load(x_ptr + row * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        h = h.to(DT)
        tl.store(residual_ptr + row * K + k, h.to(residual_ptr.dtype.element_ty), mask=k < K)
        h = h.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / K + eps)
    normed = (h * inverse).to(DT).to(tl.float32)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    v = (normed * weight).to(DT)
    if HAS_OUT:
        tl.store(out_ptr + row * K + k, v.to(out_ptr.dtype.element_ty), mask=k < K)
    v = v.to(tl.float32)
    _store_quantised(
        v, q_ptr, scale_ptr, row, k, K, upper_bound, static_ptr, GROUP, BLOCK, STATIC, INTERPRETED
    )


@triton.jit
def silu_mul_quantise_kernel(
    x_ptr, out_ptr, q_ptr, scale_ptr, static_ptr, K, stride_xm, upper_bound, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, STATIC: tl.constexpr, HAS_OUT: tl.constexpr, DT: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_xm + K + k, mask=k < K, other=0.0).to(tl.float32)
    gated = silu(gate).to(DT).to(tl.float32)
    v = (gated * up).to(DT)
    if HAS_OUT:
        tl.store(out_ptr + row * K + k, v.to(out_ptr.dtype.element_ty), mask=k < K)
    v = v.to(tl.float32)
    _store_quantised(
        v, q_ptr, scale_ptr, row, k, K, upper_bound, static_ptr, GROUP, BLOCK, STATIC, INTERPRETED
    )


def launch_choice(k: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a row of `k`: at most 16 elements a thread."""
    block = next_power_of_2(max(k, 128))
    return block, min(32, max(4, block // 512))


def _outputs(x: torch.Tensor, k: int, scaling: RowScaling) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.ndim == 2 and x.stride(1) == 1 and x.dtype in (torch.bfloat16, torch.float16)
    assert scaling.group in (0, 128), f"group of {scaling.group}"
    q = torch.empty((x.shape[0], k), dtype=torch.float8_e4m3fn, device=x.device)
    static = scaling.static_scale
    if static is not None:
        assert static.numel() == 1 and static.dtype == torch.float32
        return q, static.reshape(1)
    shape = (x.shape[0], -(-k // 128)) if scaling.group else (x.shape[0],)
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _dtype(x: torch.Tensor) -> tl.dtype:
    # The interpreter's bf16 arithmetic is wrong and its rounding truncates: stay in fp32 there.
    if triton.knobs.runtime.interpret:
        return tl.float32
    return tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16


def quantise_rows(
    x: torch.Tensor, scaling: RowScaling = PER_ROW
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] to (q e4m3 [M, K], scale)."""
    if on_host(x.device):
        return quantise_rows_ref(x, scaling)
    m, k = x.shape
    q, scale = _outputs(x, k, scaling)
    block, warps = launch_choice(k)
    pdl = chip_for(x.device).has_pdl
    if m:
        quantise_kernel[(m,)](
            x, q, scale, scale, k, x.stride(0), scaling.upper_bound,
            BLOCK=block, GROUP=scaling.group, STATIC=scaling.static_scale is not None,
            INTERPRETED=triton.knobs.runtime.interpret, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return q, scale


def rms_norm_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    scaling: RowScaling = PER_ROW,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x (+ residual, which becomes the sum in place), quantised by row; `out` [M, K],
    which may be x, receives it unquantised.
    """
    if on_host(x.device):
        if residual is None:
            normed = rms_norm_ref(x, weight, eps)
        else:
            normed = add_rms_norm_ref(x, residual, weight, eps)
        if out is not None:
            out.copy_(normed)
        return quantise_rows_ref(normed, scaling)
    m, k = x.shape
    assert weight.shape == (k,)
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    assert out is None or (out.shape == x.shape and out.is_contiguous())
    q, scale = _outputs(x, k, scaling)
    block, warps = launch_choice(k)
    pdl = chip_for(x.device).has_pdl
    if m:
        rms_norm_quantise_kernel[(m,)](
            x, x if residual is None else residual, weight, x if out is None else out, q, scale,
            scale, k, x.stride(0), eps, scaling.upper_bound, BLOCK=block, GROUP=scaling.group,
            STATIC=scaling.static_scale is not None, HAS_RESIDUAL=residual is not None,
            HAS_OUT=out is not None, DT=_dtype(x), INTERPRETED=triton.knobs.runtime.interpret,
            PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return q, scale


def silu_mul_quantise(
    x: torch.Tensor, scaling: RowScaling = PER_ROW, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of x [M, 2 K], quantised by row: (q [M, K], scale); `out` [M, K] receives
    it unquantised.
    """
    if on_host(x.device):
        product = silu_mul_ref(x)
        if out is not None:
            out.copy_(product)
        return quantise_rows_ref(product, scaling)
    m, k = x.shape[0], x.shape[1] // 2
    assert x.shape[1] == 2 * k
    assert out is None or (out.shape == (m, k) and out.is_contiguous())
    q, scale = _outputs(x, k, scaling)
    block, warps = launch_choice(k)
    pdl = chip_for(x.device).has_pdl
    if m:
        silu_mul_quantise_kernel[(m,)](
            x, x if out is None else out, q, scale, scale, k, x.stride(0), scaling.upper_bound,
            BLOCK=block, GROUP=scaling.group, STATIC=scaling.static_scale is not None,
            HAS_OUT=out is not None, DT=_dtype(x), INTERPRETED=triton.knobs.runtime.interpret,
            PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return q, scale


def quantise_rows_ref(
    x: torch.Tensor, scaling: RowScaling = PER_ROW
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rows` in torch."""
    v = x.float()
    m, k = v.shape
    static, group = scaling.static_scale, scaling.group
    if static is not None:
        q = (v / static).clamp(-E4M3_MAX, E4M3_MAX)
        return q.to(torch.float8_e4m3fn), static.reshape(1)
    if group:
        padded = torch.nn.functional.pad(v, (0, -k % group)).reshape(m, -1, group)
    else:
        padded = v.unsqueeze(1)
    # amax propagates NaN, clamp keeps it.
    scale = padded.abs().amax(dim=2).clamp(_TINY, scaling.upper_bound) / E4M3_MAX
    q = (padded / scale.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX).reshape(m, -1)[:, :k]
    return q.contiguous().to(torch.float8_e4m3fn), scale if group else scale.squeeze(1)

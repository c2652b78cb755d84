"""Rows times a 16-bit weight: a kernel for very few, others or the library for more.

    y[m, n] = sum_k x[m, k] * w[n, k]

x  [M, K]  bf16 or fp16, M <= 4, rows contiguous     w  [N, K]  x's dtype, rows contiguous
y  [M, N]  x's dtype or fp32, allocated here         nothing is written in place

A program owns a few rows of W and walks along K with fp32 sums kept by position, added at the
end: no split, one launch, and each row's order of sums is the same whatever M is. More rows go to
`bf16_rows` where that was measured to be faster than the library, which does the others.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from multilora_kernels import bf16_rows
from multilora_kernels.launch import Chip, cdiv, chip_for, next_power_of_2, on_host, tuned_table

OP = "bf16_gemv"
MAX_ROWS = 4
# From two rows on the multiplications bound it and cuBLAS is faster (H200: 16.5 against 16.3 us
# on 6144 x 4096 at M = 2, 25.1 against 16.3 at 4).
_MAX_FASTER = 1


@triton.jit
def _load_x(x_ptr, k, K, EVEN_K: tl.constexpr):
    x = tl.load(x_ptr + k) if EVEN_K else tl.load(x_ptr + k, mask=k < K, other=0.0)
    return x.to(tl.float32)[None, :]


@triton.jit
def _start_early(row_ptrs, K, PREFETCH: tl.constexpr):
    if PREFETCH > 0:  # lines of 64 weights at the start of each row
        line = tl.minimum(tl.arange(0, PREFETCH) * 64, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(row_ptrs[:, None] + line[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    # At once: thousands of short programs balance themselves wherever they start.
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def bf16_gemv_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    K,
    stride_xm,
    stride_wn,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    c = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + row[:, None] * stride_wn + c[None, :]
    if PDL:
        _start_early(w_ptr + row * stride_wn, K, PREFETCH)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc1 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc2 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc3 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        k = start + c
        if EVEN_K:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first").to(tl.float32)
        else:
            w = tl.load(w_ptrs + start, mask=(k < K)[None, :], other=0.0).to(tl.float32)
        acc0 += w * _load_x(x_ptr, k, K, EVEN_K)
        if M > 1:
            acc1 += w * _load_x(x_ptr + stride_xm, k, K, EVEN_K)
        if M > 2:
            acc2 += w * _load_x(x_ptr + 2 * stride_xm, k, K, EVEN_K)
        if M > 3:
            acc3 += w * _load_x(x_ptr + 3 * stride_xm, k, K, EVEN_K)
    out = y_ptr + n
    dtype = y_ptr.dtype.element_ty
    tl.store(out, tl.sum(acc0, axis=1).to(dtype), mask=n < N)
    if M > 1:
        tl.store(out + N, tl.sum(acc1, axis=1).to(dtype), mask=n < N)
    if M > 2:
        tl.store(out + 2 * N, tl.sum(acc2, axis=1).to(dtype), mask=n < N)
    if M > 3:
        tl.store(out + 3 * N, tl.sum(acc3, axis=1).to(dtype), mask=n < N)


@dataclass(frozen=True)
class GemvLaunch:
    """Rows of W a program owns, the step along K, and how many steps are in flight."""

    block_n: int = 4
    block_k: int = 1024
    unroll: int = 2
    num_warps: int = 4
    # Programmatic dependent launch: the program starts while the kernel before it still runs and
    # asks for the first `prefetch` lines of 128 bytes of its weights before it waits for x.
    pdl: bool = False
    prefetch: int = 16


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip) -> GemvLaunch | None:
    """Launch of x [m, k] times w [n, k], or None: this kernel is not the fastest. What sets the
    order of sums (block_k and the threads of a row) is chosen by n and k alone.
    """
    best = tuned_table(chip, OP).get(f"n{n}-k{k}", {})
    if m > int(best.get("max_rows", _MAX_FASTER)):
        return None
    return GemvLaunch(
        block_n=int(best.get("block_n", 4)),
        block_k=int(best.get("block_k", min(1024, next_power_of_2(k)))),
        unroll=int(best.get("unroll", 2)),
        num_warps=int(best.get("num_warps", 4)),
        pdl=chip.has_pdl,
        prefetch=int(best.get("prefetch", 16)),
    )


def run_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    launch: GemvLaunch,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One launch of the kernel with a given choice (benchmarks and tuning call this)."""
    m, k = x.shape
    n = w.shape[0]
    y = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device) if out is None else out
    bf16_gemv_kernel[(cdiv(n, launch.block_n),)](
        x,
        w,
        y,
        n,
        k,
        x.stride(0),
        w.stride(0),
        M=m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=k % launch.block_k == 0,
        UNROLL=launch.unroll,
        PDL=launch.pdl,
        PREFETCH=launch.prefetch,
        num_warps=launch.num_warps,
        launch_pdl=launch.pdl,
    )
    return y


def bf16_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times w [N, K], [M, N]: a kernel where one is faster, else the library.

    Any M, on a CPU and in fp32 too. `dtype` fp32 keeps the sums of 16-bit products as they are.
    `out` [M, N], contiguous and of the result's dtype, is written to where it is given.
    """
    assert x.ndim == 2 and w.ndim == 2 and x.shape[1] == w.shape[1] and x.dtype == w.dtype
    assert dtype in (None, x.dtype, torch.float32)
    m, k = x.shape
    wanted = dtype or x.dtype
    assert out is None or (out.shape == (m, w.shape[0]) and out.dtype == wanted)
    assert out is None or out.is_contiguous()
    if _fits(x, w):
        shape = (m, w.shape[0], k, chip_for(x.device))
        few = choose_launch(*shape)
        if few is not None:
            return run_gemv(x, w, few, dtype, out)
        rows = bf16_rows.choose_launch(*shape)
        if rows is not None:
            return bf16_rows.run_rows(x, w, rows, dtype, out)
    if wanted != x.dtype and x.is_cuda:
        if out is None:
            return torch.mm(x, w.t(), out_dtype=wanted)
        return torch.mm(x, w.t(), out_dtype=wanted, out=out)
    result = torch.nn.functional.linear(x, w).to(wanted)
    return result if out is None else out.copy_(result)


def _fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether a kernel of ours can do it."""
    if on_host(x.device) or x.shape[0] == 0:
        return False
    return x.dtype.itemsize == 2 and x.stride(1) == 1 and w.stride(1) == 1


def bf16_gemv_ref(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`bf16_gemv` in torch: fp32 (for an fp64 x fp64) sums, rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ w.to(wide).t()).to(x.dtype)

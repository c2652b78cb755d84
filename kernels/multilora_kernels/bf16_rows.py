"""Some rows times a 16-bit weight: weights as the tensor cores' left operand, K split over programs.

    y[m, n] = sum_k x[m, k] * w[n, k]
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import cdiv
from multilora_kernels.split_k import prefetch_rows, sum_partials


@triton.jit(do_not_specialize=["M"])
def bf16_rows_kernel(
    x_ptr, w_ptr, y_ptr, partial_ptr, counter_ptr, M, N, K, stride_xm, stride_wn,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1).to(tl.int64)
    in_batch = m < M
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = tl.program_id(1) * steps * BLOCK_K
    last = tl.minimum(first + steps * BLOCK_K, K)
    w_ptrs = w_ptr + row[:, None] * stride_wn + c[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_xm + c[:, None]
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_ptr + row * stride_wn, first, K, PREFETCH, 64)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
            x = tl.load(x_ptrs + k, mask=in_batch[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + k, mask=(k + c < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=in_batch[None, :] & (k + c < K)[:, None], other=0.0)
        acc = tl.dot(w.to(CT), x.to(CT), acc)
    acc, is_last = sum_partials(
        acc, partial_ptr, counter_ptr, BLOCK_N, BLOCK_M, SPLIT_K, 1, PDL
    )
    if is_last:
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        mask = in_batch[None, :] & (n < N)[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)

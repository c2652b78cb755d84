"""4-bit weights times a hundred rows or more: scaled weights as the tensor cores' left operand.

    y[m, n] = sum_k x[m, k] * round((q[n, k] - zero[n, group(k)]) * scale[n, group(k)])

Where `awq_gemm.py`'s kernel for small batches applies scales to fp32 sums, this one rounds the scaled
weights to x's dtype once, as dequantising them would: a multiprocessor then keeps one tile of
sums where the other needs two, and a tile can be 256 x 128. Weights are widened from shared memory
into registers while the multiply before runs; 4-bit weights cost a fourth of what x costs to bring
there, so tiles are long along N.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from multilora_kernels.awq_words import negated_zero, scale_of, scaled_weights
from multilora_kernels.launch import Chip, cdiv
from multilora_kernels.split_k import BLOCK_K, Tile, piece_rows, split_range, store_wide_sum, workspace

if TYPE_CHECKING:
    from multilora_kernels.awq_gemm import AwqWeight


@triton.jit
def _sum_scaled(
    x_ptrs, word_ptrs, meta_ptrs, c, first, last, K, N_padded,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs)
        for quarter in tl.static_range(4):
            if (quarter * GROUPS) % 4 == 0:  # a group begins
                meta = tl.load(meta_ptrs + (quarter * GROUPS // 4) * N_padded)
                zero = negated_zero(meta, CT)[:, None]
                scale = scale_of(meta, SCALE)[:, None]
            if EVEN_K:
                x = tl.load(x_ptrs + 32 * quarter)
            else:
                in_k = c < K - block * 128 - 32 * quarter
                x = tl.load(x_ptrs + 32 * quarter, mask=in_k[:, None], other=0.0)
            acc = tl.dot(scaled_weights(words, zero, scale, quarter, CT, SCALE), x.to(CT), acc)
        word_ptrs += N_padded * 32
        meta_ptrs += N_padded * GROUPS
        x_ptrs += 128
    return acc


@triton.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def awq_wide_kernel(
    x_ptr,
    words_ptr,
    meta_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    N_padded,
    stride_xm,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    CT: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    first, last, _ = split_range(K, SPLIT_K, 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 32)
    start = first.to(tl.int64)
    # Rows past an end repeat the last one; what comes of them is not stored.
    row_n = tl.minimum(n, N_padded - 1)
    row_m = tl.minimum(m, M - 1).to(tl.int64)
    word_ptrs = words_ptr + start * N_padded * 32 + row_n[:, None] * 32 + c[None, :]
    meta_ptrs = meta_ptr + start * (N_padded * GROUPS) + row_n
    x_ptrs = x_ptr + row_m[None, :] * stride_xm + start * 128 + c[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = _sum_scaled(
        x_ptrs, word_ptrs, meta_ptrs, c, first, last, K, N_padded,
        BLOCK_N, BLOCK_M, GROUPS, EVEN_K, STAGES, SCALE, CT,
    )  # fmt: skip
    store_wide_sum(
        acc, y_ptr, partial_ptr, counter_ptr, M, N, BLOCK_N, BLOCK_M, SPLIT_K, PIECE, PDL
    )


def run_wide(x: torch.Tensor, weight: "AwqWeight", tile: Tile) -> torch.Tensor:
    """One launch with a given tile (benchmarks and tuning call this)."""
    m, k = x.shape
    n, n_padded = weight.out_features, weight.words.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (cdiv(n_padded, tile.block_n), tile.split_k, cdiv(m, tile.block_m))
    partials, counters = workspace(tile, weight.counters, grid[0] * grid[2])
    wide = tl.float16 if x.dtype == torch.float16 else tl.bfloat16
    awq_wide_kernel[grid](
        x,
        weight.words,
        weight.meta,
        y,
        partials,
        counters,
        m,
        n,
        k,
        n_padded,
        x.stride(0),
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        SPLIT_K=tile.split_k,
        GROUPS=weight.groups_per_block,
        EVEN_K=k % BLOCK_K == 0,
        STAGES=tile.num_stages,
        SCALE=tl.float16 if weight.scale_dtype == torch.float16 else tl.bfloat16,
        CT=tl.float32 if triton.knobs.runtime.interpret else wide,
        PIECE=piece_rows(tile),
        PDL=tile.pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
    )
    return y

"""4-bit weights times a hundred rows or more: scaled weights as the tensor cores' left operand.

    y[m, n] = sum_k x[m, k] * round((q[n, k] - zero[n, group(k)]) * scale[n, group(k)])

Where `awq_gemm.py`'s kernel for small batches applies scales to fp32 sums, this one rounds the
scaled weights to x's dtype once, as dequantising them would: a multiprocessor then keeps one tile
of sums where the other needs two, and a tile can be 256 x 128. Weights are widened from shared
memory into registers; in 4 bits they cost a fourth of what x costs to bring there, so tiles are
long along N.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from multilora_kernels.awq_words import negated_zero, scale_of, scaled_weights
from multilora_kernels.launch import Chip, cdiv, next_power_of_2, tuned_table
from multilora_kernels.split_k import (
    BLOCK_K,
    Tile,
    piece_rows,
    split_range,
    store_wide_sum,
    workspace,
)

if TYPE_CHECKING:
    from multilora_kernels.awq_gemm import AwqWeight

OP = "awq_wide"
# Fewer rows keep the order of sums that `awq_gemm` promises for them.
MIN_ROWS = 65


@triton.jit
def _metas(meta_ptrs, N_padded, GROUPS: tl.constexpr):
    """The four quarters' scales and zeros, loaded once a group."""
    first = tl.load(meta_ptrs)
    second, third, fourth = first, first, first
    if GROUPS > 1:
        third = tl.load(meta_ptrs + GROUPS // 2 * N_padded)
        fourth = third
    if GROUPS == 4:
        second = tl.load(meta_ptrs + N_padded)
        fourth = tl.load(meta_ptrs + 3 * N_padded)
    return first, second, third, fourth


@triton.jit
def _quarter(words, meta, QUARTER: tl.constexpr, CT: tl.constexpr, SCALE: tl.constexpr):
    zero = negated_zero(meta, CT)[:, None]
    return scaled_weights(words, zero, scale_of(meta, SCALE)[:, None], QUARTER, CT, SCALE)


@triton.jit
def _beside(left, right):
    """[N, K] and [N, K] as [N, 2 K]; in registers, nothing moves."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _multiply(acc, w, x_ptrs, c, in_k, EVEN_K: tl.constexpr, CT: tl.constexpr):
    x = tl.load(x_ptrs) if EVEN_K else tl.load(x_ptrs, mask=(c < in_k)[:, None], other=0.0)
    return tl.dot(w, x.to(CT), acc)


@triton.jit
def _awaited(acc, CT: tl.constexpr):
    # A use of the sums: without it the compiler lets the multiply run on into the next one's
    # weights, for which ptxas then makes every single instruction wait.
    if tl.float32 == CT:
        return acc
    else:
        return tl.inline_asm_elementwise("// awaited $0", "=f,0", [acc], tl.float32, False, 1)


@triton.jit
def _sum_scaled(
    x_ptrs, word_ptrs, meta_ptrs, c, first, last, K, N_padded,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, CT: tl.constexpr, QUARTERS: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs)
        metas = _metas(meta_ptrs, N_padded, GROUPS)
        in_k = K - block * 128
        if QUARTERS == 4:
            left = _beside(
                _quarter(words, metas[0], 0, CT, SCALE), _quarter(words, metas[1], 1, CT, SCALE)
            )
            right = _beside(
                _quarter(words, metas[2], 2, CT, SCALE), _quarter(words, metas[3], 3, CT, SCALE)
            )
            acc = _multiply(acc, _beside(left, right), x_ptrs, c, in_k, EVEN_K, CT)
            acc = _awaited(acc, CT)
        elif QUARTERS == 2:
            for half in tl.static_range(2):
                w = _beside(
                    _quarter(words, metas[2 * half], 2 * half, CT, SCALE),
                    _quarter(words, metas[2 * half + 1], 2 * half + 1, CT, SCALE),
                )
                acc = _multiply(acc, w, x_ptrs + 64 * half, c, in_k - 64 * half, EVEN_K, CT)
                acc = _awaited(acc, CT)
        else:
            for quarter in tl.static_range(4):
                w = _quarter(words, metas[quarter], quarter, CT, SCALE)
                acc = _multiply(acc, w, x_ptrs + 32 * quarter, c, in_k - 32 * quarter, EVEN_K, CT)
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
    QUARTERS: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    first, last, _ = split_range(K, SPLIT_K, 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 32 * QUARTERS)
    start = first.to(tl.int64)
    # Rows past an end repeat the last one; what comes of them is not stored.
    row_n = tl.minimum(n, N_padded - 1)
    row_m = tl.minimum(m, M - 1).to(tl.int64)
    word_ptrs = words_ptr + start * N_padded * 32 + row_n[:, None] * 32 + tl.arange(0, 32)[None, :]
    meta_ptrs = meta_ptr + start * (N_padded * GROUPS) + row_n
    x_ptrs = x_ptr + row_m[None, :] * stride_xm + start * 128 + c[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = _sum_scaled(
        x_ptrs, word_ptrs, meta_ptrs, c, first, last, K, N_padded,
        BLOCK_N, BLOCK_M, GROUPS, EVEN_K, STAGES, SCALE, CT, QUARTERS,
    )  # fmt: skip
    store_wide_sum(
        acc, y_ptr, partial_ptr, counter_ptr, M, N, BLOCK_N, BLOCK_M, SPLIT_K, PIECE, PDL
    )


@dataclass(frozen=True)
class WideLaunch:
    """The tile of one multiply; `quarters` of a block of 128 inputs are multiplied at a time.

    `max_registers` a thread (0: the compiler's choice) is what lets a second program of 8 warps
    onto a multiprocessor.
    """

    tile: Tile
    quarters: int = 1
    max_registers: int = 0


@lru_cache(maxsize=4096)
def choose_launch(m: int, n: int, k: int, chip: Chip) -> WideLaunch | None:
    """Launch of x [m, k] times weights [n, k]; None where another way was measured to be faster."""
    best = tuned_table(chip, OP).get(f"n{n}-k{k}-m{next_power_of_2(m)}")
    if best is None or m < int(best.get("min_rows", MIN_ROWS)):
        return None
    tile = Tile(
        block_n=int(best["block_n"]),
        block_m=int(best["block_m"]),
        split_k=int(best.get("split_k", 1)),
        num_warps=int(best["num_warps"]),
        num_stages=int(best["num_stages"]),
        pdl=chip.has_pdl,
    )
    return WideLaunch(tile, int(best.get("quarters", 1)), int(best.get("max_registers", 0)))


def run_wide(x: torch.Tensor, weight: "AwqWeight", launch: WideLaunch) -> torch.Tensor:
    """One launch with a given choice (benchmarks and tuning call this)."""
    m, k = x.shape
    tile = launch.tile
    n, n_padded = weight.out_features, weight.words.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (cdiv(n_padded, tile.block_n), tile.split_k, cdiv(m, tile.block_m))
    partials, counters = workspace(tile, weight.counters, grid[0] * grid[2])
    extra: dict[str, Any] = {"maxnreg": launch.max_registers} if launch.max_registers else {}
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
        QUARTERS=launch.quarters,
        PIECE=piece_rows(tile),
        PDL=tile.pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
        **extra,
    )
    return y

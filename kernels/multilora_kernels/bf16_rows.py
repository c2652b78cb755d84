"""2 to 64 rows times a 16-bit weight, near memory speed.

    y[m, n] = sum_k x[m, k] * w[n, k]

x  [M, K]  bf16 or fp16, rows contiguous      w  [N, K]  x's dtype, rows contiguous
y  [M, N]  x's dtype or fp32                  nothing is written in place but the device's counters

Weights are the tensor cores' left operand (N in the place of a matrix multiply's M), K is split
over programs and summed in a fixed order (split_k.py). The split depends on N and K alone for up to
32 rows, so that a row's bits do not depend on the rows beside it. `bf16_gemv` calls it for shapes
where it was measured to be faster than the library.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import Chip, cdiv, tuned_table
from multilora_kernels.split_k import Tile, bucket_of, sum_partials, workspace

OP = "bf16_rows"
# Below 16 rows a tile of 16 takes as long as one of 8 (H200, all four shapes of an 8B).
_SMALLEST = 16
# Output tiles of one multiply whose K is split.
_MAX_COUNTERS = 1 << 14


@triton.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def bf16_rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_K)
    in_batch = m < M
    # Rows of W past the end repeat the last one; they are not stored.
    row = tl.minimum(n, N - 1).to(tl.int64)
    w_ptrs = w_ptr + row[:, None] * stride_wn + c[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_xm + c[:, None]
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = tl.program_id(1) * share
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(first, tl.minimum(first + share, K), BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
            x = tl.load(x_ptrs + k, mask=in_batch[None, :], other=0.0)
        else:
            in_k = k + c < K
            w = tl.load(w_ptrs + k, mask=in_k[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=in_batch[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(w.to(CT), x.to(CT), acc)
    acc, is_last = sum_partials(acc, partial_ptr, counter_ptr, BLOCK_N, BLOCK_M, SPLIT_K, 1, PDL)
    if is_last:
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        mask = in_batch[None, :] & (n < N)[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class RowsLaunch:
    """The tile of one multiply, and the step along K that a stage of its pipeline holds."""

    tile: Tile
    block_k: int = 128


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip) -> RowsLaunch | None:
    """Launch of x [m, k] times w [n, k]; None where nothing was measured to beat the library."""
    tuned = tuned_table(chip, OP)
    shape = tuned.get(f"n{n}-k{k}", {})
    if m > int(shape.get("max_rows", 0)):
        return None
    block_m = bucket_of(m, _SMALLEST)
    best = tuned.get(f"n{n}-k{k}-m{block_m}", {})
    tile = Tile(
        block_n=int(best.get("block_n", 64)),
        block_m=block_m,
        split_k=int(best.get("split_k", shape.get("split_k", 1))),
        num_warps=int(best.get("num_warps", 4)),
        num_stages=int(best.get("num_stages", 4)),
        pdl=chip.has_pdl,
    )
    return RowsLaunch(tile, int(best.get("block_k", 128)))


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> torch.Tensor:
    """Arrival counters, zero between launches; one launch at a time per device uses them."""
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


def run_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    launch: RowsLaunch,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One launch of the kernel with a given choice (benchmarks and tuning call this)."""
    m, k = x.shape
    n, tile = w.shape[0], launch.tile
    y = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device) if out is None else out
    grid = (cdiv(n, tile.block_n), tile.split_k, cdiv(m, tile.block_m))
    partials, counters = workspace(tile, _counters(x.device), grid[0] * grid[2])
    wide = tl.float16 if x.dtype == torch.float16 else tl.bfloat16
    bf16_rows_kernel[grid](
        x,
        w,
        y,
        partials,
        counters,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=launch.block_k,
        SPLIT_K=tile.split_k,
        EVEN_K=k % launch.block_k == 0,
        STAGES=tile.num_stages,
        CT=tl.float32 if triton.knobs.runtime.interpret else wide,
        PDL=tile.pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
    )
    return y

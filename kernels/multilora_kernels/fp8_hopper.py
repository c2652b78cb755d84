"""FP8 weights, scales by blocks of 128 x 128, times more than a decode step's few rows on Hopper.

    y[m, n] = sum_b sx[m, b] * sw[n / 128, b] * sum_{k in block b} xq[m, k] * wq[n, k]

The tensor cores sum a block of 128 inputs; its scales meet the fp32 sums in registers, beside the
other group of four warps' multiply. `tl.dot` is compiled to the same, but holds one operand in
registers and waits for every instruction. So this is Gluon, as `awq_hopper` is: it has no
interpreter, tests compile it and run it on a device.

A program's outputs are two tiles of 128 x 128 that share x or weights (of the L2's 5 TB/s a lone
tile would need 14), or one. Words travel by asynchronous copies `STAGES` - 1 blocks ahead.
"""

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multilora_kernels.fp8_hopper_choice import Fp8HopperLaunch, choose_launch
from multilora_kernels.hopper_sums import add_splits

if TYPE_CHECKING:
    from multilora_kernels.fp8_gemm import Fp8Weight

__all__ = ["Fp8HopperLaunch", "choose_launch", "run_fp8_hopper"]


@gluon.jit
def _copy_block(x_ptr, w_ptr, x_offsets, w_offsets, in_batch, x_tiles, w_tiles, stage, inside):
    """Ask for 128 inputs of a tile's rows of x and of the weights, which begin at the pointers."""
    async_copy.async_copy_global_to_shared(
        x_tiles.index(stage), x_ptr + x_offsets, mask=in_batch & inside
    )
    async_copy.async_copy_global_to_shared(w_tiles.index(stage), w_ptr + w_offsets, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _scales(sx_ptr, sw_ptr, row, strip, M, num_blocks, some):
    """What a block's sums are multiplied by, of each row; zeros without a block."""
    sx = gl.load(sx_ptr + row.to(gl.int64) * num_blocks, mask=(row < M) & some, other=0.0)
    return sx * gl.load(sw_ptr + strip * num_blocks, mask=some, other=0.0)


@gluon.jit
def _scaled_sum(acc, x, w, scale):
    """acc + scale * (x times w), both in shared memory, [128, 128] and a scale for each row."""
    layout: gl.constexpr = acc.type.layout
    none = gl.zeros([128, 128], gl.float32, layout)
    product = warpgroup_mma(x, w, none, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    return acc + product * gl.expand_dims(scale, 1)


@gluon.jit
def _store(acc, y_ptr, first_m, first_n, M, N):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), layout)
    m = first_m + gl.arange(0, 128, gl.SliceLayout(1, layout))
    n = first_n + gl.arange(0, 128, gl.SliceLayout(0, layout))
    offsets = gl.expand_dims(m.to(gl.int64) * N, 1) + gl.expand_dims(n, 0)
    mask = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
    gl.store(y_ptr + offsets, y, mask=mask)


@gluon.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def fp8_hopper_kernel(
    x_ptr,
    sx_ptr,
    w_ptr,
    sw_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = BLOCK_M * BLOCK_N // 16384
    AHEAD: gl.constexpr = STAGES - 1
    gl.static_assert(TILES == 1 or TILES == 2)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, 128], shared)
    w_tiles = gl.allocate_shared_memory(w_ptr.dtype.element_ty, [STAGES, BLOCK_N, 128], shared)

    num_blocks = K // 128
    per_split = (num_blocks + SPLIT_K - 1) // SPLIT_K
    first = gl.program_id(2) * per_split
    count = gl.maximum(gl.minimum(per_split, num_blocks - first), 0)
    first_m, first_n = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, copy_layout)), 0)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copy_layout))
    # Outputs past the end repeat the last one; they are not stored.
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copy_layout))
    n = gl.minimum(n, N - 1 - first_n)
    x_offsets, w_offsets = gl.expand_dims(m * K, 1) + column, gl.expand_dims(n * K, 1) + column
    x_ptr += first_m.to(gl.int64) * K + first * 128
    w_ptr += first_n.to(gl.int64) * K + first * 128
    in_batch = gl.expand_dims(first_m + m < M, 1)
    row = first_m + gl.arange(0, 128, row_layout)
    second_row = row + (BLOCK_M - 128)
    sx_ptr += first
    last_strip = (N + 127) // 128 - 1
    strip = first_n // 128
    second_strip = gl.minimum(strip + (BLOCK_N // 128 - 1), last_strip)
    sw_ptr += first
    if PDL:
        tl.extra.cuda.gdc_wait()
    for block in gl.static_range(AHEAD):
        _copy_block(
            x_ptr + block * 128, w_ptr + block * 128, x_offsets, w_offsets, in_batch, x_tiles,
            w_tiles, block, block < count,
        )  # fmt: skip
    acc = gl.zeros([128, 128], gl.float32, acc_layout)
    second_acc = gl.zeros([128, 128], gl.float32, acc_layout)
    some = count > 0
    scale = _scales(sx_ptr, sw_ptr, row, strip, M, num_blocks, some)
    second_scale = _scales(sx_ptr, sw_ptr, second_row, second_strip, M, num_blocks, some)
    for block in range(count):
        stage = block % STAGES
        async_copy.wait_group(AHEAD - 1)
        tl.debug_barrier()
        # Every warp has waited for the block before this one: its stage is filled again.
        ahead = block + AHEAD
        _copy_block(
            x_ptr + ahead * 128, w_ptr + ahead * 128, x_offsets, w_offsets, in_batch, x_tiles,
            w_tiles, ahead % STAGES, ahead < count,
        )  # fmt: skip
        # The next block's scales are on their way while this one is multiplied.
        more, at = block + 1 < count, block + 1
        next_scale = _scales(sx_ptr + at, sw_ptr + at, row, strip, M, num_blocks, more)
        x, w = x_tiles.index(stage), w_tiles.index(stage).permute([1, 0])
        acc = _scaled_sum(acc, x.slice(0, 128, dim=0), w.slice(0, 128, dim=1), scale)
        scale = next_scale
        if TILES == 2:
            next_scale = _scales(
                sx_ptr + at, sw_ptr + at, second_row, second_strip, M, num_blocks, more
            )
            second_x = x.slice(BLOCK_M - 128, 128, dim=0)
            second_w = w.slice(BLOCK_N - 128, 128, dim=1)
            second_acc = _scaled_sum(second_acc, second_x, second_w, second_scale)
            second_scale = next_scale
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    acc, second_acc, whole = add_splits(acc, second_acc, partial_ptr, counter_ptr, TILES, SPLIT_K)
    if whole:
        _store(acc, y_ptr, first_m, first_n, M, N)
        if TILES == 2:
            _store(second_acc, y_ptr, first_m + BLOCK_M - 128, first_n + BLOCK_N - 128, M, N)


def run_fp8_hopper(
    xq: torch.Tensor,
    sx: torch.Tensor,
    weight: "Fp8Weight",
    dtype: torch.dtype,
    launch: Fp8HopperLaunch,
) -> torch.Tensor:
    """One multiply of rows [M, K] quantised by blocks, with a given choice; K is whole blocks."""
    m, k = xq.shape
    n = weight.out_features
    assert weight.blockwise and k % 128 == 0 and sx.is_contiguous()
    y = torch.empty((m, n), dtype=dtype, device=xq.device)
    grid = launch.grid(m, n)
    partials, counters = y, weight.counters
    if launch.split_k > 1:
        size = launch.partial_bytes(m, n) // 4
        partials = torch.empty(size, dtype=torch.float32, device=xq.device)
        needed = grid[0] * grid[1] * (launch.split_k - 1)
        if needed > counters.numel():
            counters = torch.zeros(needed, dtype=torch.int32, device=xq.device)
    fp8_hopper_kernel[grid](
        xq,
        sx,
        weight.q,
        weight.scale,
        y,
        partials,
        counters,
        m,
        n,
        k,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLIT_K=launch.split_k,
        STAGES=launch.num_stages,
        PDL=True,
        num_warps=8,
        launch_pdl=True,
    )
    return y

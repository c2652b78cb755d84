"""4-bit weights times a hundred rows or more on Hopper, multiplies and widening side by side.

    y[m, n] = sum_k x[m, k] * round((q[n, k] - zero[n, group(k)]) * scale[n, group(k)])

Weights reach registers as 4-bit words, are scaled and rounded to x's dtype there, once, and are the
tensor cores' left operand; a tile is long along N, where an operand costs 4 bits. `wgmma` runs
while the threads that issued it widen the next weights: Triton's own `tl.dot` waits for a
multiply whose left operand is in registers first, and both groups of four warps wait at once (1.95
us a step of 256 x 128 x 128 on an H200, of which the tensor cores need 1.2). So this is Gluon,
where a multiply is waited for by name. It has no interpreter: tests compile it, and run it on a
device.

One step is a block of 128 inputs. Words, scales and x travel to shared memory by asynchronous
copies `STAGES` - 1 steps ahead; a stage is filled again when no warp's multiply can read it.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multilora_kernels.awq_words import negated_zero, scale_of, scaled_weights
from multilora_kernels.hopper_choice import HopperLaunch, choose_launch
from multilora_kernels.launch import cdiv
from multilora_kernels.split_choice import BLOCK_K

if TYPE_CHECKING:
    from multilora_kernels.awq_gemm import AwqWeight

__all__ = ["HopperLaunch", "choose_launch", "run_hopper", "sum_planes"]

# What one program of `sum_planes_kernel` adds.
_PIECE_N, _PIECE_M = 64, 32


@gluon.constexpr_function
def _acc_layout(rows):
    """Sums of a strip of 128 outputs by `rows` rows, 16 outputs to each of 8 warps."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, rows, 16])


@gluon.jit
def _shared_memory(
    x_type: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Stages for words, for scales, and for both halves of a block of x."""
    words = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )
    metas = gl.allocate_shared_memory(
        gl.int32, [STAGES * GROUPS, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # An allocation each: Triton puts a barrier between copies into one.
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    halves = (
        gl.allocate_shared_memory(x_type, [STAGES, BLOCK_M, 64], x_layout),
        gl.allocate_shared_memory(x_type, [STAGES, BLOCK_M, 64], x_layout),
    )
    return words, metas, halves


@gluon.jit
def _copy_block(
    words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, stage, inside, N_padded,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Ask for a block's words [BLOCK_N, 32], its scales, [BLOCK_N] a group, and x [BLOCK_M, 128];
    returns where the next block's are."""
    async_copy.async_copy_global_to_shared(words.index(stage), words_ptrs, mask=inside)
    for group in gl.static_range(GROUPS):
        async_copy.async_copy_global_to_shared(
            metas.index(stage * GROUPS + group), meta_ptrs + group * N_padded, mask=inside
        )
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            halves[half].index(stage), x_ptrs + 64 * half, mask=in_batch & inside
        )
    async_copy.commit_group()
    return words_ptrs + N_padded * 32, meta_ptrs + N_padded * GROUPS, x_ptrs + 128


@gluon.jit
def _sources(
    words_ptr, meta_ptr, x_ptr, first, strip, second_strip, row_m, N_padded, stride_xm,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the first block's words, scales and first half of x lie, an address for every lane.
    Outputs are those of two strips of 128, or of one where BLOCK_N is 128."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    line_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    n = gl.where(row < 128, strip * 128, second_strip * 128 - 128) + row
    column = gl.arange(0, 32, gl.SliceLayout(0, layout))
    start = first.to(gl.int64)
    words_ptr += start * N_padded * 32
    words_ptrs = words_ptr + gl.expand_dims(n, 1) * 32 + gl.expand_dims(column, 0)
    meta_ptr += start * (N_padded * GROUPS)
    line = gl.arange(0, BLOCK_N, line_layout)
    line += gl.where(line < 128, strip * 128, second_strip * 128 - 128)
    x_column = gl.arange(0, 64, gl.SliceLayout(0, X_LAYOUT))
    x_offsets = gl.expand_dims(row_m.to(gl.int64) * stride_xm, 1) + gl.expand_dims(x_column, 0)
    return words_ptrs, meta_ptr + line, x_ptr + start * 128 + x_offsets


@gluon.jit
def _words(words, layout: gl.constexpr, PARTS: gl.constexpr):
    """A block's words, one tensor for each part of its outputs."""
    PART: gl.constexpr = words.shape[0] // PARTS
    first = words.slice(0, PART, dim=0).load(layout)
    if PARTS == 1:
        return (first,)
    else:
        return first, words.slice(PART, PART, dim=0).load(layout)


@gluon.jit
def _part_metas(metas, at, offset: gl.constexpr, layout: gl.constexpr, PART: gl.constexpr,
                GROUPS: gl.constexpr):  # fmt: skip
    first = metas.index(at).slice(offset, PART, dim=0).load(layout)
    if GROUPS == 1:
        return (first,)
    elif GROUPS == 2:
        return first, metas.index(at + 1).slice(offset, PART, dim=0).load(layout)
    else:
        second = metas.index(at + 1).slice(offset, PART, dim=0).load(layout)
        third = metas.index(at + 2).slice(offset, PART, dim=0).load(layout)
        return first, second, third, metas.index(at + 3).slice(offset, PART, dim=0).load(layout)


@gluon.jit
def _metas(metas, stage, layout: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
           GROUPS: gl.constexpr):  # fmt: skip
    """A block's scales and zeros, for each part of its outputs one tensor for each group."""
    first = _part_metas(metas, stage * GROUPS, 0, layout, PART, GROUPS)
    if PARTS == 1:
        return first
    else:
        return first + _part_metas(metas, stage * GROUPS, PART, layout, PART, GROUPS)


@gluon.jit
def _weights(
    packed, meta, i: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr,
    CT: gl.constexpr,
):  # fmt: skip
    """The weights of a block's multiply i: a quarter of its inputs, a part of its outputs."""
    words = packed[i % PARTS]
    scales = meta[i % PARTS * GROUPS + i // PARTS * GROUPS // 4]
    zero = gl.expand_dims(negated_zero(scales, CT), 1)
    scale = gl.expand_dims(scale_of(scales, SCALE), 1)
    return scaled_weights(words, zero, scale, i // PARTS, CT, SCALE)


@gluon.jit
def _all_but_last(acc, second_acc, w, next_w, PARTS: gl.constexpr):
    """Wait for every multiply but the last one, once the next weights are made; returns those."""
    if PARTS == 2:
        acc, second_acc, w, next_w = warpgroup_mma_wait(1, deps=[acc, second_acc, w, next_w])
    else:
        acc, w, next_w = warpgroup_mma_wait(1, deps=[acc, w, next_w])
    return acc, second_acc, next_w


@gluon.jit
def _last(acc, second_acc, PARTS: gl.constexpr):
    """Wait for every multiply."""
    if PARTS == 2:
        acc, second_acc = warpgroup_mma_wait(0, deps=[acc, second_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, second_acc


@gluon.jit
def _multiply(
    words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SECOND_M: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, SCALE: gl.constexpr, CT: gl.constexpr,
):  # fmt: skip
    """The products of a tile's two strips over `count` blocks, the second one's with the first
    SECOND_M rows alone; `_fill` was called for it."""
    AHEAD: gl.constexpr = STAGES - 1
    acc_layout: gl.constexpr = _acc_layout(BLOCK_M)
    second_layout: gl.constexpr = _acc_layout(SECOND_M)
    word_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    second_word_layout: gl.constexpr = gl.DotOperandLayout(0, second_layout, 2)
    meta_layout: gl.constexpr = gl.SliceLayout(1, word_layout)
    # What a step multiplies at a time: 32 inputs of a strip.
    PARTS: gl.constexpr = BLOCK_N // 128
    acc = gl.zeros([128, BLOCK_M], gl.float32, acc_layout)
    second_acc = gl.zeros([128, SECOND_M], gl.float32, second_layout)
    async_copy.wait_group(AHEAD - 1)
    tl.debug_barrier()
    packed = _words(words.index(0), word_layout, PARTS)
    meta = _metas(metas, 0, meta_layout, 128, PARTS, GROUPS)
    w = _weights(packed, meta, 0, PARTS, GROUPS, SCALE, CT)
    for block in range(count):
        stage = block % STAGES
        following = (block + 1) % STAGES
        for i in gl.static_range(4 * PARTS):
            half = halves[i // PARTS // 2].index(stage)
            x = half.slice(i // PARTS % 2 * 32, 32, dim=1).permute([1, 0])
            if i % PARTS == 0:
                acc = warpgroup_mma(w, x, acc, is_async=True)
            elif SECOND_M == BLOCK_M:
                second_acc = warpgroup_mma(w, x, second_acc, is_async=True)
            else:
                few = x.slice(0, SECOND_M, dim=1)
                same_w = gl.convert_layout(w, second_word_layout, assert_trivial=True)
                second_acc = warpgroup_mma(same_w, few, second_acc, is_async=True)
            if i == 2 * PARTS:
                async_copy.wait_group(AHEAD - 2)
                tl.debug_barrier()
                # Every warp is done with the block before this one: its stage is filled again.
                words_ptrs, meta_ptrs, x_ptrs = _copy_block(
                    words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves,
                    (block + AHEAD) % STAGES, block + AHEAD < count, N_padded, GROUPS,
                )  # fmt: skip
                next_packed = _words(words.index(following), word_layout, PARTS)
                next_meta = _metas(metas, following, meta_layout, 128, PARTS, GROUPS)
            if i == 4 * PARTS - 1:
                packed, meta = next_packed, next_meta
            next_w = _weights(packed, meta, (i + 1) % (4 * PARTS), PARTS, GROUPS, SCALE, CT)
            acc, second_acc, w = _all_but_last(acc, second_acc, w, next_w, PARTS)
    return _last(acc, second_acc, PARTS)


@gluon.jit
def _fill(
    words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a tile's first blocks; returns where the next block's words, scales and x are."""
    for block in gl.static_range(STAGES - 1):
        words_ptrs, meta_ptrs, x_ptrs = _copy_block(
            words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, block, block < count,
            N_padded, GROUPS,
        )  # fmt: skip
    return words_ptrs, meta_ptrs, x_ptrs


@gluon.jit
def _store(acc, y_ptr, strip, first_m, flip, M, N):
    """A strip's sums to y."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), layout)
    n = strip * 128 + gl.arange(0, 128, gl.SliceLayout(1, layout))
    m = first_m + (gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout)) ^ flip)
    offsets = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
    mask = gl.expand_dims(m < M, 0) & gl.expand_dims(n < N, 1)
    gl.store(y_ptr + offsets, y, mask=mask)


@gluon.jit
def _partials(ptr, acc):
    """Where a strip's sums lie beside y, an address for each."""
    n = gl.arange(0, 128, gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return ptr + gl.expand_dims(n * acc.shape[1], 1) + gl.expand_dims(m, 0)


@gluon.jit
def _leave(acc, second_acc, partial_ptr, PARTS: gl.constexpr):
    """A program's sums beside y, where a second launch adds the splits."""
    tiles = gl.num_programs(1) * gl.num_programs(0)
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    plane = (gl.program_id(2) * tiles + tile).to(gl.int64)
    partial_ptr += plane * (acc.numel + (PARTS - 1) * second_acc.numel)
    gl.store(_partials(partial_ptr, acc), acc)
    if PARTS == 2:
        gl.store(_partials(partial_ptr + acc.numel, second_acc), second_acc)


@gluon.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def awq_hopper_kernel(
    x_ptr,
    words_ptr,
    meta_ptr,
    y_ptr,
    partial_ptr,
    M,
    N,
    K,
    N_padded,
    stride_xm,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE: gl.constexpr,
    CT: gl.constexpr,
    PDL: gl.constexpr,
):
    TILE_N: gl.constexpr = 128 if BLOCK_N == 128 else 256
    PARTS: gl.constexpr = TILE_N // 128
    x_copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    words, metas, halves = _shared_memory(x_ptr.dtype.element_ty, TILE_N, BLOCK_M, GROUPS, STAGES)

    num_blocks = K // 128
    per_split = (num_blocks + SPLIT_K - 1) // SPLIT_K
    first = gl.program_id(2) * per_split
    count = gl.maximum(gl.minimum(per_split, num_blocks - first), 0)
    # Strips past the last one repeat it.
    last = N_padded // 128 - 1
    pair, side = gl.program_id(1) // 2, gl.program_id(1) % 2
    if BLOCK_N == 448:  # of seven strips three each, and one for both
        strip = pair * 7 + side * 3
        flip = side * (BLOCK_M // 2)
    else:
        strip = gl.program_id(1) * PARTS
        flip = 0
    second_strip = strip + 1
    first_m = gl.program_id(0) * BLOCK_M
    # The second program of a pair holds the second half of its rows first: that half is its share.
    # Rows past the end are zeros. (While they repeated the last row, qkv took 40 us at 192 rows
    # and 34 at 256: all of them asked for one line.)
    row_m = first_m + (gl.arange(0, BLOCK_M, gl.SliceLayout(1, x_copy_layout)) ^ flip)
    in_batch = gl.expand_dims(row_m < M, 1)
    strip, second_strip = gl.minimum(strip, last), gl.minimum(second_strip, last)
    words_ptrs, meta_ptrs, x_ptrs = _sources(
        words_ptr, meta_ptr, x_ptr, first, strip, second_strip, row_m, N_padded, stride_xm, TILE_N,
        GROUPS, x_copy_layout,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    words_ptrs, meta_ptrs, x_ptrs = _fill(
        words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded, GROUPS,
        STAGES,
    )  # fmt: skip
    acc, second_acc = _multiply(
        words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded, TILE_N,
        BLOCK_M, BLOCK_M, GROUPS, STAGES, SCALE, CT,
    )  # fmt: skip
    if BLOCK_N == 448:
        gl.static_assert(SPLIT_K == 1)
        third = gl.minimum(pair * 7 + side * 3 + 2, last)
        shared = gl.minimum(pair * 7 + 6, last)
        words_ptrs, meta_ptrs, x_ptrs = _sources(
            words_ptr, meta_ptr, x_ptr, first, third, shared, row_m, N_padded, stride_xm, TILE_N,
            GROUPS, x_copy_layout,
        )  # fmt: skip
        async_copy.wait_group(0)
        tl.debug_barrier()  # no warp reads the first tile's stages any more
        words_ptrs, meta_ptrs, x_ptrs = _fill(
            words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded, GROUPS,
            STAGES,
        )  # fmt: skip
        _store(acc, y_ptr, strip, first_m, flip, M, N)
        _store(second_acc, y_ptr, second_strip, first_m, flip, M, N)
        strip, second_strip = third, shared
        acc, few_acc = _multiply(
            words_ptrs, meta_ptrs, x_ptrs, in_batch, words, metas, halves, count, N_padded, TILE_N,
            BLOCK_M, BLOCK_M // 2, GROUPS, STAGES, SCALE, CT,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        _store(acc, y_ptr, strip, first_m, flip, M, N)
        _store(few_acc, y_ptr, second_strip, first_m, flip, M, N)
    else:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if SPLIT_K > 1:
            _leave(acc, second_acc, partial_ptr, PARTS)
        else:
            _store(acc, y_ptr, strip, first_m, flip, M, N)
            if PARTS == 2:
                _store(second_acc, y_ptr, second_strip, first_m, flip, M, N)


@triton.jit(do_not_specialize=["M"])
def sum_planes_kernel(
    partial_ptr,
    y_ptr,
    M,
    N,
    N_padded,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PIECE_N: tl.constexpr,
    PIECE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[m, n] = the sum of `awq_hopper_kernel`'s partials, in the order of the splits."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * PIECE_N + tl.arange(0, PIECE_N)
    m = tl.program_id(1) * PIECE_M + tl.arange(0, PIECE_M)
    n_tile = tl.program_id(0) * PIECE_N // BLOCK_N
    m_tile = tl.program_id(1) * PIECE_M // BLOCK_M
    m_tiles = tl.cdiv(M, BLOCK_M)
    tile = (n_tile * m_tiles + m_tile).to(tl.int64)
    inside = (n < N)[:, None] & (m < M)[None, :]
    offsets = (n - n_tile * BLOCK_N)[:, None] * BLOCK_M + (m - m_tile * BLOCK_M)[None, :]
    base = partial_ptr + tile * (BLOCK_N * BLOCK_M) + offsets
    stride = tl.cdiv(N_padded, BLOCK_N).to(tl.int64) * m_tiles * (BLOCK_N * BLOCK_M)
    total = tl.load(base, mask=inside, other=0.0)
    for i in tl.static_range(1, SPLIT_K):
        total += tl.load(base + i * stride, mask=inside, other=0.0)
    out = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=inside)


def run_hopper(x: torch.Tensor, weight: "AwqWeight", launch: HopperLaunch) -> torch.Tensor:
    """One multiply with a given choice (benchmarks and tuning call this). Copies are of 16 bytes,
    and the compiler has to know: x's rows lie multiples of 16 elements apart. K is whole blocks.
    """
    m, k = x.shape
    assert k % BLOCK_K == 0 and x.stride(0) % 16 == 0 and x.storage_offset() % 8 == 0
    assert launch.split_k == 1 or launch.block_n in (128, 256)
    n, n_padded = weight.out_features, weight.words.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    partials = y
    if launch.split_k > 1:
        size = launch.partial_bytes(m, n_padded) // 4
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    awq_hopper_kernel[launch.grid(m, n_padded)](
        x,
        weight.words,
        weight.meta,
        y,
        partials,
        m,
        n,
        k,
        n_padded,
        x.stride(0),
        BLOCK_N=launch.block_n,
        BLOCK_M=launch.block_m,
        SPLIT_K=launch.split_k,
        GROUPS=weight.groups_per_block,
        STAGES=launch.num_stages,
        SCALE=tl.float16 if weight.scale_dtype == torch.float16 else tl.bfloat16,
        CT=tl.float16 if x.dtype == torch.float16 else tl.bfloat16,
        PDL=True,
        num_warps=8,
        launch_pdl=True,
    )
    if launch.split_k > 1:
        sum_planes(partials, y, n_padded, launch, pdl=True)
    return y


def sum_planes(
    partials: torch.Tensor, y: torch.Tensor, n_padded: int, launch: HopperLaunch, pdl: bool
) -> None:
    """y [M, N] = the sum of partials, fp32 [split_k, tiles of N, tiles of M, block_n, block_m]."""
    m, n = y.shape
    sum_planes_kernel[(cdiv(n, _PIECE_N), cdiv(m, _PIECE_M))](
        partials,
        y,
        m,
        n,
        n_padded,
        BLOCK_N=launch.block_n,
        BLOCK_M=launch.block_m,
        SPLIT_K=launch.split_k,
        PIECE_N=_PIECE_N,
        PIECE_M=_PIECE_M,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )

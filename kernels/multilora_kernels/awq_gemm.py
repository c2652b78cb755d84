"""4-bit weights times 16-bit activations.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

x  [M, K]  bf16 or fp16, rows contiguous      weight  AwqWeight [N, K] (awq_pack.py)
y  [M, N]  x's dtype, allocated here          nothing is written in place but weight.counters

Up to a few hundred rows one kernel reads the packed weights once at memory speed: the weights are
the left operand (N in the place of a matrix multiply's M), so that a batch of 8 rows wastes no
tensor-core rows; q - zero is exact in bf16 and fp16, scales are applied to fp32 sums once a group.
K is split over programs; the split depends on N, K and the chip alone, so that a row's bits
depend neither on the rows beside it nor, within this path, on how many there are.
Larger batches run `awq_hopper` on Hopper up to 256 or 512 rows (hopper_choice.py), or dequantise
slices of N to 16 bits and multiply those with the vendor's library.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from multilora_kernels import hopper_choice
from multilora_kernels.awq_hopper import HopperLaunch, run_hopper
from multilora_kernels.awq_words import exact_weights, negated_zero, scale_of
from multilora_kernels.int4_matrix import Int4Matrix
from multilora_kernels.launch import Chip, cdiv, chip_for, on_host, tuned_table
from multilora_kernels.slices import SLICE_BYTES, multiply_slices, slice_rows
from multilora_kernels.split_k import (
    BLOCK_K,
    Tile,
    bucket_of,
    choose_tile,
    split_range,
    sum_partials,
    workspace,
)

OP = "awq_gemm"
PAD_N = 128  # AwqWeight holds a multiple of so many outputs


@dataclass(frozen=True)
class AwqWeight:
    """A 4-bit weight [N, K] in awq_pack.py's form; `counters` make one multiply at a time safe."""

    words: torch.Tensor  # int16 [K/128, N padded, 32]
    meta: torch.Tensor  # int32 [K/128, G, N padded]
    counters: torch.Tensor  # int32 [N padded / 64], zero between multiplies
    out_features: int
    in_features: int
    scale_dtype: torch.dtype  # float16 or bfloat16

    @property
    def groups_per_block(self) -> int:
        """Groups in a block of 128 inputs: 1, 2 or 4."""
        return self.meta.shape[1]

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.meta, self.counters))

    def to(self, device: torch.device | str) -> "AwqWeight":
        """The same weight on `device`."""
        return replace(
            self,
            words=self.words.to(device),
            meta=self.meta.to(device),
            counters=self.counters.to(device),
        )

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] times this weight, [M, N] in x's dtype."""
        return awq_gemm(x, self)

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """W [N, K] in `dtype`, rounded once from (q - zero) * scale in fp32."""
        return dequantise(self, dtype)


def unpack(weight: AwqWeight) -> Int4Matrix:
    """The inverse of `pack`, with groups of at most 128 and K still padded."""
    blocks, outputs, _ = weight.words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=weight.words.device)
    q = (weight.words.int().unsqueeze(2) >> shifts[:, None]) & 0xF  # [blocks, N, 4, 32]
    q = q.permute(1, 0, 2, 3).reshape(outputs, blocks * BLOCK_K)
    meta = weight.meta.permute(2, 0, 1).reshape(outputs, -1)
    scale = (meta >> 16).to(torch.int16).view(weight.scale_dtype)
    n = weight.out_features
    return Int4Matrix(q[:n].to(torch.uint8), (meta[:n] & 0xF).to(torch.uint8), scale[:n])


@triton.jit
def _load_x(x_ptrs, in_batch, c, in_k, EVEN_K: tl.constexpr):
    if EVEN_K:
        x = tl.load(x_ptrs, mask=in_batch, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=in_batch & (c < in_k)[:, None], other=0.0)
    return x


@triton.jit
def _sum_blocks(
    x_ptrs, word_ptrs, meta_ptrs, in_batch, c, first, last, per_part, K, N_padded,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, CT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first_part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        if PARTS == 2:
            half = block == first + per_part
            first_part = tl.where(half, acc, first_part)
            acc = tl.where(half, 0.0, acc)
        words = tl.load(word_ptrs)
        meta = tl.load(meta_ptrs)
        zero = negated_zero(meta, CT)[:, None]
        part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for quarter in tl.static_range(4):
            in_k = K - block * 128 - 32 * quarter
            x = _load_x(x_ptrs + 32 * quarter, in_batch, c, in_k, EVEN_K)
            part = tl.dot(exact_weights(words, zero, quarter, CT), x.to(CT), part)
            if quarter < 3 and ((quarter + 1) * GROUPS) % 4 == 0:
                # This group ends here: scale it and take up the next one's scale and zero.
                acc += part * scale_of(meta, SCALE)[:, None]
                part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                meta = tl.load(meta_ptrs + ((quarter + 1) * GROUPS // 4) * N_padded)
                zero = negated_zero(meta, CT)[:, None]
        acc += part * scale_of(meta, SCALE)[:, None]
        word_ptrs += N_padded * 32
        meta_ptrs += N_padded * GROUPS
        x_ptrs += 128
    return acc + first_part if PARTS == 2 else acc


@triton.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def awq_gemm_kernel(
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
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(2)
    first, last, per_part = split_range(K, SPLIT_K, PARTS)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 32)
    in_batch = (m < M)[None, :]
    start = first.to(tl.int64)
    word_ptrs = words_ptr + start * N_padded * 32 + n[:, None] * 32 + c[None, :]
    meta_ptrs = meta_ptr + start * (N_padded * GROUPS) + n
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_xm + start * 128 + c[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = _sum_blocks(
        x_ptrs, word_ptrs, meta_ptrs, in_batch, c, first, last, per_part, K, N_padded,
        BLOCK_N, BLOCK_M, GROUPS, EVEN_K, STAGES, SCALE, CT, PARTS,
    )  # fmt: skip
    acc, is_last = sum_partials(
        acc, partial_ptr, counter_ptr, BLOCK_N, BLOCK_M, SPLIT_K, PAIRS, PDL
    )
    if is_last:
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_batch & (n < N)[:, None])


@triton.jit
def dequantise_kernel(
    words_ptr,
    meta_ptr,
    w_ptr,
    n_start,
    n_stop,
    K,
    N_padded,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Rows n_start.. of W into w [n_stop - n_start, K]: one block of 128 inputs a program."""
    # Neighbouring programs walk along K: what they write is contiguous.
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = n_start + row
    c = tl.arange(0, 32)
    inside = (n < n_stop)[:, None]
    words = tl.load(words_ptr + (block * N_padded + n[:, None]) * 32 + c[None, :], mask=inside)
    out = w_ptr + row[:, None].to(tl.int64) * K + block * 128 + c[None, :]
    for quarter in tl.static_range(4):
        group = quarter * GROUPS // 4
        meta = tl.load(meta_ptr + (block * GROUPS + group) * N_padded + n, mask=n < n_stop)
        q = ((words.to(tl.int32) >> (4 * quarter)) & 0xF) - (meta & 0xF)[:, None]
        w = q.to(tl.float32) * scale_of(meta, SCALE)[:, None]
        in_k = (block * 128 + 32 * quarter + c < K)[None, :]
        tl.store(out + 32 * quarter, w.to(w_ptr.dtype.element_ty), mask=inside & in_k)


@dataclass(frozen=True)
class AwqLaunch:
    """One multiply: by `tile`, by `hopper`, or `slice_n` rows of W dequantised at a time."""

    tile: Tile | None = None
    hopper: HopperLaunch | None = None
    slice_n: int = 0


# Batches up to here take the fused kernel where nothing was tuned.
_MAX_FUSED = 128


def _stage_bytes(tile: Tile) -> int:
    # Words, up to 4 groups of meta twice (for zero and for scale), and x.
    return int(tile.block_n * (64 + 2 * 4 * 4) + tile.block_m * BLOCK_K * 2)


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip, aligned: bool = True) -> AwqLaunch:
    """Launch of x [m, k] times weights [n, k]; up to 64 rows the split does not depend on m.

    `aligned`: x begins at a multiple of 16 bytes, its rows lie multiples of 16 elements apart.
    """
    hopper = hopper_choice.choose_launch(m, n, k, chip) if aligned else None
    if hopper is not None:
        return AwqLaunch(hopper=hopper)
    shape = tuned_table(chip, OP).get(f"n{n}-k{k}", {})
    if m > int(shape.get("max_fused", _MAX_FUSED)):
        return AwqLaunch(slice_n=slice_rows(n, k, int(shape.get("slice_bytes", SLICE_BYTES))))
    block_m = bucket_of(m)
    base = Tile(block_m=block_m, num_warps=2 if block_m <= 16 else 4)
    return AwqLaunch(choose_tile(OP, base, n, k, chip, _stage_bytes))


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float16 if dtype == torch.float16 else tl.bfloat16


def run_fused(x: torch.Tensor, weight: AwqWeight, tile: Tile) -> torch.Tensor:
    """One launch of the fused kernel with a given tile (benchmarks and tuning call this)."""
    m, k = x.shape
    n, n_padded = weight.out_features, weight.words.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (n_padded // tile.block_n, tile.split_k, cdiv(m, tile.block_m))
    partials, counters = workspace(tile, weight.counters, grid[0] * grid[2])
    interpreted = triton.knobs.runtime.interpret
    awq_gemm_kernel[grid](
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
        SCALE=_triton_dtype(weight.scale_dtype),
        CT=tl.float32 if interpreted else _triton_dtype(x.dtype),
        PARTS=tile.parts,
        PAIRS=tile.pairs,
        PDL=tile.pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
    )
    return y


def _dequantise_rows(weight: AwqWeight, w: torch.Tensor, start: int) -> None:
    rows, k = w.shape
    block_n = 32
    grid = (weight.words.shape[0], cdiv(rows, block_n))
    dequantise_kernel[grid](
        weight.words,
        weight.meta,
        w,
        start,
        start + rows,
        k,
        weight.words.shape[1],
        BLOCK_N=block_n,
        GROUPS=weight.groups_per_block,
        SCALE=_triton_dtype(weight.scale_dtype),
        num_warps=4,
    )


def run_sliced(x: torch.Tensor, weight: AwqWeight, slice_n: int) -> torch.Tensor:
    """Dequantise `slice_n` rows of W at a time and multiply each slice with the library."""
    return multiply_slices(x, weight.out_features, slice_n, partial(_dequantise_rows, weight))


def awq_gemm(x: torch.Tensor, weight: AwqWeight) -> torch.Tensor:
    """x [M, K] times a packed 4-bit weight [N, K]: [M, N] in x's dtype."""
    assert x.ndim == 2 and x.shape[1] == weight.in_features, f"x {tuple(x.shape)}"
    assert x.device == weight.words.device
    interpreted = triton.knobs.runtime.interpret
    if x.device.type == "cpu" and not interpreted:
        return awq_gemm_ref(x, weight)
    assert x.dtype in (torch.bfloat16, torch.float16), f"x is {x.dtype}"
    assert x.stride(1) == 1
    if x.shape[0] == 0:
        return x.new_empty((0, weight.out_features))
    m, k = x.shape
    aligned = x.stride(0) % 16 == 0 and x.storage_offset() % 8 == 0
    launch = choose_launch(m, weight.out_features, k, chip_for(x.device), aligned)
    if launch.tile is not None:
        return run_fused(x, weight, launch.tile)
    if launch.hopper is not None:
        return run_hopper(x, weight, launch.hopper)
    return run_sliced(x, weight, launch.slice_n)


def dequantise(weight: AwqWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """W [N, K] in `dtype`, each weight rounded once from its fp32 value."""
    if on_host(weight.words.device):
        return dequantise_ref(weight, dtype)
    shape = (weight.out_features, weight.in_features)
    w = torch.empty(shape, dtype=dtype, device=weight.words.device)
    _dequantise_rows(weight, w, 0)
    return w


def dequantise_ref(weight: AwqWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`dequantise` in torch, any device."""
    return unpack(weight).dequantise()[:, : weight.in_features].to(dtype)


def awq_gemm_ref(x: torch.Tensor, weight: AwqWeight) -> torch.Tensor:
    """`awq_gemm` in torch: fp32 (for an fp64 x fp64) weights and sums, rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ dequantise_ref(weight, wide).t()).to(x.dtype)

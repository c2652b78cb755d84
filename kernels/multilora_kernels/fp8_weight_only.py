"""FP8 (e4m3) weights times 16-bit activations, for cards whose tensor cores know no FP8.

    y[m, n] = sum_k x[m, k] * e4m3(w[n, k]) * sw[n]        or sw[n / 128, k / 128], by blocks

x      [M, K]  bf16 or fp16, rows contiguous            y  [M, N]  x's dtype, allocated here
words  int16 [K/128, N, 64]: low byte w[n, 128 b + c], high byte w[n, 128 b + 64 + c]
sw     fp32 [N], or [ceil(N/128), ceil(K/128)]          nothing is written in place but counters

As awq_gemm: weights are the left operand, widened in registers. e4m3's fields moved into bf16's
(fp16's) read as the weight times 2^-120 (2^-8), subnormals included; one multiply by the power of
two is exact. The codes of NaN read as 480: checkpoints have none. Large batches dequantise slices.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from multilora_kernels.fp8_gemm import Fp8Weight, fp8_weight
from multilora_kernels.launch import Chip, cdiv, chip_for, on_host, tuned_table
from multilora_kernels.slices import multiply_slices, slice_rows
from multilora_kernels.split_k import (
    BLOCK_K,
    Tile,
    bucket_of,
    choose_tile,
    split_range,
    sum_partials,
    workspace,
)

OP = "fp8_weight_only"


@triton.constexpr_function
def _widen_asm(high, fp16):
    left = 7 if fp16 else 4  # where the low byte's exponent and mantissa go
    mask = "0x3F803F80" if fp16 else "0x07F007F0"
    factor = "0x5C005C00" if fp16 else "0x7B807B80"  # 2^8, 2^120
    kind = "f16x2" if fp16 else "bf16x2"
    if high:
        body = f"shr.u32 a, $1, {8 - left}; mov.b32 b, $1;"
    else:
        body = f"shl.b32 a, $1, {left}; shl.b32 b, $1, 8;"
    return (
        f"{{ .reg .b32 a, b, f, z; {body} and.b32 a, a, {mask};"
        f" lop3.b32 a, b, 0x80008000, a, 0xEA; mov.b32 f, {factor}; mov.b32 z, 0x80008000;"
        f" fma.rn.{kind} $0, a, f, z; }}"
    )


@triton.jit
def _widen(words, HIGH: tl.constexpr, CT: tl.constexpr):
    if tl.float32 == CT:
        byte = (words.to(tl.int32) >> (8 * HIGH)) & 0xFF
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        w = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    elif tl.float16 == CT:
        w = tl.inline_asm_elementwise(_widen_asm(HIGH, True), "=r,r", [words], tl.float16, True, 2)
    else:
        w = tl.inline_asm_elementwise(
            _widen_asm(HIGH, False), "=r,r", [words], tl.bfloat16, True, 2
        )
    return w


@triton.jit
def _sum_blocks(
    x_ptrs, word_ptrs, sw_ptrs, in_batch, c, first, last, K, N,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKWISE: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    final = tl.cdiv(K, 128) - 1
    sw = tl.load(sw_ptrs + tl.minimum(first, final)) if BLOCKWISE else 1.0
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs)
        if EVEN_K:
            x_low = tl.load(x_ptrs, mask=in_batch, other=0.0)
            x_high = tl.load(x_ptrs + 64, mask=in_batch, other=0.0)
        else:
            k = block * 128 + c[:, None]
            x_low = tl.load(x_ptrs, mask=in_batch & (k < K), other=0.0)
            x_high = tl.load(x_ptrs + 64, mask=in_batch & (k + 64 < K), other=0.0)
        if BLOCKWISE:
            # One step ahead: a scalar load is not pipelined, and every step would wait for it.
            next_sw = tl.load(sw_ptrs + tl.minimum(block + 1, final))
            part = tl.dot(_widen(words, 0, CT), x_low.to(CT))
            acc += tl.dot(_widen(words, 1, CT), x_high.to(CT), part) * sw
            sw = next_sw
        else:
            acc = tl.dot(_widen(words, 0, CT), x_low.to(CT), acc)
            acc = tl.dot(_widen(words, 1, CT), x_high.to(CT), acc)
        word_ptrs += N * 64
        x_ptrs += 128
    return acc


@triton.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def fp8_weight_only_kernel(
    x_ptr,
    words_ptr,
    sw_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    CT: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(2)
    first, last, _ = split_range(K, SPLIT_K, 1)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 64)
    in_batch = (m < M)[None, :]
    # Rows of W past the end repeat the last one; they are not stored.
    row = tl.minimum(n, N - 1)
    start = first.to(tl.int64)
    word_ptrs = words_ptr + start * N * 64 + row[:, None] * 64 + c[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_xm + start * 128 + c[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = _sum_blocks(
        x_ptrs, word_ptrs, sw_ptr + (pid_n * BLOCK_N // 128) * tl.cdiv(K, 128), in_batch, c,
        first, last, K, N, BLOCK_N, BLOCK_M, BLOCKWISE, EVEN_K, STAGES, CT,
    )  # fmt: skip
    acc, is_last = sum_partials(
        acc, partial_ptr, counter_ptr, BLOCK_N, BLOCK_M, SPLIT_K, PAIRS, PDL
    )
    if is_last:
        if not BLOCKWISE:
            acc = acc * tl.load(sw_ptr + n, mask=n < N, other=0.0)[:, None]
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_batch & (n < N)[:, None])


@triton.jit
def widen_kernel(
    words_ptr, sw_ptr, w_ptr, n_start, n_stop, N, K, BLOCK_N: tl.constexpr, BLOCKWISE: tl.constexpr
):
    """Rows n_start.. of W into w [n_stop - n_start, K]: one block of 128 inputs a program."""
    block = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = n_start + row
    c = tl.arange(0, 64)
    inside = n < n_stop
    source = words_ptr + (block.to(tl.int64) * N + n[:, None]) * 64 + c[None, :]
    words = tl.load(source, mask=inside[:, None], other=0)
    if BLOCKWISE:
        scale = tl.load(sw_ptr + n // 128 * tl.num_programs(0) + block, mask=inside, other=0.0)
    else:
        scale = tl.load(sw_ptr + n, mask=inside, other=0.0)
    out = w_ptr + row[:, None].to(tl.int64) * K + block * 128 + c[None, :]
    for high in tl.static_range(2):
        w = _widen(words, high, tl.float32) * scale[:, None]
        in_k = (block * 128 + 64 * high + c < K)[None, :]
        tl.store(out + 64 * high, w.to(w_ptr.dtype.element_ty), mask=inside[:, None] & in_k)


@dataclass(frozen=True)
class Fp8WeightOnly:
    """An FP8 weight [N, K] repacked for 16-bit activations; `counters`: one multiply at a time."""

    words: torch.Tensor  # int16 [K/128, N, 64]
    scale: torch.Tensor  # fp32 [N], or [ceil(N/128), ceil(K/128)]
    counters: torch.Tensor  # int32, zero between multiplies
    in_features: int

    @property
    def blockwise(self) -> bool:
        """Whether scales belong to 128 x 128 blocks."""
        return self.scale.ndim == 2

    @property
    def out_features(self) -> int:
        """N."""
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return 2 * self.words.numel() + 4 * (self.scale.numel() + self.counters.numel())

    def to(self, device: torch.device | str) -> "Fp8WeightOnly":
        """The same weight on `device`."""
        return replace(
            self,
            words=self.words.to(device),
            scale=self.scale.to(device),
            counters=self.counters.to(device),
        )

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] times this weight, [M, N] in x's dtype."""
        return fp8_weight_only(x, self)

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """W [N, K] in `dtype`, rounded once."""
        return unpack_weight_only(self).dequantise(dtype)


def pack_weight_only(weight: Fp8Weight) -> Fp8WeightOnly:
    """Repack a plain FP8 weight; K is padded to 128 with zeros."""
    n, k = weight.q.shape
    num_blocks = -(-k // BLOCK_K)
    codes = torch.nn.functional.pad(weight.q.view(torch.uint8), (0, num_blocks * BLOCK_K - k))
    halves = codes.reshape(n, num_blocks, 2, 64).permute(1, 0, 3, 2).contiguous()
    return Fp8WeightOnly(halves.view(torch.int16).squeeze(-1), weight.scale, weight.counters, k)


def unpack_weight_only(weight: Fp8WeightOnly) -> Fp8Weight:
    """The inverse of `pack_weight_only`."""
    halves = weight.words.unsqueeze(-1).view(torch.uint8)  # [blocks, N, 64, 2]
    codes = halves.permute(1, 0, 3, 2).reshape(weight.out_features, -1)[:, : weight.in_features]
    q = codes.contiguous().view(torch.float8_e4m3fn)
    return fp8_weight(q, weight.scale)


# Batches up to here take the fused kernel where nothing was tuned.
_MAX_FUSED = 128


def _stage_bytes(tile: Tile) -> int:
    return tile.block_n * BLOCK_K + tile.block_m * BLOCK_K * 2 + 1024


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip) -> tuple[Tile | None, int]:
    """(tile, 0), or (None, rows of W dequantised at a time); the split does not depend on m."""
    shape = tuned_table(chip, OP).get(f"n{n}-k{k}", {})
    if m <= int(shape.get("max_fused", _MAX_FUSED)):
        base = Tile(block_m=bucket_of(m))
        return choose_tile(OP, base, n, k, chip, _stage_bytes), 0
    return None, slice_rows(n, k)


def run_fused(x: torch.Tensor, weight: Fp8WeightOnly, tile: Tile) -> torch.Tensor:
    """One launch of the fused kernel with a given tile (benchmarks and tuning call this)."""
    m, k = x.shape
    n = weight.out_features
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (cdiv(n, tile.block_n), tile.split_k, cdiv(m, tile.block_m))
    partial, counters = workspace(tile, weight.counters, grid[0] * grid[2])
    wide = tl.float16 if x.dtype == torch.float16 else tl.bfloat16
    fp8_weight_only_kernel[grid](
        x,
        weight.words,
        weight.scale,
        y,
        partial,
        counters,
        m,
        n,
        k,
        x.stride(0),
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        SPLIT_K=tile.split_k,
        BLOCKWISE=weight.blockwise,
        EVEN_K=k % BLOCK_K == 0,
        STAGES=tile.num_stages,
        CT=tl.float32 if triton.knobs.runtime.interpret else wide,
        PAIRS=tile.pairs,
        PDL=tile.pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
    )
    return y


def run_sliced(x: torch.Tensor, weight: Fp8WeightOnly, slice_n: int) -> torch.Tensor:
    """Dequantise `slice_n` rows of W at a time and multiply each slice with the library."""
    n, k = weight.out_features, weight.in_features

    def widen(w: torch.Tensor, start: int) -> None:
        widen_kernel[(weight.words.shape[0], cdiv(len(w), 16))](
            weight.words, weight.scale, w, start, start + len(w), n, k,
            BLOCK_N=16, BLOCKWISE=weight.blockwise, num_warps=4,
        )  # fmt: skip

    return multiply_slices(x, n, slice_n, widen)


def fp8_weight_only(x: torch.Tensor, weight: Fp8WeightOnly) -> torch.Tensor:
    """x [M, K] times an FP8 weight [N, K] that is widened on the way: [M, N] in x's dtype."""
    assert x.ndim == 2 and x.shape[1] == weight.in_features, f"x {tuple(x.shape)}"
    if on_host(x.device):
        return fp8_weight_only_ref(x, weight)
    assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(1) == 1
    m, k = x.shape
    if m == 0:
        return x.new_empty((0, weight.out_features))
    tile, slice_n = choose_launch(m, weight.out_features, k, chip_for(x.device))
    if tile is None:
        return run_sliced(x, weight, slice_n)
    return run_fused(x, weight, tile)


def fp8_weight_only_ref(x: torch.Tensor, weight: Fp8WeightOnly) -> torch.Tensor:
    """`fp8_weight_only` in torch: fp32 (for an fp64 x fp64) weights and sums, rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ weight.dequantise(wide).t()).to(x.dtype)

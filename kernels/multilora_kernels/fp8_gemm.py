"""FP8 (e4m3) weights times activations.

    y[m, n] = sum_k xq[m, k] * wq[n, k] * sx[m] * sw[n]                            "channel"
    y[m, n] = sum_b sx[m, b] * sw[n / 128, b] * sum_{k in block b} xq[m, k] * wq[n, k]   "block"

xq  [M, K]  e4m3, from fp8_quant              sx  fp32 [M] or [1] (static), "block": [M, K/128]
wq  [N, K]  e4m3, rows contiguous             sw  fp32 [N], "block": [N/128, K/128] (rounded up)
y   [M, N]  bf16 or fp16, allocated here      nothing is written in place but weight.counters

Decode batches run one kernel that reads wq once at memory speed, weights as the left operand and
K split in a fixed order (split_k.py); sums of 128 products leave the tensor cores for fp32 adds,
since their own sums keep fewer bits. Larger batches go to `torch._scaled_mm`, by rows or with the
scales applied by a kernel of ours, and up to K = 4,096 the tensor cores may keep the sums; with
scales by blocks they are widened to 16 bits.
Cards whose tensor cores know no FP8 keep the weights in FP8 and the activations as they are
(fp8_weight_only.py).
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import torch
import triton
import triton.language as tl

from multilora_kernels.fp8_quant import RowScaling, quantise_rows
from multilora_kernels.launch import Chip, cdiv, chip_for, on_host, tuned_table
from multilora_kernels.slices import multiply_slices, slice_rows
from multilora_kernels.split_k import (
    BLOCK_K,
    Tile,
    bucket_of,
    choose_tile,
    prefetch_rows,
    split_range,
    sum_partials,
    workspace,
)

OP = "fp8_gemm"


@triton.jit
def _sum_blocks(
    x_ptrs, w_ptrs, sx_ptrs, sw_ptrs, in_batch, c, first, last, per_part, K,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKWISE: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, CT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first_part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    final = tl.cdiv(K, 128) - 1
    sw = tl.load(sw_ptrs + tl.minimum(first, final)) if BLOCKWISE else 1.0
    for block in tl.range(first, last, num_stages=STAGES):
        if PARTS == 2:
            half = block == first + per_part
            first_part = tl.where(half, acc, first_part)
            acc = tl.where(half, 0.0, acc)
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=in_batch[None, :], other=0.0)
        else:
            in_k = block * 128 + c < K
            w = tl.load(w_ptrs, mask=in_k[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=in_batch[None, :] & in_k[:, None], other=0.0)
        if BLOCKWISE:
            sx = tl.load(sx_ptrs + block, mask=in_batch, other=0.0)
            # One step ahead: a scalar load is not pipelined, and every step would wait for it.
            next_sw = tl.load(sw_ptrs + tl.minimum(block + 1, final))
            acc += tl.dot(w.to(CT), x.to(CT)) * (sx * sw)[None, :]
            sw = next_sw
        else:
            acc = tl.dot(w.to(CT), x.to(CT), acc, max_num_imprecise_acc=128)
        w_ptrs += 128
        x_ptrs += 128
    return acc + first_part if PARTS == 2 else acc


@triton.jit(do_not_specialize=["M"])  # else every batch size class compiles anew
def fp8_gemm_kernel(
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
    stride_sx,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    CT: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(2)
    first, last, per_part = split_range(K, SPLIT_K, PARTS)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 128)
    in_batch = m < M
    # Rows of W past the end repeat the last one; they are not stored.
    row = tl.minimum(n, N - 1).to(tl.int64)
    w_ptrs = w_ptr + row[:, None] * K + first * 128 + c[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * K + first * 128 + c[:, None]
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_ptr + row * K, first * 128, K, PREFETCH, 128)
        tl.extra.cuda.gdc_wait()
    acc = _sum_blocks(
        x_ptrs, w_ptrs, sx_ptr + m * stride_sx, sw_ptr + (pid_n * BLOCK_N // 128) * tl.cdiv(K, 128),
        in_batch, c, first, last, per_part, K,
        BLOCK_N, BLOCK_M, BLOCKWISE, EVEN_K, STAGES, CT, PARTS,
    )  # fmt: skip
    acc, is_last = sum_partials(
        acc, partial_ptr, counter_ptr, BLOCK_N, BLOCK_M, SPLIT_K, PAIRS, PDL
    )
    if is_last:
        if not BLOCKWISE:
            sx = tl.load(sx_ptr + m * stride_sx, mask=in_batch, other=0.0)
            channel = tl.load(sw_ptr + n, mask=n < N, other=0.0)
            acc = acc * channel[:, None] * sx[None, :]
        y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        mask = in_batch[None, :] & (n < N)[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_kernel(
    raw_ptr, sx_ptr, sw_ptr, y_ptr, N, stride_sx, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y[m, n] = raw[m, n] * sx[m] * sw[n]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(sw_ptr + n, mask=n < N, other=0.0) * tl.load(sx_ptr + row * stride_sx)
    raw = tl.load(raw_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, (raw * scale).to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def widen_blocks_kernel(
    q_ptr, scale_ptr, out_ptr, rows, K, SCALE_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[r, k] = q[r, k] * scale[r / SCALE_ROWS, k / 128], 128 columns a program."""
    block = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = block * 128 + tl.arange(0, 128)
    scales = scale_ptr + row // SCALE_ROWS * tl.num_programs(0) + block
    scale = tl.load(scales, mask=row < rows, other=0.0)
    offsets = row[:, None].to(tl.int64) * K + k[None, :]
    mask = (row < rows)[:, None] & (k < K)[None, :]
    out = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 weight [N, K] with its scales; `counters` make one multiply at a time safe."""

    q: torch.Tensor  # float8_e4m3fn [N, K]
    scale: torch.Tensor  # fp32 [N], or [ceil(N/128), ceil(K/128)]
    counters: torch.Tensor  # int32, zero between multiplies
    unit: torch.Tensor  # fp32 [1], one
    input_scale: torch.Tensor | None = None  # fp32 [1]: activations are quantised with it
    upper_bound: float = float("inf")  # of a row's largest magnitude (FBGEMM's activation_scale_ub)

    @property
    def blockwise(self) -> bool:
        """Whether scales belong to 128 x 128 blocks."""
        return self.scale.ndim == 2

    @property
    def scaling(self) -> RowScaling:
        """How the rows that this weight multiplies are quantised."""
        return RowScaling(BLOCK_K if self.blockwise else 0, self.input_scale, self.upper_bound)

    @property
    def out_features(self) -> int:
        """N."""
        return self.q.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return self.q.numel() + 4 * (self.scale.numel() + self.counters.numel())

    def to(self, device: torch.device | str) -> "Fp8Weight":
        """The same weight on `device`."""
        return replace(
            self,
            q=self.q.to(device),
            scale=self.scale.to(device),
            counters=self.counters.to(device),
            unit=self.unit.to(device),
            input_scale=None if self.input_scale is None else self.input_scale.to(device),
        )

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] as this weight's multiply wants it: (xq, sx)."""
        return quantise_rows(x, self.scaling)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] times this weight, quantised on the way, [M, N] in x's dtype."""
        if on_host(x.device):
            return x @ self.dequantise(x.dtype).t()
        xq, sx = self.quantise(x)
        return fp8_gemm(xq, sx, self, x.dtype)

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """W [N, K] in `dtype`, rounded once."""
        if not self.blockwise:
            return (self.q.float() * self.scale[:, None]).to(dtype)
        n, k = self.q.shape
        scale = self.scale.repeat_interleave(128, dim=0)[:n]
        return (self.q.float() * scale.repeat_interleave(128, dim=1)[:, :k]).to(dtype)


def fp8_weight(
    q: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    upper_bound: float = float("inf"),
) -> Fp8Weight:
    """From a checkpoint's tensors: scale is a scalar, [N], [N, 1] or [ceil(N/128), ceil(K/128)].

    Parts that are fused (q, k, v) are concatenated with `concatenate`, each with its own scale.
    """
    n, k = q.shape
    assert q.dtype == torch.float8_e4m3fn, f"weights are {q.dtype}"
    blocks = (-(-n // 128), -(-k // 128))
    scale = scale.float()
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(n)
    elif scale.shape in ((n, 1), (n,)):
        scale = scale.reshape(n)
    else:
        assert scale.shape == blocks, f"scales {tuple(scale.shape)} for weights {(n, k)}"
    if input_scale is not None:
        input_scale = input_scale.float().reshape(1)
    counters = torch.zeros(-(-n // 64), dtype=torch.int32, device=q.device)
    unit = torch.ones(1, device=q.device)
    return Fp8Weight(q.contiguous(), scale.contiguous(), counters, unit, input_scale, upper_bound)


def quantise_weight(w: torch.Tensor) -> Fp8Weight:
    """A 16-bit weight [N, K] quantised with a scale per output channel."""
    scale = w.float().abs().amax(dim=1).clamp(min=1e-10) / 448.0
    q = (w.float() / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return fp8_weight(q, scale)


def concatenate(weights: list[Fp8Weight]) -> Fp8Weight:
    """Weights over the same inputs stacked along N. Static input scales: the largest is kept,
    so none of the parts saturates. Block scales need every part but the last to be whole blocks.
    """
    assert len({weight.blockwise for weight in weights}) == 1
    if weights[0].blockwise:
        assert all(weight.out_features % 128 == 0 for weight in weights[:-1])
    inputs = [weight.input_scale for weight in weights if weight.input_scale is not None]
    assert len(inputs) in (0, len(weights)), "static and dynamic activations together"
    return fp8_weight(
        torch.cat([weight.q for weight in weights]),
        torch.cat([weight.scale for weight in weights]),
        torch.stack(inputs).amax(dim=0) if inputs else None,
        min(weight.upper_bound for weight in weights),
    )


# Batches up to here take the split kernel where nothing was tuned.
_MAX_SPLIT = 64
# Lines of each row asked for before the wait. Between the small kernels of a layer 2 save 1.8 of 73
# us at one row, 1.8 of 77 at 16 and at 64; 8 cost 2 to 3 (H200).
_PREFETCH = 2
# Up to this K the library may keep sums in the tensor cores, which hold fewer bits: the error of
# bf16 results grows from 1.7e-3 (rounding alone) to 2.1e-3, and gate_up of an 8B at 256 rows takes
# 50.6 us instead of 55.6 (H200). At 14,336 it doubles, for nothing.
_FAST_SUMS_K = 4096
# Below 16 rows Triton takes fp16 instructions on Hopper, which sum differently from FP8's.
_SMALLEST = 16


def _stage_bytes(tile: Tile) -> int:
    return (tile.block_n + tile.block_m) * BLOCK_K + 1024


class Path(Enum):
    """What runs a multiply that the split kernel does not."""

    ROWS = "torch._scaled_mm with a scale per row and per output channel"
    SCALED = "torch._scaled_mm with scale 1, then a kernel that applies the scales"
    WIDENED = "slices of W and x widened to 16 bits, then the vendor's library"


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(
    m: int, n: int, k: int, chip: Chip, blockwise: bool, dtype: torch.dtype = torch.bfloat16
) -> Tile | Path:
    """Launch of xq [m, k] times weights [n, k]; the order of a tile's sums ignores m."""
    shape = tuned_table(chip, OP).get(f"n{n}-k{k}", {})
    if m <= int(shape.get("max_split", _MAX_SPLIT)):
        base = Tile(block_m=bucket_of(m, _SMALLEST), prefetch=_PREFETCH)
        return choose_tile(OP, base, n, k, chip, _stage_bytes)
    if blockwise:
        return Path.WIDENED
    if n % 16 or k % 16:  # cuBLAS asks for multiples of 16
        return Tile(block_n=128, block_m=64, num_warps=4, num_stages=3)
    # The row-wise form writes bf16 only: an fp16 result would first be rounded to 8 bits.
    if dtype != torch.bfloat16 or m <= int(shape.get("max_scaled", 0)):
        return Path.SCALED
    return Path.ROWS


def run_split(
    xq: torch.Tensor, sx: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype, tile: Tile
) -> torch.Tensor:
    """One launch of the split kernel with a given tile (benchmarks and tuning call this)."""
    m, k = xq.shape
    n = weight.out_features
    y = torch.empty((m, n), dtype=dtype, device=xq.device)
    grid = (cdiv(n, tile.block_n), tile.split_k, cdiv(m, tile.block_m))
    partial, counters = workspace(tile, weight.counters, grid[0] * grid[2])
    fp8_gemm_kernel[grid](
        xq,
        sx,
        weight.q,
        weight.scale,
        y,
        partial,
        counters,
        m,
        n,
        k,
        _row_stride(sx, m),
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        SPLIT_K=tile.split_k,
        BLOCKWISE=weight.blockwise,
        EVEN_K=k % BLOCK_K == 0,
        STAGES=tile.num_stages,
        CT=tl.float32 if triton.knobs.runtime.interpret else tl.float8e4nv,
        PARTS=tile.parts,
        PAIRS=tile.pairs,
        PDL=tile.pdl,
        PREFETCH=tile.prefetch,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=tile.pdl,
    )
    return y


def run_rowwise(xq: torch.Tensor, sx: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """`torch._scaled_mm` with a scale per row and per output channel, in bf16."""
    rows = sx.expand(xq.shape[0]) if sx.numel() == 1 else sx
    y: torch.Tensor = torch._scaled_mm(
        xq,
        weight.q.t(),
        scale_a=rows.reshape(-1, 1).contiguous(),
        scale_b=weight.scale.reshape(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=weight.in_features <= _FAST_SUMS_K,
    )
    return y


def run_scaled(
    xq: torch.Tensor,
    sx: torch.Tensor,
    weight: Fp8Weight,
    dtype: torch.dtype,
    raw_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`torch._scaled_mm` with scale 1, then one kernel that applies the scales."""
    raw = torch._scaled_mm(
        xq,
        weight.q.t(),
        scale_a=weight.unit,
        scale_b=weight.unit,
        out_dtype=raw_dtype,
        use_fast_accum=weight.in_features <= _FAST_SUMS_K,
    )
    m, n = raw.shape
    y = torch.empty((m, n), dtype=dtype, device=xq.device)
    pdl = chip_for(xq.device).has_pdl
    # One dimension: the second one ends at 65,535, and a step may have more rows.
    scale_kernel[(cdiv(n, 1024) * m,)](
        raw, sx, weight.scale, y, n, _row_stride(sx, m), BLOCK=1024, PDL=pdl, launch_pdl=pdl
    )
    return y


def _widen(q: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, scale_rows: int) -> None:
    rows, k = q.shape
    widen_blocks_kernel[(cdiv(k, 128), cdiv(rows, 32))](
        q, scale, out, rows, k, SCALE_ROWS=scale_rows, BLOCK=32, num_warps=4
    )


def run_widened(
    xq: torch.Tensor, sx: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype
) -> torch.Tensor:
    """x and slices of W, both with scales by blocks, widened to 16 bits and multiplied."""
    n, k = weight.q.shape
    x = torch.empty(xq.shape, dtype=dtype, device=xq.device)
    _widen(xq, sx, x, 1)

    def widen(w: torch.Tensor, start: int) -> None:
        _widen(weight.q[start : start + len(w)], weight.scale[start // 128 :], w, 128)

    return multiply_slices(x, n, slice_rows(n, k), widen)


def _row_stride(sx: torch.Tensor, m: int) -> int:
    """0 where one static scale serves every row."""
    return 0 if sx.numel() == 1 and m > 1 else sx.stride(0)


def fp8_gemm(
    xq: torch.Tensor, sx: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Quantised rows times an FP8 weight: [M, N] in `dtype`."""
    assert xq.ndim == 2 and xq.shape[1] == weight.in_features and xq.is_contiguous()
    assert xq.dtype == torch.float8_e4m3fn and dtype in (torch.bfloat16, torch.float16)
    assert sx.ndim == (2 if weight.blockwise else 1) and sx.dtype == torch.float32
    if on_host(xq.device):
        return fp8_gemm_ref(xq, sx, weight, dtype)
    m, k = xq.shape
    if m == 0:
        return torch.empty((0, weight.out_features), dtype=dtype, device=xq.device)
    chip = chip_for(xq.device)
    launch = choose_launch(m, weight.out_features, k, chip, weight.blockwise, dtype)
    if isinstance(launch, Tile):
        return run_split(xq, sx, weight, dtype, launch)
    if launch is Path.WIDENED:
        return run_widened(xq, sx, weight, dtype)
    if launch is Path.SCALED:
        return run_scaled(xq, sx, weight, dtype)
    return run_rowwise(xq, sx, weight)


def fp8_gemm_ref(
    xq: torch.Tensor,
    sx: torch.Tensor,
    weight: Fp8Weight,
    dtype: torch.dtype = torch.bfloat16,
    wide: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`fp8_gemm` in torch, summed in `wide` and rounded once."""
    x = xq.to(wide)
    if weight.blockwise:
        x = x * sx.to(wide).repeat_interleave(128, dim=1)[:, : x.shape[1]]
    else:
        x = x * sx.to(wide)[:, None]
    return (x @ weight.dequantise(wide).t()).to(dtype)

"""The pool seen as pages of keys and values, for the kernels and for their torch paths.

K and V lie in the compute dtype, or as FP8 (e4m3) without a scale: rounded to the nearest code,
magnitudes beyond 448 become 448, NaN stays NaN. e4m3 keeps four significant bits from 2^-6 to
448 wherever a value lies there, so a scale would move the range and win no precision.

Attention over FP8 pages multiplies in fp16, which holds every e4m3 value: the conversion is one
instruction for two elements, where bf16 needs two more for each of them. Queries in bf16 beyond
65504, which no model has, are cut to it.

Where Triton has no e4m3 (before sm_89, and in the interpreter, whose cast gets carries wrong) the
kernels see raw codes as uint8 and convert by integer arithmetic, with the same result.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import chip_of
from multilora_kernels.layout import TOKENS_PER_PAGE

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class KvLayer:
    """The keys and values of one layer, in pages of the pool.

    A page viewed in `dtype` is [num_layers, 2 (K, V), num_kv_heads, 16 (tokens), head_dim].
    """

    pool: torch.Tensor  # uint8 [num_pages, page_bytes], contiguous
    layer: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # how keys and values are stored: that of the queries, or FP8

    @property
    def layer_elements(self) -> int:
        """Elements of one layer in a page."""
        return 2 * self.num_kv_heads * TOKENS_PER_PAGE * self.head_dim

    @property
    def start(self) -> int:
        """Where this layer begins in a page, in elements."""
        return self.layer * self.layer_elements

    @property
    def page_elements(self) -> int:
        """Elements from one page to the next."""
        return self.pool.shape[1] // self.dtype.itemsize

    @property
    def elements(self) -> torch.Tensor:
        """The pool as kernels address it: a view in `dtype`, or uint8 where that is FP8's code."""
        pool = self.pool
        if self.dtype == FP8 and not (pool.is_cuda and chip_of(pool.device.index or 0).has_fp8):
            return pool
        return pool.view(self.dtype)

    @property
    def pages(self) -> torch.Tensor:
        """The layer as a view [num_pages, 2, num_kv_heads, 16, head_dim]."""
        shape = (2, self.num_kv_heads, TOKENS_PER_PAGE, self.head_dim)
        return self.pool.view(self.dtype).view(self.pool.shape[0], -1, *shape)[:, self.layer]

    def check(self, x: torch.Tensor) -> None:
        """Assert what attention and the store ask of it, for rows `x` [T, heads, D]."""
        pool, layer_bytes = self.pool, self.layer_elements * self.dtype.itemsize
        assert pool.dtype == torch.uint8 and pool.ndim == 2 and pool.is_contiguous()
        assert pool.device == x.device and x.shape[2] == self.head_dim
        assert self.dtype in (x.dtype, FP8), f"KV in {self.dtype}, rows in {x.dtype}"
        assert pool.shape[1] % layer_bytes == 0, f"pages of {pool.shape[1]} bytes"
        assert 0 <= self.layer < pool.shape[1] // layer_bytes, f"layer {self.layer}"


@triton.jit
def widen_kv(x, COMPUTE: tl.constexpr):
    """Loaded keys or values as COMPUTE; uint8 holds e4m3 codes."""
    if x.dtype == tl.uint8:
        code = x.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        # e4m3's fields in fp32's place read as the value times 2^-120, subnormals included.
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
        return value.to(COMPUTE)
    else:
        return x.to(COMPUTE)


@triton.jit
def query_as(q, COMPUTE: tl.constexpr):
    """Loaded queries as COMPUTE; bf16's range is wider than fp16's."""
    if tl.float16 == COMPUTE and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        return tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(COMPUTE)
    else:
        return q.to(COMPUTE)


@triton.jit
def narrow_kv(x, ELEMENT: tl.constexpr):
    """Keys or values as the pool's ELEMENT type; uint8 takes e4m3 codes."""
    if tl.uint8 == ELEMENT:
        value = x.to(tl.float32)
        size = tl.minimum(tl.abs(value), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Halves to even at three bits of mantissa; the exponent's bias falls from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        # Adding 2^14 leaves units of 2^-9, e4m3's smallest, in the last bits.
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0.015625, subnormal, normal)
        code = tl.where(value == value, code, 0x7F)
        return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    elif tl.float8e4nv == ELEMENT:
        # Through fp32: the cast saturates on every chip that has it.
        return x.to(tl.float32).to(ELEMENT)
    else:
        return x.to(ELEMENT)


def compute_type(dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """Operand type of attention's multiplies for queries of `dtype`; fp32 under the interpreter.

    The interpreter holds bf16 as its bit pattern and multiplies that.
    """
    if triton.knobs.runtime.interpret:
        return tl.float32
    if kv_dtype == FP8 and dtype != torch.float32:
        return tl.float16
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


def to_kv(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """`x` in `kv_dtype`, as the kernels round it."""
    if kv_dtype == FP8:
        x = x.float().clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(kv_dtype)


def gather_kv(
    pages: torch.Tensor, table: torch.Tensor, first: int, seq_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens [first, seq_len) as `dtype`, each [B, Hkv, seq_len - first, D].

    `pages` is a layer's (KvLayer.pages), `table` [B, at least the pages needed].
    """
    skipped = first // TOKENS_PER_PAGE
    used = table[:, skipped : -(-seq_len // TOKENS_PER_PAGE)].long()
    tokens = pages[used].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, B, Hkv, tokens, D]
    start = skipped * TOKENS_PER_PAGE
    kept = tokens[..., first - start : seq_len - start, :].to(dtype)
    return kept[0], kept[1]

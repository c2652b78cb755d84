"""Self-attention over the page pool."""

from dataclasses import dataclass

import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.layers.linear import LoraLinear
from multilora_kernels.kv_pages import KvLayer
from multilora_kernels.paged_attention import paged_attention
from multilora_kernels.rope_store_kv import HeadNorm, rope_store_kv
from multilora_kernels.rows import Rows


@dataclass(frozen=True)
class HeadShape:
    """How the packed projection of one layer splits into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens a query sees, itself included; None: all before it


class Attention:
    """q, k, v of the step's tokens, K and V into their pages, attention, output projection."""

    def __init__(
        self, shape: HeadShape, qkv: LoraLinear, out: LoraLinear, head_norm: HeadNorm | None
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.out = out
        self.head_norm = head_norm

    def __call__(
        self, rows: Rows, tables: tuple[torch.Tensor, torch.Tensor], ctx: StepContext
    ) -> torch.Tensor:
        """Rows [T, hidden] and the step's rotary tables; returns [T, hidden]."""
        shape = self.shape
        packed = self.qkv(rows, ctx).view(
            -1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        )
        dtype = ctx.kv_dtype or packed.dtype
        kv = KvLayer(ctx.pool, self.qkv.layer, shape.num_kv_heads, shape.head_dim, dtype)
        q = rope_store_kv(packed, tables, kv, ctx.slot_mapping, self.head_norm)
        scale = shape.head_dim**-0.5
        attended = paged_attention(q, kv, ctx.attention, scale, shape.sliding_window)
        return self.out(Rows(attended.flatten(1)), ctx)

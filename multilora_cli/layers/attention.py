"""Self-attention over the page pool."""

from dataclasses import dataclass

import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.layers.linear import LoraLinear
from multilora_cli.layers.norm import RMSNorm
from multilora_cli.layers.rotary import rotate
from multilora_kernels.paged_attention import paged_attention
from multilora_kernels.store_kv import store_kv


@dataclass(frozen=True)
class HeadShape:
    """How the packed projection of one layer splits into heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens a query sees, itself included; None: all before it


class Attention:
    """q, k, v of the step's tokens, K and V into their pages, attention, output projection."""

    def __init__(
        self,
        shape: HeadShape,
        qkv: LoraLinear,
        out: LoraLinear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], ctx: StepContext
    ) -> torch.Tensor:
        """x [T, hidden] and the step's rotary tables; returns [T, hidden]."""
        shape, layer = self.shape, self.qkv.layer
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        packed = self.qkv(x, ctx).view(-1, heads + 2 * kv_heads, shape.head_dim)
        q, k, v = packed[:, :heads], packed[:, heads:-kv_heads], packed[:, -kv_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *tables), rotate(k, *tables)
        store_kv(k, v, ctx.pool, layer, shape.num_layers, ctx.slot_mapping, ctx.kv_dtype)
        attended = paged_attention(
            q,
            ctx.pool,
            layer,
            kv_heads,
            ctx.attention,
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            kv_dtype=ctx.kv_dtype,
        )
        return self.out(attended.flatten(1), ctx)

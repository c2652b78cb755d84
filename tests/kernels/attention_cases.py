"""Attention inputs on a poisoned pool, and a plain fp64 oracle for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.kv_pages import KvLayer

TOKENS = 16
# Largest absolute difference from fp64 for outputs of order 1: a few roundings of the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class AttentionCase:
    """One batch, its pool, and the contiguous keys and values that the pool holds."""

    q: torch.Tensor  # [T, Hq, D]
    kv: KvLayer  # NaN wherever no context lies
    batch: AttentionBatch
    scale: float
    keys: list[torch.Tensor]  # per sequence [seq_len, Hkv, D]
    values: list[torch.Tensor]
    query_lens: list[int]

    def row(self, index: int) -> "AttentionCase":
        """Sequence `index` alone, in the same pool."""
        start = sum(self.query_lens[:index])
        count = self.query_lens[index]
        batch = AttentionBatch(
            torch.tensor([0, count], dtype=torch.int32, device=self.q.device),
            self.batch.seq_lens[index : index + 1],
            self.batch.page_table[index : index + 1],
            1 if index < self.batch.num_decodes else 0,
            count,
            int(self.batch.seq_lens[index]),
        )
        q = self.q[start : start + count]
        dense = ([self.keys[index]], [self.values[index]], [count])
        return AttentionCase(q, self.kv, batch, self.scale, *dense)


def attention_case(
    lens: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    num_layers: int = 2,
    layer: int = 1,
    spread: int = 3,
    kv_dtype: torch.dtype | None = None,
) -> AttentionCase:
    """Sequences of (query_len, seq_len), decode rows first, on randomly placed pages.

    The pool is NaN except for the context of `layer`; it has `spread` times the pages needed.
    """
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    needed = [-(-seq_len // TOKENS) for _, seq_len in lens]
    num_pages = max(1, sum(needed)) * spread
    order = torch.randperm(num_pages, generator=generator).tolist()
    shape = (num_pages, num_layers, 2, kv_heads, TOKENS, head_dim)
    stored = kv_dtype or dtype
    view = torch.full(shape, float("nan")).to(stored)
    # An id far outside the pool: reading an entry past the context cannot pass unseen.
    table = torch.full((len(lens), max([1, *needed]) + 1), 2**30, dtype=torch.int32)
    keys, values = [], []
    for index, (_, seq_len) in enumerate(lens):
        key, value = (
            torch.randn(seq_len, kv_heads, head_dim, generator=generator).to(stored)
            for _ in range(2)
        )
        for number in range(needed[index]):
            page = order.pop()
            table[index, number] = page
            part = slice(number * TOKENS, min(seq_len, (number + 1) * TOKENS))
            count = part.stop - part.start
            view[page, layer, 0, :, :count] = key[part].transpose(0, 1)
            view[page, layer, 1, :, :count] = value[part].transpose(0, 1)
        keys.append(key.to(dtype).to(device))
        values.append(value.to(dtype).to(device))
    query_lens = [query_len for query_len, _ in lens]
    q = torch.randn(sum(query_lens), query_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32)
    batch = AttentionBatch(
        starts.to(device),
        seq_lens.to(device),
        table.to(device),
        next((i for i, query_len in enumerate(query_lens) if query_len > 1), len(query_lens)),
        max(query_lens),
        int(seq_lens.max()),
    )
    pool = view.view(num_pages, -1).view(torch.uint8).to(device)
    kv = KvLayer(pool, layer, kv_heads, head_dim, stored)
    return AttentionCase(q.to(device), kv, batch, head_dim**-0.5, keys, values, query_lens)


def attention_oracle(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    """Dense softmax attention in fp64: [T, Hq, D]."""
    out, start = [], 0
    for query_len, key, value in zip(case.query_lens, case.keys, case.values, strict=True):
        q = case.q[start : start + query_len].double()
        start += query_len
        seq_len, group = key.shape[0], q.shape[1] // case.kv.num_kv_heads
        if seq_len == 0:
            out.append(torch.zeros_like(q))
            continue
        keys = key.double().repeat_interleave(group, 1)
        values = value.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * case.scale
        position = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        distance = position - torch.arange(seq_len, device=q.device)[None, :]
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(out)

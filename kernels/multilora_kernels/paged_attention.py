"""Causal attention over keys and values that lie in pages of the pool.

    out[t] = softmax(scale * q[t] . K_i[lo:p+1]) V_i[lo:p+1]    for every row t of sequence i

p is the position of row t in its sequence: the rows of sequence i are the last ones of its
context, so row `query_start[i] + j` stands at `seq_lens[i] - query_len + j`. lo is 0, or
`p - sliding_window + 1` with a window. Query head h reads KV head `h // (Hq / Hkv)`.

q        [T, Hq, D]              bf16, fp16 or fp32; D a multiple of 16 from 16 to 256
kv       the pages of one layer (kv_pages.KvLayer), in q's dtype or FP8
out      [T, Hq, D]              q's dtype; rows of a sequence with seq_len 0 are zero

Whatever a page holds outside [lo, seq_len) is never multiplied: freed pages hold NaN.
A sequence's rows do not depend on what else is in the batch, bit for bit.
"""

import torch

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.kv_pages import KvLayer
from multilora_kernels.launch import on_host
from multilora_kernels.paged_decode import decode_ref, paged_decode
from multilora_kernels.paged_prefill import paged_prefill, prefill_ref


def _check(q: torch.Tensor, kv: KvLayer, batch: AttentionBatch) -> None:
    assert q.ndim == 3 and q.stride(2) == 1 and q.stride(1) == q.shape[2], "q must be [T, Hq, D]"
    heads, head_dim = q.shape[1], q.shape[2]
    assert head_dim % 16 == 0 and 16 <= head_dim <= 256, f"head_dim {head_dim}"
    assert heads % kv.num_kv_heads == 0, f"{heads} query heads over {kv.num_kv_heads} KV heads"
    kv.check(q)
    for tensor in (batch.query_start, batch.seq_lens, batch.page_table):
        assert tensor.dtype == torch.int32 and tensor.device == q.device
    assert batch.page_table.stride(1) == 1
    assert batch.query_start.shape[0] == batch.num_sequences + 1
    assert batch.num_decodes <= batch.num_sequences


def paged_attention(
    q: torch.Tensor,
    kv: KvLayer,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of every token row over its own sequence; returns out [T, Hq, D]."""
    _check(q, kv, batch)
    if on_host(q.device):
        return paged_attention_ref(q, kv, batch, scale, sliding_window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch.num_decodes > 0:
        paged_decode(q, kv, batch, scale, sliding_window, out)
    if batch.num_decodes < batch.num_sequences:
        paged_prefill(q, kv, batch, scale, sliding_window, out)
    return out


def paged_attention_ref(
    q: torch.Tensor,
    kv: KvLayer,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """The same in torch, also the path on a CPU: gathers each sequence's pages, then SDPA."""
    out, pages = torch.zeros_like(q), kv.pages
    starts, lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    # Decode rows of one length share a call. Padding unequal rows to one length would be faster
    # still, but then a row's last bits would depend on its neighbours.
    same_length: dict[int, list[int]] = {}
    for row in range(batch.num_sequences):
        query_len = starts[row + 1] - starts[row]
        if query_len == 1 and lens[row] > 0:
            same_length.setdefault(lens[row], []).append(row)
        elif query_len > 0 and lens[row] > 0:
            rows = slice(starts[row], starts[row + 1])
            out[rows] = prefill_ref(
                q[rows], pages, batch.page_table[row], lens[row], scale, sliding_window
            )
    for seq_len, members in same_length.items():
        tokens = torch.tensor([starts[row] for row in members], device=q.device)
        table = batch.page_table[torch.tensor(members, device=q.device)]
        out[tokens] = decode_ref(q[tokens], pages, table, seq_len, scale, sliding_window)
    return out

"""Causal attention over keys and values that lie in pages of the pool.

    out[t] = softmax(scale * q[t] . K_i[lo:p+1]) V_i[lo:p+1]    for every row t of sequence i

p is the position of row t in its sequence: the rows of sequence i are the last ones of its
context, so row `query_start[i] + j` stands at `seq_lens[i] - query_len + j`. lo is 0, or
`p - sliding_window + 1` with a window. Query head h reads KV head `h // (Hq / Hkv)`.

q        [T, Hq, D]              bf16, fp16 or fp32; D a multiple of 16 from 16 to 256
pool     [num_pages, page_bytes] uint8; a page viewed in q's dtype is
         [num_layers, 2 (K, V), Hkv, 16 (tokens), D]
out      [T, Hq, D]              q's dtype; rows of a sequence with seq_len 0 are zero

Whatever a page holds outside [lo, seq_len) is never multiplied: freed pages hold NaN.
A sequence's rows do not depend on what else is in the batch, bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

TOKENS_PER_PAGE = 16


@dataclass(frozen=True)
class AttentionBatch:
    """Which token rows belong to which sequence, and where their keys and values lie.

    Sequences with one query token come first (`num_decodes` of them). Under a captured graph the
    tensors are fixed buffers and the host integers are capacities.
    """

    query_start: torch.Tensor  # int32 [B + 1], first token row of each sequence
    seq_lens: torch.Tensor  # int32 [B], tokens of context, this step's included
    page_table: torch.Tensor  # int32 [B, max_pages]; entries past the context are never used
    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_sequences(self) -> int:
        """Rows of the page table."""
        return self.page_table.shape[0]


def kv_pages(
    pool: torch.Tensor, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> torch.Tensor:
    """The pool as KV pages: a view [num_pages, num_layers, 2, num_kv_heads, 16, head_dim]."""
    page = pool.view(dtype)
    return page.view(page.shape[0], -1, 2, num_kv_heads, TOKENS_PER_PAGE, head_dim)


def _check(
    q: torch.Tensor, pool: torch.Tensor, layer: int, num_kv_heads: int, batch: AttentionBatch
) -> None:
    assert q.ndim == 3 and q.stride(2) == 1 and q.stride(1) == q.shape[2], "q must be [T, Hq, D]"
    heads, head_dim = q.shape[1], q.shape[2]
    assert head_dim % 16 == 0 and 16 <= head_dim <= 256, f"head_dim {head_dim}"
    assert heads % num_kv_heads == 0, f"{heads} query heads over {num_kv_heads} KV heads"
    assert pool.dtype == torch.uint8 and pool.ndim == 2 and pool.is_contiguous()
    layer_bytes = 2 * num_kv_heads * TOKENS_PER_PAGE * head_dim * q.element_size()
    assert pool.shape[1] % layer_bytes == 0 and layer < pool.shape[1] // layer_bytes
    for tensor in (batch.query_start, batch.seq_lens, batch.page_table):
        assert tensor.dtype == torch.int32 and tensor.device == q.device
    assert batch.page_table.stride(1) == 1 and pool.device == q.device
    assert batch.query_start.shape[0] == batch.num_sequences + 1
    assert batch.num_decodes <= batch.num_sequences


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of every token row over its own sequence; returns out [T, Hq, D]."""
    _check(q, pool, layer, num_kv_heads, batch)
    return paged_attention_ref(q, pool, layer, num_kv_heads, batch, scale, sliding_window)


def paged_attention_ref(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """The same in torch, also the path on a CPU: gathers each sequence's pages, then SDPA."""
    out = torch.zeros_like(q)
    pages = kv_pages(pool, q.dtype, num_kv_heads, q.shape[2])[:, layer]
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
            out[rows] = _prefill_ref(
                q[rows], pages, batch.page_table[row], lens[row], scale, sliding_window
            )
    for seq_len, members in same_length.items():
        tokens = torch.tensor([starts[row] for row in members], device=q.device)
        table = batch.page_table[torch.tensor(members, device=q.device)]
        out[tokens] = _decode_ref(q[tokens], pages, table, seq_len, scale, sliding_window)
    return out


def _gather(
    pages: torch.Tensor, table: torch.Tensor, first: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens [first, seq_len): each [B, Hkv, seq_len - first, D]; table [B, pages]."""
    skipped = first // TOKENS_PER_PAGE
    used = table[:, skipped : -(-seq_len // TOKENS_PER_PAGE)].long()
    tokens = pages[used].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, B, Hkv, tokens, D]
    kept = tokens[..., first - skipped * TOKENS_PER_PAGE : seq_len - skipped * TOKENS_PER_PAGE, :]
    return kept[0], kept[1]


def _decode_ref(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One query token each for B sequences of one length: q [B, Hq, D] -> [B, Hq, D]."""
    first = 0 if sliding_window is None else max(0, seq_len - sliding_window)
    keys, values = _gather(pages, table, first, seq_len)
    # The query heads of one KV head see the same keys, so they can stand where query tokens do.
    grouped = q.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.flatten(1, 2)


def _prefill_ref(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """The last q.shape[0] tokens of one sequence: q [Tq, Hq, D] -> [Tq, Hq, D]."""
    query_len = q.shape[0]
    before = seq_len - query_len
    first = 0 if sliding_window is None else max(0, before - sliding_window + 1)
    keys, values = _gather(pages, table[None], first, seq_len)
    position = torch.arange(before, seq_len, device=q.device)[:, None]
    key_position = torch.arange(first, seq_len, device=q.device)[None, :]
    seen = key_position <= position
    if sliding_window is not None:
        seen &= key_position > position - sliding_window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)

"""The pool seen as pages of keys and values, for the kernels and for their torch paths."""

import torch

from multilora_kernels.layout import TOKENS_PER_PAGE


def kv_pages(
    pool: torch.Tensor, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> torch.Tensor:
    """The pool as KV pages: a view [num_pages, num_layers, 2, num_kv_heads, 16, head_dim]."""
    page = pool.view(dtype)
    return page.view(page.shape[0], -1, 2, num_kv_heads, TOKENS_PER_PAGE, head_dim)


def gather_kv(
    pages: torch.Tensor, table: torch.Tensor, first: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens [first, seq_len), each [B, Hkv, seq_len - first, D].

    `pages` is one layer's [num_pages, 2, Hkv, 16, D], `table` [B, at least the pages needed].
    """
    skipped = first // TOKENS_PER_PAGE
    used = table[:, skipped : -(-seq_len // TOKENS_PER_PAGE)].long()
    tokens = pages[used].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, B, Hkv, tokens, D]
    start = skipped * TOKENS_PER_PAGE
    kept = tokens[..., first - start : seq_len - start, :]
    return kept[0], kept[1]

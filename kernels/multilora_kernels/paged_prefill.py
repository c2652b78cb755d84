"""Prefill: a chunk of query tokens per sequence against its pages, causal.

    out[t] = softmax(scale * q[t] . K_i[lo:p+1]) V_i[lo:p+1]      p, lo as in `paged_attention`

q, out [T, Hq, D] (bf16, fp16, fp32), pages and page table as in `paged_attention`; out is written
in place. A program handles BLOCK_M rows: consecutive tokens times the query heads of one KV head,
which read the same keys. Keys that every row of the tile sees are multiplied without a mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.kv_pages import (
    KvLayer,
    compute_type,
    gather_kv,
    query_as,
    widen_kv,
)
from multilora_kernels.launch import Chip, cdiv, chip_of, next_power_of_2, tuned_table
from multilora_kernels.layout import TOKENS_PER_PAGE


@triton.jit
def _attend(
    q,
    acc,
    total,
    top,
    head_ptr,
    table_ptr,
    begin,
    end,
    position,
    page_elements,
    value_offset,
    scale_log2,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            page = tl.load(table_ptr + n // TOKENS, mask=n < end, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + n // TOKENS).to(tl.int64)
        at = (page * page_elements + (n % TOKENS) * HEAD_DIM)[:, None] + d[None, :]
        if MASKED:
            # Masked to zero on load: what lies past the context may be NaN, and 0 * NaN is NaN.
            used = n < end
            if WINDOWED:
                used &= n > tl.min(position, 0) - window
            kv_mask = used[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(head_ptr + at, mask=kv_mask, other=0.0)
            v = tl.load(head_ptr + value_offset + at, mask=kv_mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(head_ptr + at)
            v = tl.load(head_ptr + value_offset + at)
        else:
            k = tl.load(head_ptr + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(head_ptr + value_offset + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(widen_kv(k, COMPUTE)), input_precision="ieee")
        if MASKED:
            seen = (n[None, :] <= position[:, None]) & (n < end)[None, :]
            if WINDOWED:
                seen &= n[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
        safe_top = new_top
        if WINDOWED:
            # With a window a row's first tiles may hold nothing that it sees.
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * scale_log2 - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(COMPUTE), widen_kv(v, COMPUTE), acc, input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["first_row", "window"])
def prefill_kernel(
    q_ptr,
    pages_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_qt,
    stride_table,
    page_elements,
    layer_start,
    scale_log2,
    window,
    first_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    TILE: tl.constexpr = BLOCK_M // GROUP  # query tokens of one program
    head = tl.program_id(0)
    row = (first_row + tl.program_id(1)).to(tl.int64)
    # Late tiles see the most keys: they start first.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    if tile * TILE >= query_len:
        return
    length = tl.load(seq_lens_ptr + row)
    low_position = length - query_len + tile * TILE
    high_position = tl.minimum(low_position + TILE, length) - 1

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = tile * TILE + r // GROUP
    q_mask = ((r < TILE * GROUP) & (token < query_len))[:, None] & (d < HEAD_DIM)[None, :]
    heads = (head * GROUP + r % GROUP)[:, None] * HEAD_DIM + d[None, :]
    at_token = (row_start + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + at_token * stride_qt + heads, mask=q_mask, other=0.0)
    q = query_as(q, COMPUTE)
    position = low_position + r // GROUP

    head_ptr = pages_ptr + layer_start + head * (TOKENS * HEAD_DIM)
    table_ptr = page_table_ptr + row * stride_table
    value_offset = NUM_KV_HEADS * TOKENS * HEAD_DIM
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    open_begin = 0  # [open_begin, open_end): whole tiles of keys that every row here sees
    open_end = (low_position + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = tl.maximum(low_position - window + 1, 0) // BLOCK_N * BLOCK_N
        open_begin = tl.cdiv(tl.maximum(high_position - window + 1, 0), BLOCK_N) * BLOCK_N
        open_end = tl.maximum(open_begin, open_end)
        acc, total, top = _attend(
            q, acc, total, top, head_ptr, table_ptr, begin,
            tl.minimum(open_begin, high_position + 1), position, page_elements, value_offset,
            scale_log2, window, HEAD_DIM, BLOCK_D, TOKENS, BLOCK_N, True, WINDOWED, COMPUTE,
        )  # fmt: skip
    acc, total, top = _attend(
        q, acc, total, top, head_ptr, table_ptr, open_begin, open_end, position, page_elements,
        value_offset, scale_log2, window, HEAD_DIM, BLOCK_D, TOKENS, BLOCK_N, False, WINDOWED,
        COMPUTE,
    )  # fmt: skip
    acc, total, top = _attend(
        q, acc, total, top, head_ptr, table_ptr, open_end, high_position + 1, position,
        page_elements, value_offset, scale_log2, window, HEAD_DIM, BLOCK_D, TOKENS, BLOCK_N, True,
        WINDOWED, COMPUTE,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + at_token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def prefill_key(head_dim: int, group: int, kv_itemsize: int) -> str:
    """Key of a tuned prefill choice; FP8 pages have a key of their own."""
    return f"d{head_dim}_g{group}_b{kv_itemsize}"


def prefill_choice(
    chip: Chip, head_dim: int, group: int, itemsize: int, kv_itemsize: int
) -> dict[str, int]:
    """Tiles, warps and stages; never a function of the batch, so that rows repeat.

    `itemsize` is that of queries, which decides on the multiply and so on the tiles.
    """
    tuned = tuned_table(chip, "paged_prefill").get(prefill_key(head_dim, group, kv_itemsize))
    if tuned is not None:
        return dict(tuned)
    block_d = next_power_of_2(head_dim)
    # fp32 has no tensor-core path here and doubles every tile.
    block_m = max(64 if itemsize == 2 and block_d <= 128 else 32, next_power_of_2(group))
    if chip.sm >= 90 and itemsize == 2 and block_d <= 128:
        block_m = max(128, block_m)
    block_n = 64 if block_d * itemsize <= 256 else 32
    if block_d * itemsize > 512:
        block_n = 16
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if block_m >= 128 else 4,
        "num_stages": 2,
    }


def paged_prefill(
    q: torch.Tensor,
    kv: KvLayer,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    choice: dict[str, Any] | None = None,
) -> None:
    """Attention of every sequence after the first `batch.num_decodes`, written to out in place."""
    rows = batch.num_sequences - batch.num_decodes
    head_dim, itemsize = q.shape[2], q.element_size()
    group = q.shape[1] // kv.num_kv_heads
    assert out.is_contiguous()
    if choice is None:
        chip = chip_of(q.device.index or 0) if q.is_cuda else Chip("", 90, 1)
        choice = prefill_choice(chip, head_dim, group, itemsize, kv.dtype.itemsize)
    tiles = cdiv(batch.max_query_len, choice["BLOCK_M"] // group)
    prefill_kernel[(kv.num_kv_heads, rows, tiles)](
        q,
        kv.elements,
        out,
        batch.query_start,
        batch.seq_lens,
        batch.page_table,
        q.stride(0),
        batch.page_table.stride(0),
        kv.page_elements,
        kv.start,
        scale * 1.4426950408889634,
        sliding_window or 0,
        batch.num_decodes,
        NUM_KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TOKENS=TOKENS_PER_PAGE,
        WINDOWED=sliding_window is not None,
        COMPUTE=compute_type(q.dtype, kv.dtype),
        **choice,
    )


def prefill_ref(
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
    keys, values = gather_kv(pages, table[None], first, seq_len, q.dtype)
    position = torch.arange(before, seq_len, device=q.device)[:, None]
    key_position = torch.arange(first, seq_len, device=q.device)[None, :]
    seen = key_position <= position
    if sliding_window is not None:
        seen &= key_position > position - sliding_window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)

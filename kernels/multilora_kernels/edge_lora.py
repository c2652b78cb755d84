"""Adapters of the model's two edges, the token embedding and the output head, in place.

    embed_lora  x[t] = W_s[token[t]] where the slot s of row t has a whole embedding of its own;
                x[t] += B_s A_s[token[t]] where it has factors (A vocabulary-major)
    head_lora   logits[r] = W_s h[r]; logits[r] += B_s (A_s h[r])

    x          [T, hidden]   bf16 | fp16 | fp32, written in place
    token_ids  [T]           int64
    logits     [R, vocab]    fp32, written in place
    hidden     [R, hidden]   bf16 | fp16 | fp32
    pool       [num_pages, page_bytes]  uint8, holds the matrices in the dtype of x and hidden

Sums are fp32. One row at a time: both run once a step and not once a layer, and only in steps of
which some row needs them. Rows whose slot has no such matrix stay as they are.
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import on_host
from multilora_kernels.layout import MATRICES, MAX_RANK
from multilora_kernels.matrix_table import HEAD_FIELDS
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

_EMBED_COLUMNS = 128
_HEAD_COLUMNS = 256
_HEAD_K = 64
_SHRINK_K = 512
_FIRST = {name: MATRICES.index(name) * HEAD_FIELDS for name in MATRICES}
_SLOT = len(MATRICES) * HEAD_FIELDS


@triton.jit
def _row_starts(head_ptr, entries_ptr, n, mask):
    """Pool elements at which rows n of a matrix begin, int64; n may be a block."""
    first = tl.load(head_ptr)
    shift = tl.load(head_ptr + 1)
    length = tl.load(head_ptr + 2)
    block = tl.load(entries_ptr + first + (n >> shift), mask=mask, other=0)
    return block + ((n & ((1 << shift) - 1)) * length).to(tl.int64)


@triton.jit
def _times_factor(acc, head_ptr, entries_ptr, weights_ptr, values_ptr, n, n_mask):
    """acc[n] += sum over k of B[n, k] * values[k], for a matrix B of any rank."""
    rank = tl.load(head_ptr + 2)
    starts = _row_starts(head_ptr, entries_ptr, n, n_mask)
    for k_start in range(0, rank, 16):
        k = k_start + tl.arange(0, 16)
        k_mask = k < rank
        value = tl.load(values_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
        mask = n_mask[:, None] & k_mask[None, :]
        b = tl.load(weights_ptr + starts[:, None] + k[None, :], mask=mask, other=0.0)
        acc += tl.sum(b.to(tl.float32) * value[None, :], axis=1)
    return acc


@triton.jit
def embed_lora_kernel(
    x_ptr, tokens_ptr, weights_ptr, row_slots_ptr, heads_ptr, entries_ptr, hidden,
    SLOT: tl.constexpr, WEIGHT: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = heads_ptr + tl.load(row_slots_ptr + row) * SLOT
    has_weight = tl.load(head + WEIGHT + 3) > 0
    has_factors = tl.load(head + A + 3) > 0
    if has_weight | has_factors:
        token = tl.load(tokens_ptr + row).to(tl.int32)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = n < hidden
        x_ptrs = x_ptr + row * hidden + n
        acc = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        if has_weight:
            start = _row_starts(head + WEIGHT, entries_ptr, token, True)
            acc = tl.load(weights_ptr + start + n, mask=mask, other=0.0).to(tl.float32)
        if has_factors:
            start = _row_starts(head + A, entries_ptr, token, True)
            acc = _times_factor(
                acc, head + B, entries_ptr, weights_ptr, weights_ptr + start, n, mask
            )
        tl.store(x_ptrs, acc.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def head_shrink_kernel(
    shrunk_ptr, hidden_ptr, weights_ptr, row_slots_ptr, heads_ptr, entries_ptr, stride_hm, hidden,
    SLOT: tl.constexpr, A: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = heads_ptr + tl.load(row_slots_ptr + row) * SLOT + A
    rank = tl.load(head + 3)
    r = tl.program_id(1) * 16 + tl.arange(0, 16)
    if tl.program_id(1) * 16 < rank:
        r_mask = r < rank
        starts = _row_starts(head, entries_ptr, r, r_mask)
        acc = tl.zeros((16,), dtype=tl.float32)
        for k_start in range(0, hidden, BLOCK_K):
            k = k_start + tl.arange(0, BLOCK_K)
            k_mask = k < hidden
            x = tl.load(hidden_ptr + row * stride_hm + k, mask=k_mask, other=0.0).to(tl.float32)
            mask = r_mask[:, None] & k_mask[None, :]
            a = tl.load(weights_ptr + starts[:, None] + k[None, :], mask=mask, other=0.0)
            acc += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
        tl.store(shrunk_ptr + row * MAX_RANK + r, acc, mask=r_mask)


@triton.jit
def head_expand_kernel(
    logits_ptr, shrunk_ptr, hidden_ptr, weights_ptr, row_slots_ptr, heads_ptr, entries_ptr,
    stride_lm, stride_hm, hidden, vocab, SLOT: tl.constexpr, WEIGHT: tl.constexpr,
    B: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = heads_ptr + tl.load(row_slots_ptr + row) * SLOT
    has_weight = tl.load(head + WEIGHT + 3) > 0
    has_factors = tl.load(head + B + 3) > 0
    if has_weight | has_factors:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        n_mask = n < vocab
        logits_ptrs = logits_ptr + row * stride_lm + n
        acc = tl.load(logits_ptrs, mask=n_mask, other=0.0)
        if has_weight:
            acc = tl.zeros((BLOCK,), dtype=tl.float32)
            starts = _row_starts(head + WEIGHT, entries_ptr, n, n_mask)
            for k_start in range(0, hidden, BLOCK_K):
                k = k_start + tl.arange(0, BLOCK_K)
                k_mask = k < hidden
                x = tl.load(hidden_ptr + row * stride_hm + k, mask=k_mask, other=0.0)
                mask = n_mask[:, None] & k_mask[None, :]
                w = tl.load(weights_ptr + starts[:, None] + k[None, :], mask=mask, other=0.0)
                acc += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        if has_factors:
            values = shrunk_ptr + row * MAX_RANK
            acc = _times_factor(acc, head + B, entries_ptr, weights_ptr, values, n, n_mask)
        tl.store(logits_ptrs, acc, mask=n_mask)


def embed_lora(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
) -> None:
    """Give rows of the embedding what their adapters make of them, in place."""
    if not segments.has_extras(table):
        return
    assert x.shape[0] == segments.num_tokens == token_ids.shape[0] and x.is_contiguous()
    assert pool.dtype == torch.uint8 and pool.is_contiguous() and token_ids.dtype == torch.int64
    if on_host(pool.device):
        return embed_lora_ref(x, token_ids, pool, table, segments)
    hidden = x.shape[1]
    embed_lora_kernel[(len(x), triton.cdiv(hidden, _EMBED_COLUMNS))](
        x, token_ids, pool.view(-1).view(x.dtype), segments.row_slots, table.matrices.heads,
        table.matrices.entries, hidden, SLOT=_SLOT, WEIGHT=_FIRST["embed_tokens.weight"],
        A=_FIRST["embed_tokens.a"], B=_FIRST["embed_tokens.b"], BLOCK=_EMBED_COLUMNS,
    )  # fmt: skip
    return None


def head_lora(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
) -> None:
    """Give logits what the adapters of their rows make of them, in place."""
    if not segments.has_extras(table):
        return
    rows, vocab = logits.shape
    assert rows == segments.num_tokens == hidden.shape[0] and logits.dtype == torch.float32
    assert logits.stride(1) == 1 and hidden.stride(1) == 1
    assert pool.dtype == torch.uint8 and pool.is_contiguous()
    if on_host(pool.device):
        return head_lora_ref(logits, hidden, pool, table, segments)
    weights = pool.view(-1).view(hidden.dtype)
    where = (segments.row_slots, table.matrices.heads, table.matrices.entries)
    shrunk = torch.empty(rows, MAX_RANK, dtype=torch.float32, device=logits.device)
    head_shrink_kernel[(rows, MAX_RANK // 16)](
        shrunk, hidden, weights, *where, hidden.stride(0), hidden.shape[1], SLOT=_SLOT,
        A=_FIRST["lm_head.a"], MAX_RANK=MAX_RANK, BLOCK_K=_SHRINK_K,
    )  # fmt: skip
    head_expand_kernel[(rows, triton.cdiv(vocab, _HEAD_COLUMNS))](
        logits, shrunk, hidden, weights, *where, logits.stride(0), hidden.stride(0),
        hidden.shape[1], vocab, SLOT=_SLOT, WEIGHT=_FIRST["lm_head.weight"],
        B=_FIRST["lm_head.b"], MAX_RANK=MAX_RANK, BLOCK=_HEAD_COLUMNS, BLOCK_K=_HEAD_K,
    )  # fmt: skip
    return None


def embed_lora_ref(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
) -> None:
    """The same in torch: the CPU path, and what the kernel is tested against."""
    weights, matrices = pool.view(-1).view(x.dtype), table.matrices
    for slot, rows in segments.rows_by_slot(x.device):
        tokens = token_ids.index_select(0, rows)
        whole = matrices.rows(slot, "embed_tokens.weight", weights, tokens)
        if whole is not None:
            x.index_copy_(0, rows, whole)
        a = matrices.rows(slot, "embed_tokens.a", weights, tokens)
        b = matrices.matrix(slot, "embed_tokens.b", weights)
        if a is not None and b is not None:
            summed = x.index_select(0, rows).float() + a.float() @ b.float().T
            x.index_copy_(0, rows, summed.to(x.dtype))


def head_lora_ref(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    pool: torch.Tensor,
    table: AdapterTable,
    segments: Segments,
) -> None:
    """The same in torch: the CPU path, and what the kernels are tested against."""
    weights, matrices = pool.view(-1).view(hidden.dtype), table.matrices
    for slot, rows in segments.rows_by_slot(logits.device):
        h = hidden.index_select(0, rows).float()
        whole = matrices.matrix(slot, "lm_head.weight", weights)
        if whole is not None:
            logits.index_copy_(0, rows, h @ whole.float().T)
        a = matrices.matrix(slot, "lm_head.a", weights)
        b = matrices.matrix(slot, "lm_head.b", weights)
        if a is not None and b is not None:
            logits.index_add_(0, rows, (h @ a.float().T) @ b.float().T)

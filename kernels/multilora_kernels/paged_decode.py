"""Decode: one query token per sequence against its pages, the context cut into splits.

    out[i] = softmax(scale * q[i] . K_i[lo:n]) V_i[lo:n]    n = seq_lens[i], lo = max(0, n - window)

q, out [B, Hq, D] (bf16, fp16, fp32), pages and page table as in `paged_attention`; out is written
in place. A program handles the query heads of one KV head of one sequence, over some consecutive
splits of its context. Where the splits lie depends on the sequence's own length only. How many of
them a program takes depends on all lengths, read on the device, so that the launch makes about one
wave of programs; a sequence whose splits went to several programs leaves partial results, which
the program that arrives last adds up.

A row's bits depend on neither: splits are always added from the first to the last, and the running
maximum is rounded up to an integer power of two, so that rescaling is exact and it does not matter
where it happens. The grid depends on shapes alone: a captured graph replays for any lengths.
"""

from functools import lru_cache
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
from multilora_kernels.launch import Chip, chip_for, chip_of, next_power_of_2, tuned_table
from multilora_kernels.layout import TOKENS_PER_PAGE

# Rows times KV heads that one launch may have; the arrival counters are allocated once.
MAX_COUNTERS = 1 << 18


@triton.jit
def _attend_tile(
    q,
    acc,
    total,
    top,
    head_ptr,
    table_ptr,
    start,
    end,
    low,
    page_elements,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One tile of keys [start, start + BLOCK_N) into the running softmax."""
    d = tl.arange(0, BLOCK_D)
    n = start + tl.arange(0, BLOCK_N)
    seen = n < end
    page = tl.load(table_ptr + n // TOKENS, mask=seen, other=0).to(tl.int64)
    if WINDOWED:
        seen &= n >= low
    at = (page * page_elements + (n % TOKENS) * HEAD_DIM)[:, None] + d[None, :]
    # Masked to zero on load: what lies past the context may be NaN, and 0 * NaN is NaN.
    mask = seen[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(head_ptr + at, mask=mask, other=0.0)
    v = tl.load(head_ptr + VALUES + at, mask=mask, other=0.0)
    score = tl.dot(q, tl.trans(widen_kv(k, COMPUTE)), input_precision="ieee") * scale_log2
    score = tl.where(seen[None, :], score, float("-inf"))
    # An integer: exp2 of a difference of two is exact, and so is every product with it.
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    p = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(COMPUTE), widen_kv(v, COMPUTE), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _cut(tokens, min_split, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of a split, and splits: a function of the row's length alone."""
    share = tl.cdiv(tl.cdiv(tokens, MAX_SPLITS), BLOCK_N) * BLOCK_N
    split_tokens = tl.maximum(share, min_split)
    return split_tokens, tl.maximum(tl.cdiv(tokens, split_tokens), 1)


@triton.jit
def _span(length, window, TOKENS: tl.constexpr, WINDOWED: tl.constexpr):
    """First token that the row sees, and the start of its page."""
    low = length * 0
    if WINDOWED:
        low = tl.maximum(length - window, 0)
    return low, low // TOKENS * TOKENS


@triton.jit
def _fold(acc, total, top, part, part_total, part_top):
    """Add a later split to the running result; exact but for the two additions."""
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    acc = acc * old[:, None] + part * new[:, None]
    return acc, total * old + part_total * new, new_top


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    state_ptr,
    num_splits,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Fold the stored splits of a row and KV head."""
    g = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    top = tl.full([BLOCK_C], -1.0e30, tl.float32)
    for chunk in range(0, num_splits, 8):
        for ahead in tl.static_range(8):  # unrolled: eight splits' loads are in flight together
            split = chunk + ahead
            used = (g < GROUP) & (split < num_splits)
            at = split * GROUP + g
            mask = used[:, None] & (d < HEAD_DIM)[None, :]
            # .cg: written by other multiprocessors, so never from this one's L1.
            part = tl.load(
                partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
                mask=mask,
                other=0.0,
                cache_modifier=".cg",
            )
            part_top = tl.load(state_ptr + at, mask=used, other=-1.0e30, cache_modifier=".cg")
            part_total = tl.load(
                state_ptr + MAX_SPLITS * GROUP + at, mask=used, other=0.0, cache_modifier=".cg"
            )
            acc, total, top = _fold(acc, total, top, part, part_total, part_top)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    at_out = g[:, None] * HEAD_DIM + d[None, :]
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + at_out, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _plan(
    seq_lens_ptr,
    window,
    rows,
    slots,
    min_split,
    NUM_KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Programs per KV head of every row, for about `slots` programs in all."""
    row = tl.arange(0, BLOCK_B)
    length = tl.load(seq_lens_ptr + row, mask=row < rows, other=0)
    _, first = _span(length, window, TOKENS, WINDOWED)
    tokens = length - first
    split_tokens, num_splits = _cut(tokens, min_split, MAX_SPLITS, BLOCK_N)
    wanted = tl.cdiv(tl.sum(tokens.to(tl.int64), 0) * NUM_KV_HEADS, slots).to(tl.int32)
    per_lane = tl.maximum(tl.cdiv(wanted, split_tokens), 1)
    return tl.where(row < rows, tl.cdiv(num_splits, per_lane), 0)


@triton.jit
def _empty(BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """A running softmax that has seen nothing: (acc, total, top)."""
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    return acc, tl.zeros([BLOCK_G], tl.float32), tl.full([BLOCK_G], -1.0e30, tl.float32)


@triton.jit
def _store_part(
    part_ptr,
    state_ptr,
    split,
    part,
    total,
    top,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Leave a split's sums for the program that arrives last."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    at = split * GROUP + g
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(part_ptr + at[:, None] * HEAD_DIM + d[None, :], part, mask=mask)
    tl.store(state_ptr + at, top, mask=g < GROUP)
    tl.store(state_ptr + MAX_SPLITS * GROUP + at, total, mask=g < GROUP)


# fmt: off
@triton.jit(do_not_specialize=["window", "rows", "slots", "min_split"])
def decode_kernel(
    q_ptr, pages_ptr, out_ptr, partial_ptr, state_ptr, arrived_ptr, seq_lens_ptr, page_table_ptr,
    stride_qt, stride_table, page_elements, layer_start, scale_log2, window,
    rows, slots, min_split,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    lanes_of = _plan(
        seq_lens_ptr, window, rows, slots, min_split,
        NUM_KV_HEADS, TOKENS, BLOCK_B, BLOCK_N, MAX_SPLITS, WINDOWED,
    )
    lane_end = tl.cumsum(lanes_of, 0)
    g = tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    in_head, q_mask = g * HEAD_DIM + d, (g < GROUP) & (d < HEAD_DIM)
    # Nearly always one turn: the grid has a program per item unless lengths differ widely.
    num_items = tl.sum(lanes_of, 0) * NUM_KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        head = item % NUM_KV_HEADS
        place = item // NUM_KV_HEADS
        passed = lane_end <= place
        row = tl.sum(passed.to(tl.int32), 0).to(tl.int64)
        lane = place - tl.sum(tl.where(passed, lanes_of, 0), 0)
        lanes = tl.sum(tl.where(tl.arange(0, BLOCK_B) == row, lanes_of, 0), 0)
        length = tl.load(seq_lens_ptr + row)
        low, first = _span(length, window, TOKENS, WINDOWED)
        split_tokens, num_splits = _cut(length - first, min_split, MAX_SPLITS, BLOCK_N)
        per_lane = tl.cdiv(num_splits, lanes)
        begin = first + lane * per_lane * split_tokens
        end = tl.minimum(begin + per_lane * split_tokens, length)

        row_head = row * NUM_KV_HEADS + head
        part_ptr = partial_ptr + row_head * (MAX_SPLITS * GROUP * HEAD_DIM)
        head_state_ptr = state_ptr + row_head * (2 * MAX_SPLITS * GROUP)
        head_out_ptr = out_ptr + row_head * (GROUP * HEAD_DIM)
        q_at = q_ptr + row * stride_qt + head * (GROUP * HEAD_DIM) + in_head
        q = query_as(tl.load(q_at, mask=q_mask, other=0.0), COMPUTE)
        acc, total, top = _empty(BLOCK_G, BLOCK_D)
        part, part_total, part_top = _empty(BLOCK_G, BLOCK_D)
        # One loop over the tiles of all its splits: loads run ahead across the end of a split.
        for start in range(begin, end, BLOCK_N):
            part, part_total, part_top = _attend_tile(
                q, part, part_total, part_top,
                pages_ptr + layer_start + head * (TOKENS * HEAD_DIM),
                page_table_ptr + row * stride_table, start, end, low, page_elements, scale_log2,
                HEAD_DIM, BLOCK_D, NUM_KV_HEADS * TOKENS * HEAD_DIM, TOKENS, BLOCK_N, WINDOWED,
                COMPUTE,
            )
            after = start + BLOCK_N - first
            if (after % split_tokens == 0) | (start + BLOCK_N >= end):
                if lanes > 1:
                    _store_part(
                        part_ptr, head_state_ptr, (after - 1) // split_tokens, part, part_total,
                        part_top, GROUP, BLOCK_G, HEAD_DIM, BLOCK_D, MAX_SPLITS,
                    )
                acc, total, top = _fold(acc, total, top, part, part_total, part_top)
                part, part_total, part_top = _empty(BLOCK_G, BLOCK_D)

        if lanes == 1:
            # An empty row (a padding row of a captured graph) has total 0 and gives zeros.
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(head_out_ptr + in_head, result.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            tl.debug_barrier()  # every thread's stores before the one thread's release
            if tl.atomic_add(arrived_ptr + row_head, 1, sem="acq_rel") == lanes - 1:
                tl.store(arrived_ptr + row_head, 0)  # ready for the next launch
                _combine(
                    head_out_ptr, part_ptr, head_state_ptr, num_splits,
                    BLOCK_C, GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS,
                )
# fmt: on


def decode_key(head_dim: int, group: int, itemsize: int) -> str:
    """Key of a tuned decode choice."""
    return f"d{head_dim}_g{group}_b{itemsize}"


def decode_choice(chip: Chip, head_dim: int, group: int, itemsize: int) -> dict[str, int]:
    """Tiles and splits; never a function of the batch, or a row's bits would depend on it."""
    tuned = tuned_table(chip, "paged_decode").get(decode_key(head_dim, group, itemsize))
    if tuned is not None:
        return dict(tuned)
    token_bytes = 2 * next_power_of_2(head_dim) * itemsize
    # Two tiles of K and V in flight (five stages: page ids are loaded ahead of them) take 2.4 to
    # 2.8 tiles of shared memory; two programs to a multiprocessor hide each other's latency.
    fits = int(chip.shared_bytes / (2 * 2.9 * token_bytes))
    block_n = max(16, min(64, 1 << max(0, fits.bit_length() - 1)))
    programs = int(chip.shared_bytes / (2.9 * block_n * token_bytes))
    return {
        "BLOCK_N": block_n,
        "min_split": 128,
        "MAX_SPLITS": 32,
        "slots": max(1, min(3, programs)) * chip.num_sms,
        "num_warps": 4,
        "num_stages": 5,
    }


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> torch.Tensor:
    """Arrival counters, zero between launches; one launch at a time per device uses them."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), (
        "call paged_attention once before capturing it in a graph"
    )
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def paged_decode(
    q: torch.Tensor,
    kv: KvLayer,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    choice: dict[str, Any] | None = None,
) -> None:
    """Attention of the first `batch.num_decodes` rows of q [T, Hq, D], written to out in place."""
    rows, heads, head_dim = batch.num_decodes, q.shape[1], q.shape[2]
    group = heads // kv.num_kv_heads
    assert rows * kv.num_kv_heads <= MAX_COUNTERS and out.is_contiguous()
    if choice is None:
        chip = chip_of(q.device.index or 0) if q.is_cuda else Chip("", 90, 1)
        choice = decode_choice(chip, head_dim, group, kv.dtype.itemsize)
    choice = dict(choice)
    pdl = chip_for(q.device).has_pdl
    slots, min_split = choice.pop("slots"), choice.pop("min_split")
    max_splits = choice["MAX_SPLITS"]
    assert min_split % choice["BLOCK_N"] == 0, "a split is whole tiles"
    shape = (rows, kv.num_kv_heads, max_splits, group)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    state = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    decode_kernel[(max(slots, rows * kv.num_kv_heads),)](
        q,
        kv.elements,
        out,
        partial,
        state,
        _counters(q.device),
        batch.seq_lens,
        batch.page_table,
        q.stride(0),
        batch.page_table.stride(0),
        kv.page_elements,
        kv.start,
        scale * 1.4426950408889634,
        sliding_window or 0,
        rows,
        slots,
        min_split,
        NUM_KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        BLOCK_B=max(256, next_power_of_2(rows)),
        BLOCK_C=next_power_of_2(group),
        BLOCK_G=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TOKENS=TOKENS_PER_PAGE,
        WINDOWED=sliding_window is not None,
        COMPUTE=compute_type(q.dtype, kv.dtype),
        PDL=pdl,
        launch_pdl=pdl,
        **choice,
    )


def decode_ref(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One query token each for B sequences of one length: q [B, Hq, D] -> [B, Hq, D]."""
    first = 0 if sliding_window is None else max(0, seq_len - sliding_window)
    keys, values = gather_kv(pages, table, first, seq_len, q.dtype)
    # The query heads of one KV head see the same keys, so they can stand where query tokens do.
    grouped = q.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.flatten(1, 2)

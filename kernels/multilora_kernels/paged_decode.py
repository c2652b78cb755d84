"""Decode: one query token per sequence against its pages, the context cut into splits.

    out[i] = softmax(scale * q[i] . K_i[lo:n]) V_i[lo:n]    n = seq_lens[i], lo = max(0, n - window)

q, out [B, Hq, D] (bf16, fp16, fp32), pages and page table as in `paged_attention`; out is written
in place. A program handles the query heads of one KV head of one sequence, over consecutive splits
of its context (`decode_plan`); each of its warps takes a page of 16 tokens at a time and keeps a
running softmax of its own, so that warps meet at the end of a split alone. A sequence of one split
is then finished; splits of a longer one are left in memory, and the program that arrives last adds
them up.

A row's bits do not depend on the batch: where splits lie depends on its own length only, they are
always added from the first to the last, and the running maximum is rounded up to an integer power
of two, so that rescaling is exact. The grid depends on shapes alone: a captured graph replays for
any lengths.

On sm_90 and newer a program reads lengths and page ids while the kernel in front of it still runs:
they must have been written before that one started. Queries, keys and values are read behind it.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.decode_plan import further_program, shares, span
from multilora_kernels.kv_pages import (
    KvLayer,
    compute_type,
    gather_kv,
    query_as,
    widen_kv,
)
from multilora_kernels.launch import Chip, chip_for, next_power_of_2, tuned_table
from multilora_kernels.layout import TOKENS_PER_PAGE

# Rows times KV heads that one launch may have; the arrival counters are allocated once.
MAX_COUNTERS = 1 << 18
# Of a launch choice: what does not change the order of any sum.
_FREE_FIELDS = frozenset({"num_stages", "maxnreg", "slots"})


@triton.jit
def _page_ids(table_ptr, start, end, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the tile [start, start + BLOCK_N); entries past the context are not read."""
    first = start // TOKENS + tl.arange(0, BLOCK_N // TOKENS)
    return tl.load(table_ptr + first, mask=first * TOKENS < end, other=0)


@triton.jit
def _attend_tile(
    q,
    acc,
    sums,
    top,
    head_ptr,
    pages,
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
    """One tile of keys [start, start + BLOCK_N) into the running softmax of each warp.

    A warp takes a page, q [warps, D, G], acc [warps, D, G], sums [warps, TOKENS, G] (of its page's
    tokens, added up at the end of a split) and top [warps, G].
    """
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, TOKENS)
    n = start + tl.arange(0, BLOCK_N // TOKENS)[:, None] * TOKENS + i[None, :]
    seen = n < end
    if WINDOWED:
        seen &= n >= low
    page = (pages.to(tl.int64) * page_elements)[:, None, None]
    # Masked to zero on load: what lies past the context may be NaN, and 0 * NaN is NaN.
    k_at = page + (i * HEAD_DIM)[None, :, None] + d[None, None, :]
    k_mask = seen[:, :, None] & (d < HEAD_DIM)[None, None, :]
    k = tl.load(head_ptr + k_at, mask=k_mask, other=0.0)
    score = tl.dot(widen_kv(k, COMPUTE), q, input_precision="ieee") * scale_log2
    score = tl.where(seen[:, :, None], score, float("-inf"))
    # An integer: exp2 of a difference of two is exact, and so is every product with it.
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    p = tl.exp2(score - new_top[:, None, :])
    shrink = tl.exp2(top - new_top)[:, None, :]
    v_at = page + d[None, :, None] + (i * HEAD_DIM)[None, None, :]
    v_mask = seen[:, None, :] & (d < HEAD_DIM)[None, :, None]
    v = tl.load(head_ptr + VALUES + v_at, mask=v_mask, other=0.0)
    acc = tl.dot(widen_kv(v, COMPUTE), p.to(COMPUTE), acc * shrink, input_precision="ieee")
    return acc, sums * shrink + p, new_top


@triton.jit
def _sum_warps(x, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [W, ROWS, COLUMNS] summed over W in pairs: one exchange, where tl.sum takes 600 steps."""
    if W == 1:
        return x.reshape((ROWS, COLUMNS))
    else:
        pairs = tl.permute(x, (1, 2, 0)).reshape((ROWS, COLUMNS, W // 2, 2))
        even, odd = tl.split(pairs)
        halves = even + odd
        if W == 2:
            return halves.reshape((ROWS, COLUMNS))
        elif W == 4:
            first, second = tl.split(halves)
            return first + second
        else:
            tl.static_assert(W == 8)
            first, second = tl.split(halves.reshape((ROWS, COLUMNS, 2, 2)))
            first, second = tl.split(first + second)
            return first + second


@triton.jit
def _merge(acc, sums, top):
    """The running softmax of all warps: acc [G, D], total [G], top [G]."""
    WARPS: tl.constexpr = acc.shape[0]
    HALF: tl.constexpr = acc.shape[1] // 2
    GROUP: tl.constexpr = acc.shape[2]
    best = tl.max(top, 0)
    factor = tl.exp2(top - best[None, :])
    # One half after the other: half the registers and half the shared memory to pass through.
    acc = (acc * factor[:, None, :]).reshape((WARPS, 2, HALF, GROUP))
    low, high = tl.split(tl.permute(acc, (0, 2, 3, 1)))
    low = tl.trans(_sum_warps(low, WARPS, HALF, GROUP))
    high = tl.trans(_sum_warps(high, WARPS, HALF, GROUP))
    acc = tl.permute(tl.join(low, high), (0, 2, 1)).reshape((GROUP, 2 * HALF))
    return acc, tl.sum(tl.sum(sums, 1) * factor, 0), best


@triton.jit
def _fold(acc, total, top, part, part_total, part_top):
    """Add a later split to the running result; exact but for the two additions."""
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    acc = acc * old[:, None] + part * new[:, None]
    return acc, total * old + part_total * new, new_top


@triton.jit
def _inverse(total):
    """1 / total; an empty row (a padding row of a captured graph) has total 0 and gives zeros."""
    return 1.0 / tl.where(total > 0, total, 1.0)


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
    result = acc * _inverse(total)[:, None]
    at_out = g[:, None] * HEAD_DIM + d[None, :]
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + at_out, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _start_next(PDL: tl.constexpr):
    """Wait for the kernel before this one, and let the one after it start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _last_to_arrive(arrived_ptr, lanes):
    """Whether all programs of a row have stored their splits; its counter is zero again then."""
    tl.debug_barrier()  # every thread's stores before the one thread's release
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == lanes - 1
    if last:
        tl.store(arrived_ptr, 0)  # ready for the next launch
    return last


@triton.jit
def _empty(WARPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Running softmaxes that have seen nothing: acc, sums and top as `_attend_tile` has them."""
    acc = tl.zeros([WARPS, BLOCK_D, BLOCK_G], tl.float32)
    sums = tl.zeros([WARPS, TOKENS, BLOCK_G], tl.float32)
    return acc, sums, tl.full([WARPS, BLOCK_G], -1.0e30, tl.float32)


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
@triton.jit(do_not_specialize=["stride_table", "window", "rows", "sharers", "min_split"])
def decode_kernel(
    q_ptr, pages_ptr, out_ptr, partial_ptr, state_ptr, arrived_ptr, seq_lens_ptr, page_table_ptr,
    stride_qt, stride_table, page_elements, layer_start, scale_log2, window,
    rows, sharers, min_split,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):
    VALUES: tl.constexpr = NUM_KV_HEADS * TOKENS * HEAD_DIM
    WARPS: tl.constexpr = BLOCK_N // TOKENS
    head = tl.program_id(0) % NUM_KV_HEADS
    row, lane = tl.program_id(0) // NUM_KV_HEADS, 0
    if row >= rows:  # behind the first programs of all rows come those that share the long ones
        row, lane = further_program(
            row - rows, seq_lens_ptr, window, rows, sharers, min_split,
            TOKENS, BLOCK_B, BLOCK_N, MAX_SPLITS, WINDOWED,
        )
    if row < rows:
        length = tl.load(seq_lens_ptr + row)
        low, first = span(length, window, TOKENS, WINDOWED)
        split_tokens, num_splits, lanes, per_lane = shares(
            length - first, seq_lens_ptr, window, rows, sharers, min_split,
            TOKENS, BLOCK_B, BLOCK_N, MAX_SPLITS, WINDOWED,
        )
        split = lane * per_lane
        begin = first + split * split_tokens
        end = tl.minimum(begin + per_lane * split_tokens, length)

        wide_row = row.to(tl.int64)
        table_ptr = page_table_ptr + wide_row * stride_table
        head_ptr = pages_ptr + layer_start + head * (TOKENS * HEAD_DIM)
        pages = _page_ids(table_ptr, begin, end, TOKENS, BLOCK_N)
        _start_next(PDL)

        g = tl.arange(0, BLOCK_G)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        in_head, q_mask = g * HEAD_DIM + d, (g < GROUP) & (d < HEAD_DIM)
        row_head = wide_row * NUM_KV_HEADS + head
        part_ptr = partial_ptr + row_head * (MAX_SPLITS * GROUP * HEAD_DIM)
        head_state_ptr = state_ptr + row_head * (2 * MAX_SPLITS * GROUP)
        head_out_ptr = out_ptr + row_head * (GROUP * HEAD_DIM)
        q_at = q_ptr + wide_row * stride_qt + head * (GROUP * HEAD_DIM) + in_head
        q = query_as(tl.load(q_at, mask=q_mask, other=0.0), COMPUTE)
        q = tl.broadcast_to(tl.trans(q)[None, :, :], (WARPS, BLOCK_D, BLOCK_G))
        acc, sums, top = _empty(WARPS, TOKENS, BLOCK_G, BLOCK_D)
        row_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        row_total = tl.zeros([BLOCK_G], tl.float32)
        row_top = tl.full([BLOCK_G], -1.0e30, tl.float32)
        split_end = begin + split_tokens
        # One loop over the tiles of all its splits: loads run ahead across the end of a split.
        for start in range(begin, end, BLOCK_N):
            tile_pages = pages
            pages = _page_ids(table_ptr, start + BLOCK_N, end, TOKENS, BLOCK_N)
            acc, sums, top = _attend_tile(
                q, acc, sums, top, head_ptr, tile_pages, start, end, low, page_elements,
                scale_log2, HEAD_DIM, BLOCK_D, VALUES, TOKENS, BLOCK_N, WINDOWED, COMPUTE,
            )
            if start + BLOCK_N >= tl.minimum(split_end, end):
                part, total, part_top = _merge(acc, sums, top)
                if lanes > 1:
                    _store_part(
                        part_ptr, head_state_ptr, split, part, total, part_top,
                        GROUP, BLOCK_G, HEAD_DIM, BLOCK_D, MAX_SPLITS,
                    )
                row_acc, row_total, row_top = _fold(
                    row_acc, row_total, row_top, part, total, part_top
                )
                acc, sums, top = _empty(WARPS, TOKENS, BLOCK_G, BLOCK_D)
                split += 1
                split_end += split_tokens

        if lanes == 1:
            result = (row_acc * _inverse(row_total)[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(head_out_ptr + in_head, result, mask=q_mask)
        elif _last_to_arrive(arrived_ptr + row_head, lanes):
            _combine(
                head_out_ptr, part_ptr, head_state_ptr, num_splits,
                BLOCK_C, GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS,
            )
    else:
        _start_next(PDL)
# fmt: on


def decode_key(head_dim: int, group: int, itemsize: int) -> str:
    """Key of a tuned decode choice."""
    return f"d{head_dim}_g{group}_b{itemsize}"


def decode_choice(chip: Chip, head_dim: int, group: int, itemsize: int) -> dict[str, Any]:
    """Tiles and splits; never a function of the batch, or a row's bits would depend on it.

    BLOCK_N / 16 warps take a tile of BLOCK_N tokens. A split has `min_split` tokens or up to twice
    as many, more where there would be over MAX_SPLITS of them; `slots` programs beyond the first of
    every row and KV head share the splits of long rows. "crowded" holds what launches of more than
    two programs a multiprocessor do otherwise, of the fields that leave a row's bits alone.
    """
    tuned = tuned_table(chip, "paged_decode").get(decode_key(head_dim, group, itemsize))
    if tuned is not None:
        return dict(tuned)
    # Two tiles of K and V in flight, and a half of every warp's sums, which meet at a split's end.
    block_d, group = next_power_of_2(head_dim), max(8, next_power_of_2(group))
    token_bytes = block_d * (4 * itemsize + group // 8)
    # Two programs to a multiprocessor hide each other's latency.
    fits = chip.shared_bytes // (2 * token_bytes)
    return {
        "BLOCK_N": max(16, min(64, 1 << max(0, fits.bit_length() - 1))),
        "min_split": 256,
        "MAX_SPLITS": 32,
        "slots": 2 * chip.num_sms,
        "num_stages": 3,
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
    programs, group = rows * kv.num_kv_heads, heads // kv.num_kv_heads
    assert programs <= MAX_COUNTERS and out.is_contiguous()
    chip = chip_for(q.device)
    choice = dict(choice or decode_choice(chip, head_dim, group, kv.dtype.itemsize))
    crowded = choice.pop("crowded", {})
    assert _FREE_FIELDS.issuperset(crowded), f"{crowded}: changes a row's bits"
    if programs > 2 * chip.num_sms:
        choice |= crowded
    min_split, max_splits = choice.pop("min_split"), choice["MAX_SPLITS"]
    # Programs beside the first of each row and head, which share the rows of several splits.
    sharers = max(1, choice.pop("slots") // kv.num_kv_heads)
    assert min_split % choice["BLOCK_N"] == 0, "a split is whole tiles"
    shape = (rows, kv.num_kv_heads, max_splits, group)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    state = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    decode_kernel[((rows + sharers) * kv.num_kv_heads,)](
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
        sharers,
        min_split,
        NUM_KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        BLOCK_B=max(256, next_power_of_2(rows)),
        BLOCK_C=next_power_of_2(group),
        BLOCK_G=max(8, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TOKENS=TOKENS_PER_PAGE,
        WINDOWED=sliding_window is not None,
        COMPUTE=compute_type(q.dtype, kv.dtype),
        PDL=chip.has_pdl,
        num_warps=choice["BLOCK_N"] // TOKENS_PER_PAGE,
        launch_pdl=chip.has_pdl,
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

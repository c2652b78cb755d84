"""Decode: one query token per sequence against its pages, the context cut into splits.

    out[i] = softmax(scale * q[i] . K_i[lo:n]) V_i[lo:n]    n = seq_lens[i], lo = max(0, n - window)

q, out [B, Hq, D] (bf16, fp16, fp32), pool and page table as in `paged_attention`; out is written
in place. A program handles the query heads of one KV head and one or more splits of one sequence.
Splits that are not alone leave a normalised fp32 output and its log-sum-exp; the program that
arrives last adds them up in the order of the splits.

Where the splits lie depends on the sequence's own length only, so a row's bits do not depend on
the batch. How many consecutive splits a program takes depends on all lengths, read on the device,
so that the launch makes about one wave of programs; that changes only who computes a split. The
grid depends on shapes and capacities alone: a captured graph replays for any lengths up to
`max_seq_len`.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.kv_pages import gather_kv
from multilora_kernels.launch import Chip, chip_of, tuned_table
from multilora_kernels.layout import TOKENS_PER_PAGE

if TYPE_CHECKING:
    from multilora_kernels.paged_attention import AttentionBatch

# Rows times KV heads that one launch may have; the arrival counters are allocated once.
MAX_COUNTERS = 1 << 17
# Programs past a sequence's splits exit at once but cost about 0.6 ns each (measured, H200).
MAX_PROGRAMS = 8192


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
    score = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee") * scale_log2
    score = tl.where(seen[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _tokens_of_batch(seq_lens_ptr, window, rows, WINDOWED: tl.constexpr):
    """Tokens that all rows together attend to."""
    row = tl.arange(0, 256)
    # The first 256 rows outside the loop: their load then does not wait for anything.
    lens = tl.load(seq_lens_ptr + row, mask=row < rows, other=0)
    if WINDOWED:
        lens = tl.minimum(lens, window)
    tokens = tl.sum(lens.to(tl.int64), 0)
    # Summed to a scalar per turn: a loop that carries a tile keeps the compiler from pipelining
    # the main loop (Triton 3.7).
    for start in range(256, rows, 256):
        lens = tl.load(seq_lens_ptr + start + row, mask=start + row < rows, other=0)
        if WINDOWED:
            lens = tl.minimum(lens, window)
        tokens += tl.sum(lens.to(tl.int64), 0)
    return tokens


@triton.jit
def _store_split(
    out_ptr,
    partial_ptr,
    lse_ptr,
    acc,
    total,
    top,
    split,
    num_splits,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Leave a split's normalised output and log2-sum-exp; a split that is alone is the result."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    at = g[:, None] * HEAD_DIM + d[None, :]
    part = acc / total[:, None]
    if num_splits == 1:
        tl.store(out_ptr + at, part.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + split * (GROUP * HEAD_DIM) + at, part, mask=mask)
        tl.store(lse_ptr + split * GROUP + g, top + tl.log2(total), mask=g < GROUP)


@triton.jit
def _combine_head(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_splits,
    g,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Add up the splits of query head g."""
    split = tl.arange(0, MAX_SPLITS)
    used = split < num_splits
    d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    # .cg: written by other multiprocessors, so never from this one's L1.
    lse = tl.load(lse_ptr + split * GROUP + g, mask=used, other=float("-inf"), cache_modifier=".cg")
    weight = tl.exp2(lse - tl.max(lse, 0))
    at = (split * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    part = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    total = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + g * HEAD_DIM + d, total.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Add up the splits of every query head of a KV head."""
    if GROUP <= 8:  # unrolled, so that the loads of all heads are in flight together
        for g in tl.static_range(GROUP):
            _combine_head(
                out_ptr, partial_ptr, lse_ptr, num_splits, g, GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS
            )
    else:
        for g in tl.range(GROUP):
            _combine_head(
                out_ptr, partial_ptr, lse_ptr, num_splits, g, GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS
            )


@triton.jit(do_not_specialize=["window", "rows", "slots", "min_split"])
def decode_kernel(
    q_ptr,
    pages_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_qt,
    stride_table,
    page_elements,
    layer_start,
    scale_log2,
    window,
    rows,
    slots,
    min_split,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2)
    length = tl.load(seq_lens_ptr + row)
    low = 0
    if WINDOWED:
        low = tl.maximum(length - window, 0)
    first = low // TOKENS * TOKENS
    # The cut is a function of this row's length alone: min_split tokens, or 1/MAX_SPLITS of it.
    share = tl.cdiv(tl.cdiv(length - first, MAX_SPLITS), BLOCK_N) * BLOCK_N
    split_tokens = tl.maximum(share, min_split)
    num_splits = tl.maximum(tl.cdiv(length - first, split_tokens), 1)
    # Consecutive splits to a program, so that the whole batch makes about `slots` programs.
    tokens = _tokens_of_batch(seq_lens_ptr, window, rows, WINDOWED)
    wanted = tl.cdiv(tokens * NUM_KV_HEADS, slots * split_tokens.to(tl.int64)).to(tl.int32)
    per_lane = tl.maximum(wanted, tl.cdiv(num_splits, tl.num_programs(2)))
    first_split = lane * per_lane
    if first_split >= num_splits:
        return

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    in_head = g[:, None] * HEAD_DIM + d[None, :]
    row_head = row * NUM_KV_HEADS + head
    out_ptr += row_head * (GROUP * HEAD_DIM)
    partial_ptr += row_head * (MAX_SPLITS * GROUP * HEAD_DIM)
    lse_ptr += row_head * (MAX_SPLITS * GROUP)
    q = tl.load(
        q_ptr + row * stride_qt + head * (GROUP * HEAD_DIM) + in_head, mask=q_mask, other=0.0
    ).to(COMPUTE)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    if length == 0:  # a padding row of a captured graph
        tl.store(out_ptr + in_head, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    begin = first + first_split * split_tokens
    end = tl.minimum(begin + per_lane * split_tokens, length)
    # One loop over the tiles of all its splits: loads run ahead across the end of a split.
    for start in range(begin, end, BLOCK_N):
        acc, total, top = _attend_tile(
            q, acc, total, top, pages_ptr + layer_start + head * (TOKENS * HEAD_DIM),
            page_table_ptr + row * stride_table, start, end, low, page_elements, scale_log2,
            HEAD_DIM, BLOCK_D, NUM_KV_HEADS * TOKENS * HEAD_DIM, TOKENS, BLOCK_N, WINDOWED, COMPUTE,
        )  # fmt: skip
        after = start + BLOCK_N - first
        if (after % split_tokens == 0) | (start + BLOCK_N >= end):
            _store_split(
                out_ptr, partial_ptr, lse_ptr, acc, total, top, (after - 1) // split_tokens,
                num_splits, GROUP, BLOCK_G, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            top = tl.full([BLOCK_G], float("-inf"), tl.float32)

    if num_splits > 1:
        tl.debug_barrier()  # every thread's stores before the one thread's release
        mine = tl.minimum(per_lane, num_splits - first_split)
        arrived = mine
        if mine < num_splits:
            arrived += tl.atomic_add(arrived_ptr + row_head, mine, sem="acq_rel")
        if arrived == num_splits:
            tl.store(arrived_ptr + row_head, 0)  # ready for the next launch
            _combine(
                out_ptr, partial_ptr, lse_ptr, num_splits, GROUP, HEAD_DIM, BLOCK_D, MAX_SPLITS
            )


def decode_key(head_dim: int, group: int, itemsize: int) -> str:
    """Key of a tuned decode choice."""
    return f"d{head_dim}_g{group}_b{itemsize}"


def decode_choice(chip: Chip, head_dim: int, group: int, itemsize: int) -> dict[str, int]:
    """Tiles and splits; never a function of the batch, or a row's bits would depend on it."""
    tuned = tuned_table(chip, "paged_decode").get(decode_key(head_dim, group, itemsize))
    if tuned is not None:
        return dict(tuned)
    token_bytes = 2 * triton.next_power_of_2(head_dim) * itemsize
    # Two stages of K and V tiles, two programs to a multiprocessor where that leaves 32 tokens.
    fits = chip.shared_bytes // (2 * 2 * token_bytes)
    block_n = max(16, min(64, 1 << (fits.bit_length() - 1)))
    return {
        "BLOCK_N": block_n,
        "min_split": 128,
        "MAX_SPLITS": 32,
        "slots": 4 * chip.num_sms,
        "num_warps": 4,
        "num_stages": 2 if block_n * token_bytes * 3 > chip.shared_bytes // 2 else 3,
    }


def lanes_for(num_sequences: int, num_kv_heads: int, max_seq_len: int, min_split: int) -> int:
    """Programs that share one sequence and KV head: as many as it can have splits, within reason.

    At a captured graph's capacity most of them find no split and exit.
    """
    splits = max(1, -(-max_seq_len // min_split))
    return max(1, min(splits, MAX_PROGRAMS // max(1, num_sequences * num_kv_heads)))


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> torch.Tensor:
    """Arrival counters, zero between launches; one launch at a time per device uses them."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), (
        "call paged_attention once before capturing it in a graph"
    )
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def paged_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    batch: "AttentionBatch",
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    choice: dict[str, Any] | None = None,
) -> None:
    """Attention of the first `batch.num_decodes` rows of q [T, Hq, D], written to out in place."""
    rows, heads, head_dim = batch.num_decodes, q.shape[1], q.shape[2]
    group, itemsize = heads // num_kv_heads, q.element_size()
    assert rows * num_kv_heads <= MAX_COUNTERS and out.is_contiguous()
    if choice is None:
        chip = chip_of(q.device.index or 0) if q.is_cuda else Chip("", 90, 1)
        choice = decode_choice(chip, head_dim, group, itemsize)
    choice = dict(choice)
    slots, min_split = choice.pop("slots"), choice.pop("min_split")
    max_splits = choice["MAX_SPLITS"]
    capacity = min(batch.max_seq_len, batch.page_table.shape[1] * TOKENS_PER_PAGE)
    if sliding_window is not None:
        capacity = min(capacity, sliding_window + TOKENS_PER_PAGE)
    lanes = min(max_splits, lanes_for(rows, num_kv_heads, capacity, min_split))
    layer_elements = 2 * num_kv_heads * TOKENS_PER_PAGE * head_dim
    shape = (rows, num_kv_heads, max_splits, group)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    decode_kernel[(num_kv_heads, rows, lanes)](
        q,
        pool.view(q.dtype),
        out,
        partial,
        lse,
        _counters(q.device),
        batch.seq_lens,
        batch.page_table,
        q.stride(0),
        batch.page_table.stride(0),
        pool.shape[1] // itemsize,
        layer * layer_elements,
        scale * 1.4426950408889634,
        sliding_window or 0,
        rows,
        slots,
        min_split,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        TOKENS=TOKENS_PER_PAGE,
        WINDOWED=sliding_window is not None,
        COMPUTE=compute_type(q.dtype),
        **choice,
    )


def compute_type(dtype: torch.dtype) -> Any:
    """Operand type of the multiplies: the tensor's, or fp32 under the interpreter.

    The interpreter holds bf16 as its bit pattern and multiplies that.
    """
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


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
    keys, values = gather_kv(pages, table, first, seq_len)
    # The query heads of one KV head see the same keys, so they can stand where query tokens do.
    grouped = q.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.flatten(1, 2)

"""Which splits of which row a program of decode attention takes.

A row's context is cut into splits by its own length alone. The first program of every row and KV
head takes its first splits, all of them where the row is short: such a program reads no other
length. The splits of long rows are shared with further programs ("lanes" of a row), as many in all
as a launch has beyond the first ones; who takes what follows from all lengths, read on the device.
"""

import triton
import triton.language as tl


@triton.jit
def _cut(tokens, min_split, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of a split, and splits: a function of the row's length alone.

    Eight splits of one to two times `min_split` tokens, fewer of a shorter row, more of a longer.
    """
    share = tl.maximum(tl.cdiv(tokens, MAX_SPLITS), tl.minimum(tl.cdiv(tokens, 8), 2 * min_split))
    split_tokens = tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, min_split)
    return split_tokens, tl.maximum(tl.cdiv(tokens, split_tokens), 1)


@triton.jit
def span(length, window, TOKENS: tl.constexpr, WINDOWED: tl.constexpr):
    """First token that the row sees, and the start of its page."""
    low = length * 0
    if WINDOWED:
        low = tl.maximum(length - window, 0)
    return low, low // TOKENS * TOKENS


@triton.jit
def _program_tokens(
    seq_lens_ptr,
    window,
    rows,
    sharers,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Tokens that every row sees, and those of a program where `sharers` divide all of them."""
    row = tl.arange(0, BLOCK_B)
    length = tl.load(seq_lens_ptr + row, mask=row < rows, other=0)
    _, first = span(length, window, TOKENS, WINDOWED)
    tokens = length - first
    total = tl.minimum(tl.sum(tokens.to(tl.int64), 0), 2**31 - 2**20).to(tl.int32)
    return tokens, tl.cdiv(total, sharers)


@triton.jit
def _lanes(num_splits, split_tokens, wanted):
    """Programs that share a row's splits. Over all rows: fewer than `sharers` beyond the first."""
    return tl.cdiv(num_splits, tl.maximum(tl.cdiv(wanted, split_tokens), 1))


@triton.jit
def further_program(
    place,
    seq_lens_ptr,
    window,
    rows,
    sharers,
    min_split,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Row and lane of program `place` beyond the first of each row; BLOCK_B where none is left."""
    tokens, wanted = _program_tokens(seq_lens_ptr, window, rows, sharers, TOKENS, BLOCK_B, WINDOWED)
    split_tokens, num_splits = _cut(tokens, min_split, MAX_SPLITS, BLOCK_N)
    more = _lanes(num_splits, split_tokens, wanted) - 1
    passed = tl.cumsum(more, 0) <= place
    row = tl.sum(passed.to(tl.int32), 0)
    return row, 1 + place - tl.sum(tl.where(passed, more, 0), 0)


@triton.jit
def shares(
    tokens,
    seq_lens_ptr,
    window,
    rows,
    sharers,
    min_split,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Of a row that sees `tokens`: tokens of a split, splits, lanes, splits of a lane."""
    split_tokens, num_splits, lanes, per_lane = min_split, 1, 1, 1
    if tokens > min_split:  # a shorter row needs to know nothing of the others
        split_tokens, num_splits = _cut(tokens, min_split, MAX_SPLITS, BLOCK_N)
        _, wanted = _program_tokens(seq_lens_ptr, window, rows, sharers, TOKENS, BLOCK_B, WINDOWED)
        lanes = _lanes(num_splits, split_tokens, wanted)
        per_lane = tl.cdiv(num_splits, lanes)
    return split_tokens, num_splits, lanes, per_lane

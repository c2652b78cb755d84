"""The token of a truncated row, without a sort: device code of pick_tokens.

The maxima of runs of logits tell a value that nothing below can be kept: top_k's, the k-th largest
of them; top_p's, the one down to which their mass suffices. Only runs with a maximum that high are
read again, and the few logits above it are listed. Where the maxima do not tell, those above half
of them are listed, which nearly always suffices; else, or where they are too many, the row itself
is drawn from.

The token that would win without top_k and top_p is kept by them where too little is more likely.
Where it is not, which is as rare as what they cut off, it and all that is less likely are struck
out and the next one is drawn, until it is one that they keep.
"""

import triton
import triton.language as tl

from multilora_kernels.noise import exponential_of
from multilora_kernels.truncation import mass_of, weight_of


@triton.jit
def _key(x):
    """An int32 that grows with the float."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _between(low, high):
    """A float above `low` and at most `high`, half as far in the order of all floats."""
    low_key = _key(low).to(tl.int64)
    key = (low_key + (_key(high).to(tl.int64) - low_key + 1) // 2).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(low, high, above, pivot, count, k):
    """(low, high, how many are >= high) once it is known how many are >= pivot."""
    is_reached = count >= k
    is_lower = (is_reached == 0) & (pivot < high)
    low = tl.where(is_reached, tl.maximum(low, pivot), low)
    above = tl.where(is_lower, count, above)
    return low, tl.where(is_lower, pivot, high), above


@triton.jit
def _kth_of(x_ptr, length, peak, k, BLOCK: tl.constexpr):
    """(value, number): the k-th largest of `length` logits, at least k, and which of those that
    are equal to it.

    The value lies in [low, high), which three pivots a pass narrow: one in the middle of all floats
    between, so that no row takes more than 33 passes, two at thirds of the distance.
    """
    low = float("-inf")
    high = float("inf")
    above = 0  # how many are >= high
    value = peak
    pivot_a = peak
    pivot_b = peak
    pivot_c = peak
    is_open = True
    while is_open:
        count_a = tl.zeros((BLOCK,), tl.int32)
        count_b = tl.zeros((BLOCK,), tl.int32)
        count_c = tl.zeros((BLOCK,), tl.int32)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < length
            x = tl.load(x_ptr + at, mask=mask, other=float("-inf"))
            count_a += (mask & (x >= pivot_a)).to(tl.int32)
            count_b += (mask & (x >= pivot_b)).to(tl.int32)
            count_c += (mask & (x >= pivot_c)).to(tl.int32)
            inside = mask & (x >= low) & (x < high)
            least = tl.where(inside, tl.minimum(least, x), least)
            most = tl.where(inside, tl.maximum(most, x), most)
        lowest = tl.min(least, 0)
        highest = tl.max(most, 0)
        if lowest == highest:
            value = lowest
            is_open = False
        else:
            low = tl.maximum(low, lowest)
            low, high, above = _narrow(low, high, above, pivot_a, tl.sum(count_a, 0), k)
            low, high, above = _narrow(low, high, above, pivot_b, tl.sum(count_b, 0), k)
            low, high, above = _narrow(low, high, above, pivot_c, tl.sum(count_c, 0), k)
            end = tl.minimum(high, highest)
            pivot_a = _between(low, end)
            pivot_b = low + (end - low) * 0.3333
            pivot_c = low + (end - low) * 0.6667
    return value, k - above


@triton.jit
def _floor_of(peaks, inverse_temperature, target, by_count):
    """A value that `peaks` at or above it reach `target` by mass or, `by_count`, by number, near
    the largest such; -inf where all do not reach it."""
    peak = tl.max(peaks, 0)
    is_finite = peaks > float("-inf")
    add = tl.where(by_count, 1, mass_of(weight_of(peaks, peak, inverse_temperature)))
    add = tl.where(is_finite, add, 0)
    low = tl.min(tl.where(is_finite, peaks, peak), 0)
    high = peak
    is_reached = tl.sum(add, 0) >= target
    for _ in range(14):
        middle = low + (high - low) * 0.5
        is_enough = tl.sum(tl.where(peaks >= middle, add, 0), 0) >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return tl.where(is_reached, low, float("-inf"))


@triton.jit
def _collect(
    row_ptr,
    vocab,
    peaks,
    num_runs,
    peak,
    inverse_temperature,
    least,
    least_log,
    picked_runs_ptr,
    values_ptr,
    tokens_ptr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_PAD: tl.constexpr,
):
    """How many logits are `least` or more, and exp of `least_log` or more of the peak; the first
    LISTED of them and their tokens are written, in the order of tokens."""
    runs = tl.arange(0, RUNS_PAD)
    is_high = (peaks >= least) & ((peaks - peak) * inverse_temperature >= least_log)
    is_high &= runs < num_runs
    nth_high = tl.cumsum(is_high.to(tl.int32), 0) - 1
    tl.store(picked_runs_ptr + nth_high, runs, mask=is_high)
    num_high = tl.sum(is_high.to(tl.int32), 0)
    tl.debug_barrier()
    found = 0
    start = 0
    lane = tl.arange(0, BLOCK)
    while (start < num_high) & (found <= LISTED):
        nth = start + lane // RUN
        run = tl.load(picked_runs_ptr + nth, mask=nth < num_high, other=0)
        at = run * RUN + lane % RUN
        mask = (nth < num_high) & (at < vocab)
        x = tl.load(row_ptr + at, mask=mask, other=float("-inf"))
        wanted = mask & (x >= least) & ((x - peak) * inverse_temperature >= least_log)
        place = found + tl.cumsum(wanted.to(tl.int32), 0) - 1
        wanted_here = wanted & (place < LISTED)
        tl.store(values_ptr + place, x, mask=wanted_here)
        tl.store(tokens_ptr + place, at, mask=wanted_here)
        found += tl.sum(wanted.to(tl.int32), 0)
        start += BLOCK // RUN
    tl.debug_barrier()
    return found


@triton.jit
def _mass_of_k(x_ptr, length, peak, inverse_temperature, k, BLOCK: tl.constexpr):
    """The mass of the k most likely of `length` logits."""
    value, number = _kth_of(x_ptr, length, peak, k, BLOCK)
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < length, other=float("-inf"))
        mass += tl.where(x > value, mass_of(weight_of(x, peak, inverse_temperature)), 0)
    each = mass_of(weight_of(value, peak, inverse_temperature))
    return tl.sum(mass, 0) + number * each


@triton.jit
def _tokens_at(ids_ptr, at, mask, IS_LIST: tl.constexpr):
    if IS_LIST:
        return tl.load(ids_ptr + at, mask=mask, other=0x7FFFFFFF)
    else:
        return at


@triton.jit
def _sum_before(
    x_ptr,
    ids_ptr,
    length,
    peak,
    inverse_temperature,
    value,
    token,
    by_count,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of what comes before (value, token) in the order of likelihood: the mass or, `by_count`, how
    many."""
    before = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(0, length, BLOCK, num_stages=1 if IS_LIST else 3):
        at = start + tl.arange(0, BLOCK)
        mask = at < length
        x = tl.load(x_ptr + at, mask=mask, other=float("-inf"))
        tokens = _tokens_at(ids_ptr, at, mask, IS_LIST)
        add = mass_of(weight_of(x, peak, inverse_temperature))
        add = tl.where(by_count, 1, add)
        is_before = mask & ((x > value) | ((x == value) & (tokens < token)))
        before += tl.where(is_before, add, 0)
    return tl.sum(before, 0)


@triton.jit
def _winner_before(
    x_ptr,
    ids_ptr,
    length,
    peak,
    inverse_temperature,
    value,
    token,
    log_min_p,
    xor_word,
    odd_factor,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(value, token) of what is drawn from that which comes before (value, token) and within
    min_p."""
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_x = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < length
        x = tl.load(x_ptr + at, mask=mask, other=float("-inf"))
        tokens = _tokens_at(ids_ptr, at, mask, IS_LIST)
        keep = mask & ((x > value) | ((x == value) & (tokens < token)))
        keep &= (x - peak) * inverse_temperature >= log_min_p
        weight = weight_of(x, peak, inverse_temperature)
        share = tl.where(keep, weight / exponential_of(tokens, xor_word, odd_factor), -1.0)
        is_better = share > best  # the first of equal ones stays
        best = tl.where(is_better, share, best)
        best_x = tl.where(is_better, x, best_x)
        best_token = tl.where(is_better, tokens, best_token)
    is_winner = best == tl.max(best, 0)
    token = tl.min(tl.where(is_winner, best_token, 0x7FFFFFFF), 0)
    value = tl.max(tl.where(is_winner & (best_token == token), best_x, float("-inf")), 0)
    return value, token


@triton.jit
def _share_of(mass, top_p):
    """The smallest integer mass that reaches top_p of `mass`; at least 1."""
    exact = mass.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(whole, 1)


@triton.jit
def _draw_from(
    x_ptr,
    ids_ptr,
    length,
    numbers_ptr,
    integers_ptr,
    rows,
    peak,
    target,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token that is drawn from `length` logits: the first of them, struck out from the end,
    that less than `target` comes before."""
    inverse_temperature = tl.load(numbers_ptr)
    log_min_p = tl.load(numbers_ptr + rows)
    top_p = tl.load(numbers_ptr + 2 * rows)
    top_k = tl.load(integers_ptr)
    xor_word = tl.load(integers_ptr + rows)
    odd_factor = tl.load(integers_ptr + 2 * rows)
    by_count = top_k > 0
    if by_count & (top_p < 1):
        mass = _mass_of_k(x_ptr, length, peak, inverse_temperature, top_k, BLOCK)
        target = _share_of(mass, top_p)
        by_count = False
    value = float("-inf")
    token = 0x7FFFFFFF
    is_open = True
    while is_open:
        value, token = _winner_before(
            x_ptr, ids_ptr, length, peak, inverse_temperature, value, token, log_min_p, xor_word,
            odd_factor, IS_LIST, BLOCK,
        )  # fmt: skip
        before = _sum_before(
            x_ptr, ids_ptr, length, peak, inverse_temperature, value, token, by_count, IS_LIST,
            BLOCK,
        )  # fmt: skip
        is_open = before >= target
    return token


@triton.jit
def draw_truncated(
    row_ptr,
    vocab,
    numbers_ptr,
    integers_ptr,
    rows,
    peak,
    mass,
    peaks_ptr,
    num_runs,
    picked_runs_ptr,
    values_ptr,
    ids_ptr,
    LISTED: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_PAD: tl.constexpr,
):
    inverse_temperature = tl.load(numbers_ptr)
    log_min_p = tl.load(numbers_ptr + rows)
    top_p = tl.load(numbers_ptr + 2 * rows)
    top_k = tl.load(integers_ptr)
    has_top_k = top_k > 0
    has_top_p = top_p < 1
    runs = tl.arange(0, RUNS_PAD)
    peaks = tl.load(peaks_ptr + runs, mask=runs < num_runs, other=float("-inf"))
    # What the maxima of runs reach, the whole row reaches at the same value or above it.
    target = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    least = float("-inf")
    is_told = True
    if has_top_k | has_top_p:
        target = tl.where(has_top_k, top_k.to(tl.int64), _share_of(mass, top_p))
        least = _floor_of(peaks, inverse_temperature, target, has_top_k)
        is_told = least > float("-inf")
        if is_told == 0:
            least = _floor_of(peaks, inverse_temperature, num_runs // 2, True)
    # With both, top_p is a share of all that top_k keeps, whatever min_p says of it.
    least_log = tl.where(has_top_k & has_top_p, float("-inf"), log_min_p)
    found = LISTED + 1
    if (least > float("-inf")) | (least_log > float("-inf")):
        found = _collect(
            row_ptr, vocab, peaks, num_runs, peak, inverse_temperature, least, least_log,
            picked_runs_ptr, values_ptr, ids_ptr, LISTED, LIST_BLOCK, RUN, RUNS_PAD,
        )  # fmt: skip
    is_list = found <= LISTED
    # min_p alone may have ended the list, which then lacks nothing.
    is_told |= (least - peak) * inverse_temperature <= least_log
    if is_list & (is_told == 0):
        all_of_it = _sum_before(
            values_ptr, ids_ptr, found, peak, inverse_temperature, float("-inf"), 0x7FFFFFFF,
            has_top_k, True, LIST_BLOCK,
        )  # fmt: skip
        is_list = all_of_it >= target
    token = 0
    if is_list:
        token = _draw_from(
            values_ptr, ids_ptr, found, numbers_ptr, integers_ptr, rows, peak, target, True,
            LIST_BLOCK,
        )  # fmt: skip
    else:
        token = _draw_from(
            row_ptr, ids_ptr, vocab, numbers_ptr, integers_ptr, rows, peak, target, False,
            ROW_BLOCK,
        )  # fmt: skip
    return token

"""From logits to tokens in two launches, without a sort and without a look from the host.

    token[r] = argmax x[r]                                      greedy rows
    token[r] = argmax exp((x[r] - max x[r]) / T[r]) / noise     others, over what truncation keeps

logits  [R, V]  float32, each row contiguous
tokens  [R]     int64, 0 where the logits hold NaN or +inf, or nothing finite
told    [R]     int64, the same, -1 there

The first token wins where several are equal. noise.py has the noise, truncation.py what is kept.

One launch reads the logits, a program for every 4,096 of a row: its maximum and, of a row that
draws, the token that wins there, or of a truncated one the mass and the maxima of 128 logits each.
The second, a program a row, is done with most rows at once. For a truncated row the maxima tell a
value that nothing below can be kept: top_k's, the k-th largest of them; top_p's, the one down to
which their mass suffices. Only runs of 128 with a maximum that high are read again, and the few
logits above it are listed. Where the maxima do not tell, those above half of them are listed, which
nearly always suffices; else, or where they are more than 4,096, the row itself is drawn from.

Nothing is sorted: the token that would win without top_k and top_p is kept by them where too little
is more likely. Where it is not, which is as rare as what they cut off, it and all that is less
likely are struck out and the next one is drawn, until it is one that they keep.

Sums are of integers and everything else is a maximum, so a row's token has nothing to do with the
rows beside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import cdiv, chip_for, next_power_of_2, on_host
from multilora_kernels.noise import exponential_of, exponential_ref
from multilora_kernels.truncation import Cuts, keep_ref, kth_of, mass_of, weight_of

TILE = 4096  # logits of a program of the first launch
LISTED = 4096  # logits that are searched as a list of their own; more are searched in the row
RUN = 128  # logits that one maximum is kept of
RUNS = TILE // RUN

_NUMBERS = 3
_INTEGERS = 3


@dataclass(frozen=True)
class Draws:
    """How each row draws, in one int32 array [6, R] on the device.

    float32: 1 / temperature (0: greedy), log of min_p (-inf: none), top_p (1: none); int32: top_k
    (0: none), and the two words of the row's noise key.
    """

    packed: torch.Tensor
    is_truncated: bool  # some row has a top_k, a top_p or a min_p

    @property
    def numbers(self) -> torch.Tensor:
        """float32 [3, R]."""
        return self.packed[:_NUMBERS].view(torch.float32)

    @property
    def integers(self) -> torch.Tensor:
        """int32 [3, R]."""
        return self.packed[_NUMBERS:]


@dataclass(frozen=True)
class Picked:
    """The tokens of rows; see the module."""

    token_ids: torch.Tensor  # int64 [R]
    told: torch.Tensor  # int64 [R]

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Picked":
        """Room for `rows` tokens."""
        return cls(*torch.empty(2, rows, dtype=torch.int64, device=device).unbind(0))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.token_ids.nbytes + self.told.nbytes

    def first(self, rows: int) -> "Picked":
        """Those of the first `rows`."""
        return Picked(self.token_ids[:rows], self.told[:rows])


@triton.jit
def _is_truncated(numbers_ptr, integers_ptr, row, rows):
    return (
        (tl.load(numbers_ptr + rows + row) > float("-inf"))
        | (tl.load(numbers_ptr + 2 * rows + row) < 1)
        | (tl.load(integers_ptr + row) > 0)
    )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["integers_ptr"])
def scan_kernel(
    logits_ptr,
    stride,
    vocab,
    numbers_ptr,
    integers_ptr,
    rows,
    best_ptr,
    token_ptr,
    score_ptr,
    mass_ptr,
    peaks_ptr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    DRAWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    out = row * tl.num_programs(0) + tl.program_id(0)
    runs = tl.arange(0, TILE // RUN)
    at = tl.program_id(0) * TILE + runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = at < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=mask, other=float("-inf"))
    peaks = tl.max(x, 1)
    best = tl.max(peaks, 0)
    is_broken = tl.max(tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 1), 0) > 0
    tl.store(best_ptr + out, tl.where(is_broken, float("nan"), best))
    inverse_temperature = 0.0
    if DRAWS:
        inverse_temperature = tl.load(numbers_ptr + row)
    if inverse_temperature == 0:
        tl.store(token_ptr + out, tl.min(tl.min(tl.where(x == best, at, vocab), 1), 0))
    elif DRAWS:
        weight = weight_of(x, best, inverse_temperature)
        if _is_truncated(numbers_ptr, integers_ptr, row, rows):
            tl.store(mass_ptr + out, tl.sum(tl.sum(mass_of(weight), 1), 0))
            tl.store(peaks_ptr + out * (TILE // RUN) + runs, peaks)
        else:
            xor_word = tl.load(integers_ptr + rows + row)
            odd_factor = tl.load(integers_ptr + 2 * rows + row)
            share = weight / exponential_of(at, xor_word, odd_factor)
            score = tl.max(tl.max(share, 1), 0)
            tl.store(score_ptr + out, score)
            tl.store(token_ptr + out, tl.min(tl.min(tl.where(share == score, at, vocab), 1), 0))


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
def _share_of(mass, top_p):
    """The smallest integer mass that reaches top_p of `mass`; at least 1."""
    exact = mass.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(whole, 1)


@triton.jit
def _mass_of_k(x_ptr, length, peak, inverse_temperature, k, BLOCK: tl.constexpr):
    """The mass of the k most likely of `length` logits."""
    value, number = kth_of(x_ptr, length, peak, k, BLOCK)
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


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["integers_ptr", "out_ptr", "told_ptr"],
)
def settle_kernel(
    logits_ptr,
    stride,
    vocab,
    numbers_ptr,
    integers_ptr,
    rows,
    best_ptr,
    token_ptr,
    score_ptr,
    mass_ptr,
    peaks_ptr,
    tiles,
    picked_runs_ptr,
    values_ptr,
    ids_ptr,
    out_ptr,
    told_ptr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    LISTED: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TILES_PAD: tl.constexpr,
    DRAWS: tl.constexpr,
    TRUNCATES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_PAD)
    mask = tile < tiles
    best = tl.load(best_ptr + row * tiles + tile, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + row * tiles + tile, mask=mask, other=vocab)
    is_broken = tl.max((best != best).to(tl.int32), 0) > 0
    peak = tl.max(best, 0)
    is_finite = (is_broken == 0) & (peak > float("-inf"))
    picked = tl.min(tl.where(best == peak, token, vocab), 0)
    if DRAWS:
        inverse_temperature = tl.load(numbers_ptr + row)
        draws = is_finite & (inverse_temperature > 0)
        truncates = _is_truncated(numbers_ptr, integers_ptr, row, rows)
        scale = weight_of(best, peak, inverse_temperature)
        if draws & (truncates == 0):
            score = tl.load(score_ptr + row * tiles + tile, mask=mask, other=0.0) * scale
            picked = tl.min(tl.where(score == tl.max(score, 0), token, vocab), 0)
        if TRUNCATES:  # noqa: SIM102 - one at compile time, one on the device
            if draws & truncates:
                mass = tl.load(mass_ptr + row * tiles + tile, mask=mask, other=0)
                mass = tl.sum((mass.to(tl.float32) * scale).to(tl.int64), 0)
                picked = _draw_truncated(
                    logits_ptr + row * stride,
                    vocab,
                    numbers_ptr + row,
                    integers_ptr + row,
                    rows,
                    peak,
                    mass,
                    peaks_ptr + row * tiles * (TILE // RUN),
                    tiles * (TILE // RUN),
                    picked_runs_ptr + row * tiles * (TILE // RUN),
                    values_ptr + row * LISTED,
                    ids_ptr + row * LISTED,
                    LISTED,
                    LIST_BLOCK,
                    ROW_BLOCK,
                    RUN,
                    TILES_PAD * (TILE // RUN),
                )
    tl.store(out_ptr + row, tl.where(is_finite, picked, 0).to(tl.int64))
    tl.store(told_ptr + row, tl.where(is_finite, picked, -1).to(tl.int64))


@triton.jit
def _draw_truncated(
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


def pick_tokens(logits: torch.Tensor, draws: Draws | None, out: Picked | None = None) -> Picked:
    """The token of each row of logits float32 [R, V]; all rows greedy where `draws` is None.

    In `out` where that is given.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and (logits.stride(1) == 1 or vocab == 1)
    assert rows < 1 << 16  # the second grid dimension
    assert draws is None or (draws.packed.shape == (6, rows) and draws.packed.is_contiguous())
    if out is None:
        out = Picked.empty(rows, logits.device)
    if rows == 0:
        return out
    if on_host(logits.device):
        token_ids, told = pick_tokens_ref(logits, draws)
        out.token_ids.copy_(token_ids)
        out.told.copy_(told)
        return out
    _launch(logits, draws, out)
    return out


def launch_choice(vocab: int) -> dict[str, Any]:
    """Sizes and warps of both launches for rows of `vocab` logits."""
    tiles = cdiv(vocab, TILE)
    return {
        "tiles": tiles,
        "TILES_PAD": next_power_of_2(tiles),
        "scan_warps": 8,
        "LIST_BLOCK": 1024,
        "ROW_BLOCK": 2048,
        "warps": 16,
    }


def _launch(logits: torch.Tensor, draws: Draws | None, out: Picked) -> None:
    rows, vocab = logits.shape
    choice = launch_choice(vocab)
    tiles = choice["tiles"]
    pdl = chip_for(logits.device).has_pdl

    def scratch(count: int, dtype: torch.dtype, needed: bool) -> torch.Tensor:
        return torch.empty(rows * count if needed else 1, dtype=dtype, device=logits.device)

    truncates = draws is not None and draws.is_truncated
    best = scratch(tiles, torch.float32, True)
    token = scratch(tiles, torch.int32, True)
    score = scratch(tiles, torch.float32, draws is not None)
    mass = scratch(tiles, torch.int64, truncates)
    peaks = scratch(tiles * RUNS, torch.float32, truncates)
    numbers = best if draws is None else draws.numbers
    integers = token if draws is None else draws.integers
    common: dict[str, Any] = {"TILE": TILE, "RUN": RUN, "PDL": pdl, "launch_pdl": pdl}
    common["DRAWS"] = draws is not None
    scan_kernel[(tiles, rows)](
        logits, logits.stride(0), vocab, numbers, integers, rows, best, token, score, mass, peaks,
        num_warps=choice["scan_warps"], **common,
    )  # fmt: skip
    settle_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        numbers,
        integers,
        rows,
        best,
        token,
        score,
        mass,
        peaks,
        tiles,
        scratch(tiles * RUNS, torch.int32, truncates),
        scratch(LISTED, torch.float32, truncates),
        scratch(LISTED, torch.int32, truncates),
        out.token_ids,
        out.told,
        LISTED=LISTED,
        LIST_BLOCK=choice["LIST_BLOCK"],
        ROW_BLOCK=choice["ROW_BLOCK"],
        TILES_PAD=choice["TILES_PAD"],
        TRUNCATES=truncates,
        num_warps=choice["warps"] if truncates else 1,
        **common,
    )


def pick_tokens_ref(logits: torch.Tensor, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, told) in torch, also the path on a CPU. It looks at what it computes."""
    # max, whose indices come four times as fast as argmax on a CPU.
    best, tokens = logits.max(-1)
    if draws is not None:
        drawing = (draws.numbers[0] > 0).nonzero()[:, 0]
        if len(drawing) == len(logits):
            tokens = _draw_ref(logits, best, draws.numbers, draws.integers)
        elif len(drawing):
            tokens[drawing] = _draw_ref(
                logits[drawing],
                best[drawing],
                draws.numbers[:, drawing],
                draws.integers[:, drawing],
            )
    finite = best.isfinite()
    return tokens.masked_fill(~finite, 0), tokens.masked_fill(~finite, -1)


def _draw_ref(
    x: torch.Tensor, best: torch.Tensor, numbers: torch.Tensor, integers: torch.Tensor
) -> torch.Tensor:
    """The tokens of rows that draw, int64 [Q]."""
    peak, inverse_temperature = best[:, None], numbers[0][:, None]
    # Relative to the maximum first: a small temperature then gives 0, never NaN.
    share = ((x - peak) * inverse_temperature).exp_()
    share /= exponential_ref(integers[1:].T, x.shape[1])
    cuts = Cuts(integers[0], numbers[2], numbers[1])
    truncated = (cuts.top_k > 0) | (cuts.top_p < 1) | (cuts.log_min_p > -torch.inf)
    rows = truncated.nonzero()[:, 0]
    if len(rows):
        fewer = Cuts(*(each[rows] for each in cuts))
        keep = keep_ref(x[rows], peak[rows], inverse_temperature[rows], fewer)
        share[rows] = share[rows].masked_fill_(~keep, -1)
    return share.max(-1).indices

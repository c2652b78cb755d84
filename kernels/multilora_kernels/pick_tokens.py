"""From logits to tokens in two launches, without a sort and without a look from the host.

    token[r] = argmax x[r]                                      greedy rows
    token[r] = argmax exp((x[r] - max x[r]) / T[r]) / noise     others, over what truncation keeps

logits  [R, V]  float32, each row contiguous
tokens  [R]     int64, 0 where the logits hold NaN or +inf, or nothing finite
told    [R]     int64, the same, -1 there

The first token wins where several are equal. noise.py has the noise, truncation.py what is kept.

One launch reads the logits, a program for every 4,096 of a row: its maximum and, of a row that
draws, the token that wins there, or of a truncated one the mass and the maxima of 128 logits each.
The second, a program a row, is done with most rows at once; a truncated one is drawn by
truncated_draw.py.

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
from multilora_kernels.truncated_draw import draw_truncated
from multilora_kernels.truncation import Cuts, keep_ref, mass_of, weight_of

TILE = 4096  # logits of a program of the first launch
LISTED = 4096  # logits that are searched as a list of their own; more are searched in the row
RUN = 128  # logits that one maximum is kept of
RUNS = TILE // RUN

_NUMBERS = 3


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
                picked = draw_truncated(
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
    # Relative to the maximum first: a small temperature then gives 0, never NaN.
    relative = (x - best[:, None]).mul_(numbers[0][:, None])
    weight = relative.exp()
    share = weight / exponential_ref(integers[1:].T, x.shape[1])
    cuts = Cuts(integers[0], numbers[2], numbers[1])
    truncated = (cuts.top_k > 0) | (cuts.top_p < 1) | (cuts.log_min_p > -torch.inf)
    rows = truncated.nonzero()[:, 0]
    if len(rows) == len(x):
        share.masked_fill_(~keep_ref(x, relative, weight, cuts), -1)
    elif len(rows):
        fewer = Cuts(*(each[rows] for each in cuts))
        keep = keep_ref(x[rows], relative[rows], weight[rows], fewer)
        share[rows] = share[rows].masked_fill_(~keep, -1)
    return share.max(-1).indices

"""top_k, top_p and min_p: which tokens of a row may be drawn.

Tokens have one order: the more likely first, the smaller id first where two are equal.

top_k   the first k tokens of that order
top_p   of what is left, renormalised: the shortest beginning of the order whose mass reaches p
min_p   tokens at least min_p times as likely as the most likely one

Each is a beginning of the order, so together they are the shortest of the three. The most likely
token always stays.

Masses are integers, exp((x - maximum) / temperature) in units of 2^-40: their sum is the same in
whatever order, so what is kept depends on nothing but the row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_HEAD = 1024
"""Tokens that are sorted first. Sorting 16 x 49,152 logits takes 114 ms on one core, their top
1,024 take 16 ms, and those nearly always hold the mass that top_p asks for."""

UNIT = 2.0**40
_UNIT = tl.constexpr(UNIT)


@triton.jit
def weight_of(x, peak, inverse_temperature):
    """exp((x - peak) / temperature), 0 where x is -inf."""
    return tl.where(x > float("-inf"), tl.exp((x - peak) * inverse_temperature), 0.0)


@triton.jit
def mass_of(weight):
    """A weight of at most 1 in units of 2^-40."""
    return (weight * _UNIT).to(tl.int64)


class Cuts(NamedTuple):
    """What rows ask for, one entry for each."""

    top_k: torch.Tensor  # int32 [F]; 0: none
    top_p: torch.Tensor  # float32 [F]; 1: none
    log_min_p: torch.Tensor  # float32 [F]; -inf: none


def keep_ref(
    x: torch.Tensor, relative: torch.Tensor, weight: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Which tokens of x float32 [F, V] may be drawn, bool [F, V]: the reference in torch.

    `relative` is (x - maximum) / temperature and `weight` its exp, [F, V] both. It looks at what it
    computes, so on a device it waits.
    """
    likely = relative >= cuts.log_min_p[:, None]
    if not bool(((cuts.top_k > 0) | (cuts.top_p < 1)).any()):
        return likely
    mass = (weight * UNIT).long()
    head = min(_HEAD, x.shape[1])
    value, number, found = _cut_ref(x, mass, cuts, head)
    if head < x.shape[1]:
        # Rows whose cut lies beyond the head are sorted whole.
        rest = (~found).nonzero()[:, 0]
        if len(rest):
            fewer = Cuts(*(each[rest] for each in cuts))
            value[rest], number[rest], _ = _cut_ref(x[rest], mass[rest], fewer, x.shape[1])
    equal = x == value
    keep = (x > value) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= number))
    return keep & likely


def _cut_ref(
    x: torch.Tensor, mass: torch.Tensor, cuts: Cuts, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cut of each row, [F, 1] each, and whether the first `head` tokens tell it [F]."""
    values, tokens = x.topk(head) if head < x.shape[1] else x.sort(dim=-1, descending=True)
    masses = mass.gather(1, tokens)
    top_k, top_p = cuts.top_k[:, None], cuts.top_p[:, None]
    has_top_k, has_top_p = top_k > 0, top_p < 1
    left = ~has_top_k | (torch.arange(head, device=x.device) < top_k)
    total = torch.where(
        has_top_k, (masses * left).sum(-1, keepdim=True), mass.sum(-1, keepdim=True)
    )
    target = (top_p.double() * total.double()).ceil_().clamp_(min=1)
    kept = left & (~has_top_p | (masses.cumsum(-1) - masses < target))
    count = kept.sum(-1, keepdim=True)
    value = values.gather(1, (count - 1).clamp(min=0))
    number = count - (values > value).sum(-1, keepdim=True)
    has_none = ~(has_top_k | has_top_p)
    # NaN rows are told as found.
    found = torch.where(has_top_k, top_k <= head, count < head) | has_none | ~(total > 0)
    return value.masked_fill(has_none, -torch.inf), number, found[:, 0]

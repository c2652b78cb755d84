"""How far two distributions over the next token are apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multilora_cli.engine.messages import TokenLogprobs

# Tokens less likely than this in both are left out of the largest difference: no sampler reaches
# them, and their log-probabilities are where 16-bit rounding shows most.
_LIKELY = math.log(1e-6)


@dataclass(frozen=True)
class Agreement:
    """Over a number of positions: the largest difference of a log-probability, the mean KL
    divergence in nats, and the share of positions whose likeliest token is the same."""

    positions: int
    largest: float
    mean_kl: float
    top1: float

    def __add__(self, other: "Agreement") -> "Agreement":
        total = self.positions + other.positions
        share = self.positions / total if total else 0.0
        return Agreement(
            total,
            max(self.largest, other.largest),
            share * self.mean_kl + (1 - share) * other.mean_kl,
            share * self.top1 + (1 - share) * other.top1,
        )


NOTHING = Agreement(0, 0.0, 0.0, 1.0)


def compare(got: torch.Tensor, expected: torch.Tensor) -> Agreement:
    """Of log-probabilities fp32 [T, vocab]; KL is that of `got` from `expected`.

    A number that is not finite is an infinite difference, never an agreement.
    """
    if not len(expected):
        return NOTHING
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(expected.shape)}")
    likely = (got > _LIKELY) | (expected > _LIKELY)
    difference = torch.where(likely, (got - expected).abs(), 0.0)
    if not bool(got.isfinite().all()) or not bool(expected.isfinite().all()):
        return Agreement(len(got), math.inf, math.inf, 0.0)
    kl = (expected.exp() * (expected - got)).sum(-1)
    same = got.argmax(-1) == expected.argmax(-1)
    return Agreement(
        len(got), float(difference.max()), float(kl.clamp(min=0).mean()), float(same.float().mean())
    )


def largest_of_decoded(got: Sequence[TokenLogprobs], expected: torch.Tensor) -> float:
    """The largest difference over the tokens that an answer names; `expected` fp32 [T, vocab]."""
    largest = 0.0
    for said, row in zip(got, expected, strict=True):
        ids = torch.tensor([said.token_id, *said.top_ids])
        values = torch.tensor([said.logprob, *said.top_logprobs])
        wanted = row[ids]
        likely = (values > _LIKELY) | (wanted > _LIKELY)
        difference = torch.where(likely, (values - wanted).abs(), 0.0)
        if not bool(difference.isfinite().all()):
            return math.inf
        largest = max(largest, float(difference.max()))
    return largest

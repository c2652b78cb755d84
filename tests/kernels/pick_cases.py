"""Rows that truncation may get wrong, and what float64 says of the tokens that were picked."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from multilora_kernels.noise import exponential_ref, row_keys
from multilora_kernels.pick_tokens import Draws, Picked

# What fp32 may be off by: exp over 30 units of the exponent, and the noise.
ROUNDING = 1e-5


@dataclass(frozen=True)
class How:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def draws_of(rows: list[How], device: str = "cpu") -> Draws:
    """As the sampler packs them."""
    packed = np.zeros((6, len(rows)), dtype=np.int32)
    numbers = packed[:3].view(np.float32)
    for i, how in enumerate(rows):
        inverse = 1 / how.temperature if how.temperature else 0.0
        numbers[:, i] = inverse, math.log(how.min_p) if how.min_p else -math.inf, how.top_p
        packed[3, i] = how.top_k
    packed[4:] = row_keys([how.seed for how in rows], [3] * len(rows)).T
    cut = any(how.top_k or how.top_p < 1 or how.min_p for how in rows)
    return Draws(torch.from_numpy(packed).to(device), cut)


def kept(descending: np.ndarray, how: How, slack: float) -> int:
    """How many tokens of the order may be drawn; `slack` moves every mass that is asked for."""
    mass = np.exp((descending - descending[0]) / how.temperature)
    count = min(how.top_k, len(mass)) if how.top_k else len(mass)
    if how.top_p < 1:
        before = np.cumsum(mass[:count]) - mass[:count]
        target = np.float64(np.float32(how.top_p)) * mass[:count].sum() * (1 + slack)
        count = max(1, int((before < target).sum()))
    if how.min_p:
        count = min(count, max(1, int((mass >= how.min_p * (1 - slack)).sum())))
    return count


def assert_picked(logits: torch.Tensor, rows: list[How], picked: Picked) -> None:
    """Every token is one that the row's cut keeps, and the winner among those: in float64, up to
    what rounding may decide otherwise. Equal rows should follow one another: they are sorted once.
    """
    noise = exponential_ref(draws_of(rows).packed[4:].T, logits.shape[1]).double().numpy()
    told = picked.told.tolist()
    assert picked.token_ids.tolist() == [max(token, 0) for token in told]
    for i, (how, token) in enumerate(zip(rows, told, strict=True)):
        if i == 0 or not torch.equal(logits[i], logits[i - 1]):
            x = logits[i].double().numpy()
            order = np.argsort(-x, kind="stable")
            place = np.empty(len(x), dtype=np.int64)
            place[order] = np.arange(len(x))
        if not np.isfinite(x.max()):
            assert token == -1, i
        elif how.temperature == 0:
            assert token == int(x.argmax()), i
        else:
            share = np.exp((x - x.max()) / how.temperature) / noise[i]
            most, least = (kept(x[order], how, slack) for slack in (ROUNDING, -ROUNDING))
            assert place[token] < most, (i, how, most)
            assert share[token] >= share[order[:least]].max() * (1 - ROUNDING), (i, how)


def peaked(vocab: int, seed: int, top: float = 20.0) -> torch.Tensor:
    """A row as a trained model's: a few tokens hold nearly all of the mass."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(vocab, generator=generator) * 2
    x[torch.randperm(vocab, generator=generator)[:40]] += torch.linspace(top, top / 3, 40)
    return x


def row_kinds(vocab: int) -> dict[str, torch.Tensor]:
    """Rows by name."""
    generator = torch.Generator().manual_seed(vocab)
    flat = torch.randn(vocab, generator=generator) * 0.05
    normal = torch.randn(vocab, generator=generator) * 3
    steps = (normal * 2).round() / 2
    one = torch.full((vocab,), -math.inf)
    one[vocab // 3] = -7.0
    masked = peaked(vocab, 5)
    masked[torch.rand(vocab, generator=generator) < 0.9] = -math.inf
    wide = torch.linspace(-1e30, 1e30, vocab)
    return {
        "peaked": peaked(vocab, 1),
        "peaked over a broad rest": peaked(vocab, 2, top=10.0) - 40,
        "flat": flat,
        "normal": normal,
        "many equal": steps,
        "all equal": torch.full((vocab,), 2.5),
        "zeros of both signs": torch.zeros(vocab).where(normal > 0, torch.tensor(-0.0)),
        "one finite": one,
        "mostly masked": masked,
        "beyond exp": wide,
        "together at the end": torch.cat([normal[:-200], normal[-200:] + 20]),
    }


HOWS = [
    How(temperature=0.0),
    How(),
    How(temperature=0.7, top_p=0.95),
    How(top_p=0.5),
    How(top_p=1e-6),
    How(temperature=2.0, top_p=0.999),
    How(top_k=1),
    How(top_k=50),
    How(temperature=1.3, top_k=20, top_p=0.8),
    How(top_k=5000, top_p=0.9),
    How(temperature=1e-5, top_k=40, top_p=0.9),
    How(min_p=0.1),
    How(temperature=1.5, top_p=0.9, min_p=0.05),
    How(top_k=100, top_p=0.9, min_p=0.02),
    How(min_p=1.0),
]

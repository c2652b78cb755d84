"""Published workloads, generated exactly: who asks, how long, and when.

Draws follow the released generators number for number (same seeds, same order of draws), so that a
table made here compares with the published one. Lengths are in tokens, times in seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multilora_kernels.popularity import SHUFFLE_SEED, make_slots

SLORA_SEED = 42


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload; `adapter` counts from 0, None is the base."""

    adapter: int | None
    input_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class LengthLaw:
    """A log-normal clipped to [low, high] tokens."""

    mu: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """`count` lengths, int64."""
        lengths = np.exp(rng.normal(self.mu, self.sigma, count))
        return np.clip(np.rint(lengths), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Lengths:
    """Input and output laws of one kind of traffic; stand-ins, so their names end in -like."""

    input: LengthLaw
    output: LengthLaw


# Parameters solved so that the mean after clipping equals the published mean (means in the
# comments); the Azure rows are fits to the published traces.
LENGTHS: dict[str, Lengths] = {
    "sharegpt-like": Lengths(  # 246 / 235
        LengthLaw(4.950, 1.20, 4, 1024), LengthLaw(5.096, 0.90, 4, 1024)
    ),
    "sharegpt-like-2023": Lengths(  # 161 / 338
        LengthLaw(4.444, 1.20, 4, 1024), LengthLaw(5.514, 0.90, 4, 1024)
    ),
    "arena-like": Lengths(  # 85 / 165
        LengthLaw(3.897, 1.10, 1, 511), LengthLaw(4.841, 0.80, 1, 511)
    ),
    "alpaca-like": Lengths(  # 19.3 / 58.5
        LengthLaw(2.835, 0.50, 4, 512), LengthLaw(3.671, 0.90, 1, 512)
    ),
    "azure-conversation-like": Lengths(  # 1155 / 211
        LengthLaw(6.633, 0.985, 1, 4142), LengthLaw(5.019, 0.859, 1, 601)
    ),
    "azure-code-like": Lengths(  # 2048 / 27.9
        LengthLaw(6.999, 1.360, 1, 7436), LengthLaw(2.788, 0.847, 1, 251)
    ),
}


@dataclass(frozen=True)
class SLora:
    """A synthetic trace of S-LoRA's generator."""

    num_adapters: int
    alpha: float = 1.0  # 1: uniform; smaller concentrates on adapter 0
    rate: float = 2.0  # requests/s
    cv: float = 1.0  # coefficient of variation of the gaps
    duration_s: float = 300.0
    input_range: tuple[int, int] = (8, 512)  # upper bound exclusive
    output_range: tuple[int, int] = (8, 512)


# Rank lists of S-LoRA's settings, dealt round-robin to adapters.
SLORA_RANKS: dict[str, tuple[int, ...]] = {
    "S1": (8,),
    "S2": (64, 32, 16, 8),
    "S3": (16,),
    "S4": (64, 32, 16),
    "S5": (32,),
    "S6": (64,),
}


def slora_trace(setting: SLora) -> list[BenchRequest]:
    """S-LoRA's trace: adapters, inputs, outputs and gaps drawn in the released order.

    One Gamma process, as in the released code; the paper describes one for each adapter.
    """
    rng = np.random.RandomState(SLORA_SEED)
    count = int(setting.rate * setting.duration_s)
    adapters = (setting.num_adapters * rng.power(setting.alpha, count)).astype(np.int64)
    inputs = rng.randint(*setting.input_range, size=count)
    outputs = rng.randint(*setting.output_range, size=count)
    times = np.cumsum(rng.gamma(1 / setting.cv**2, setting.cv**2 / setting.rate, count))
    rows = zip(adapters, inputs, outputs, times, strict=True)
    requests = [BenchRequest(int(a), int(i), int(o), float(t)) for a, i, o, t in rows]
    return sorted(requests, key=lambda request: request.arrival_s)


def punica_trace(popularity: str, count: int = 1024, max_len: int = 2048) -> list[BenchRequest]:
    """Punica's text-generation set: log-normal prompts, totals uniform, all at once.

    Every request keeps its own adapter (the released script gives all decode rows the adapter of
    the newest request).
    """
    rng = np.random.Generator(np.random.PCG64(SHUFFLE_SEED))
    lengths = [_punica_lengths(rng, max_len) for _ in range(count)]
    adapters = make_slots(popularity, count, first_slot=0)
    return [
        BenchRequest(int(adapter), prompt, output)
        for adapter, (prompt, output) in zip(adapters, lengths, strict=True)
    ]


def _punica_lengths(rng: np.random.Generator, max_len: int) -> tuple[int, int]:
    prompt = float(np.clip(np.exp(0.8 * rng.standard_normal()) * 18 - 1, 1, max_len - 2))
    total = max(float(rng.integers(0, max_len)), prompt + 2)
    return int(prompt), int(total - prompt)


def arrivals(
    rng: np.random.Generator, count: int, rate: float | None, cv: float = 1.0
) -> npt.NDArray[np.float64]:
    """Arrival times of a Gamma process of `rate` requests/s; cv 1 is Poisson. float64 [count]."""
    if rate is None:
        return np.zeros(count)
    return np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, count))

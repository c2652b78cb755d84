"""What a benchmark case is, how it is timed, and what its figures are compared with.

An op is captured in a CUDA graph that walks over input sets of at least 128 MB together, so that
no set is still in the L2 when its turn comes again; a figure is the median of samples of about a
millisecond of graph replays. What an engine prepares once per step stays outside the timed part.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from multilora_kernels.launch import Chip

ROTATED_BYTES = 128 * 2**20  # twice the L2 of an H200, the largest of the cards named
MAX_SETS = 256
WARM_US = 20_000.0

Run = Callable[[int], object]  # runs the op once, on input set i


@dataclass(frozen=True)
class Ceiling:
    """What a chip was measured to reach: bytes read and multiplications done per second."""

    read_gbps: float
    tflops: Mapping[str, float]  # by operand type


# Measured: 4 GiB read; 4096^3 matrix products. A card that is not listed gets no bound.
CEILINGS: Mapping[str, Ceiling] = {
    "h200": Ceiling(4583.0, {"bf16": 777.0, "fp16": 777.0, "fp8": 1463.0}),
}


@dataclass(frozen=True)
class Built:
    """A case on a device: `num_sets` input sets, and the functions that run one of them.

    `variants` holds "ours" and the baselines beside it. `with_choice` returns ours under a given
    launch choice, for --tune.
    """

    num_sets: int
    variants: Mapping[str, Run]
    with_choice: Callable[[Mapping[str, Any]], Run] | None = None


@dataclass(frozen=True)
class Case:
    """One op at one shape, with the work that nothing can avoid.

    `bytes` counts each input once and each output once; `flops` what the formula multiplies and
    adds; `rate` names the operand type that bounds them. `choices` are the launch choices that
    --tune tries, kept in tuned/<chip>.json under op and `tune_key`; `compile` launches one of them
    once on a small input, so that processes side by side can compile them all beforehand.
    `only_tunes`: there is nothing to time outside of a search.
    """

    op: str
    shape: Mapping[str, int | str]
    bytes: float
    build: Callable[[torch.device], Built]
    flops: float = 0.0
    rate: str = "bf16"
    tune_key: str = ""
    choices: Sequence[Mapping[str, Any]] = field(default=())
    compile: Callable[[torch.device, Mapping[str, Any]], None] | None = None
    only_tunes: bool = False

    @property
    def label(self) -> str:
        """The shape in one line."""
        return " ".join(f"{name}={value}" for name, value in self.shape.items())

    def bound_us(self, chip: Chip) -> float | None:
        """The larger of the times the bytes and the operations need, in microseconds."""
        ceiling = CEILINGS.get(chip.key)
        if ceiling is None:
            return None
        by_bytes = self.bytes / ceiling.read_gbps / 1e3
        return max(by_bytes, self.flops / ceiling.tflops[self.rate] / 1e6)


def sets_needed(set_bytes: float) -> int:
    """Input sets of `set_bytes` that together exceed the L2; never more than 256."""
    return max(2, min(MAX_SETS, -(-ROTATED_BYTES // max(1, int(set_bytes)))))


def time_us(run: Run, num_sets: int, samples: int = 5, sample_us: float = 1000.0) -> list[float]:
    """Microseconds per call of `run`, one figure per sample, from replays of one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
        run(1 % num_sets)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_sets):
            run(index)
    # The first milliseconds after large allocations ran up to 12 % slow (H200): warm up past them.
    once = _elapsed_us(graph, 1)
    _elapsed_us(graph, max(1, round(WARM_US / max(1.0, once))))
    replays = max(1, round(sample_us / max(1.0, _elapsed_us(graph, 1))))
    figures = [_elapsed_us(graph, replays) / (replays * num_sets) for _ in range(samples)]
    graph.reset()
    return figures


def _elapsed_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def record_of(case: Case, chip: Chip, variant: str, figures: Sequence[float]) -> dict[str, Any]:
    """One JSON line: median and spread in microseconds, rates, and the share of the bound."""
    median = statistics.median(figures)
    bound = case.bound_us(chip)
    return {
        "op": case.op,
        "shape": dict(case.shape),
        "variant": variant,
        "us": round(median, 3),
        "us_min": round(min(figures), 3),
        "us_max": round(max(figures), 3),
        "gbps": round(case.bytes / median / 1e3, 1),
        "tflops": round(case.flops / median / 1e6, 2),
        "bound_us": None if bound is None else round(bound, 3),
        "share_of_bound": None if bound is None else round(bound / median, 3),
    }

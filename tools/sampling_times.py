"""Times layers.sampler on a GPU: a whole batch's sampling, launched as the engine launches it.

    python tools/sampling_times.py --output docs/benchmarks/sampling-h200.jsonl

A line for each number of rows and each way to sample: ms a call on the device's clock, one call
after another, ms that a call keeps the host, and ms to put the batch together. Logits are those of
a trained model in shape: about 7 of 128,256 tokens hold 0.95 of the mass.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from multilora_cli.engine.messages import SamplingParams
from multilora_cli.layers.sampler import SamplingBatch, SamplingRow, sample

VOCAB = 128_256
HISTORY = list(range(0, 128_000, 250))  # 512 tokens of a prompt
CALLS = 12
HOWS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=50": {"top_k": 50},
    "min_p=0.05": {"min_p": 0.05},
    "repetition_penalty=1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
}


def peaked(rows: int) -> torch.Tensor:
    """Logits float32 [rows, VOCAB]."""
    x = torch.randn(rows, VOCAB, device="cuda") * 2
    places = torch.randint(VOCAB, (rows, 40), device="cuda")
    ahead = torch.linspace(20, 20 / 3, 40, device="cuda")
    return x.scatter_add_(1, places, ahead.expand(rows, -1))


def rows_of(how: dict[str, float], count: int) -> list[SamplingRow]:
    """As many rows, each with a seed of its own."""
    params: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0} | how
    return [
        SamplingRow(SamplingParams(**params, seed=seed), HISTORY, HISTORY[:100])
        for seed in range(count)
    ]


def host_ms(work: Callable[[], object]) -> float:
    """Milliseconds of the host a call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - began) / CALLS * 1e3


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def times(logits: torch.Tensor, rows: list[SamplingRow]) -> dict[str, float]:
    """Milliseconds by what takes them."""

    def build() -> SamplingBatch:
        return SamplingBatch.build(rows, VOCAB, logits.device)

    batch = build()
    for _ in range(3):
        sample(logits, batch)
    begin, end = timing_event(), timing_event()
    built = host_ms(build)
    torch.cuda.synchronize()
    begin.record()
    launched = host_ms(lambda: sample(logits, batch))
    end.record()
    torch.cuda.synchronize()
    sampled = begin.elapsed_time(end) / CALLS
    figures = {"sample_ms": sampled, "host_ms": launched, "build_ms": built}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Every case to standard output and, as JSON lines, to --output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    arguments = parser.parse_args()
    described = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    environment = {
        "commit": arguments.commit or described.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "python tools/sampling_times.py",
    }
    for count in (1, 64, 256):
        logits = peaked(count)
        for name, how in HOWS.items():
            figures = times(logits, rows_of(how, count))
            shape = {"B": count, "V": VOCAB, "how": name, "logits": "peaked"}
            line = json.dumps({"op": "sample", "shape": shape, **figures, **environment})
            sys.stdout.write(line + "\n")
            if arguments.output is not None:
                with arguments.output.open("a") as lines:
                    lines.write(line + "\n")


if __name__ == "__main__":
    main()

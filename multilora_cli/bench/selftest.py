"""How fast the load generator itself is on this machine, against a server that only pretends."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from multilora_cli.bench.load import Load, LoadResult, PlannedRequest
from multilora_cli.bench.loadgen import run_load
from multilora_cli.bench.prompts import PromptMaker
from multilora_cli.bench.target import Target, raise_file_limit


@dataclass(frozen=True)
class SelfTest:
    """What the generator received and what it cost; `tokens_per_cpu_s` is its limit on a core."""

    streams: int
    peak_in_flight: int
    tokens: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    lag_p99_s: float
    errors: int


@asynccontextmanager
async def loopback_process(**options: object) -> AsyncIterator[str]:
    """The pretended server in a process of its own; gives its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "multilora_cli.bench.loopback", json.dumps(options),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is ours alone: we end it
    )  # fmt: skip
    try:
        port = (await process.stdout.readline()).decode().strip() if process.stdout else ""
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def self_test(streams: int = 2000, tokens: int = 100, gap_s: float = 0.1) -> SelfTest:
    """`streams` at once, each `tokens` long, one token every `gap_s`."""
    raise_file_limit()
    async with loopback_process(gap_s=gap_s) as url, Target(url) as target:
        requests = [PlannedRequest("a", "a", 16, tokens) for _ in range(streams)]
        result = await run_load(target, requests, Load(PromptMaker()))
    return _summary(streams, result)


def _summary(streams: int, result: LoadResult) -> SelfTest:
    tokens = sum(len(record.times_s) for record in result.records)
    cost = result.overhead
    return SelfTest(
        streams=streams,
        peak_in_flight=cost.peak_in_flight,
        tokens=tokens,
        tokens_per_s=tokens / max(result.duration_s, 1e-9),
        tokens_per_cpu_s=tokens / max(cost.cpu_s, 1e-9),
        lag_p99_s=cost.lag_p99_s,
        errors=sum(record.error is not None for record in result.records),
    )

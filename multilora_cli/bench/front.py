"""What our front process can do in a second of its own CPU: tokens streamed, requests taken."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from multilora_cli.bench.dummy_fleet import write_base
from multilora_cli.bench.load import Load, PlannedRequest
from multilora_cli.bench.loadgen import run_load
from multilora_cli.bench.prompts import PromptMaker, PromptStyle
from multilora_cli.bench.target import Target, raise_file_limit
from multilora_cli.errors import Refused


@dataclass(frozen=True)
class FrontTest:
    """What came through the front and what it cost there; a second of its CPU is its limit."""

    streams: int
    requests: int
    tokens: int
    errors: int
    duration_s: float
    tokens_per_s: float
    front_cpu_s: float
    front_system_s: float  # of it in the kernel: sending to the clients, most of all
    tokens_per_cpu_s: float
    requests_per_cpu_s: float
    front_share: float  # of a core, while the load ran
    client_cpu_s: float


@dataclass(frozen=True)
class FrontLoad:
    """What the front is asked to do: a new request for each that has ended."""

    streams: int  # at once
    requests: int
    prompt_tokens: int
    tokens: int  # of each answer
    style: PromptStyle
    gap_s: float  # between the engine's steps
    vocab_size: int
    profile: str | None = None  # where the front writes cProfile's figures


async def measure_front(command: Sequence[str], load: FrontLoad) -> FrontTest:
    """Put a load on a front; `command` starts one, told as JSON. Raises Refused."""
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="mlora-front-") as folder:
        base = write_base(Path(folder), "tiny", "none", load.vocab_size)
        told = {
            "base": str(base),
            "vocab_size": load.vocab_size,
            "gap_s": load.gap_s,
            "profile": load.profile,
        }
        async with _child([*command, json.dumps(told)]) as (pid, url), Target(url) as target:
            prompts = PromptMaker(load.style)
            request = PlannedRequest("base", None, load.prompt_tokens, load.tokens)
            await run_load(target, [request], Load(prompts))
            before = _cpu_s(pid)
            load_of_all = Load(prompts, concurrency=load.streams, salt=1)
            result = await run_load(target, [request] * load.requests, load_of_all)
            user_s, system_s = (a - b for a, b in zip(_cpu_s(pid), before, strict=True))
    cpu_s = user_s + system_s
    received = sum(record.output_tokens for record in result.records if record.error is None)
    return FrontTest(
        streams=load.streams,
        requests=load.requests,
        tokens=received,
        errors=sum(record.error is not None for record in result.records),
        duration_s=result.duration_s,
        tokens_per_s=received / max(result.duration_s, 1e-9),
        front_cpu_s=cpu_s,
        front_system_s=system_s,
        tokens_per_cpu_s=received / max(cpu_s, 1e-9),
        requests_per_cpu_s=load.requests / max(cpu_s, 1e-9),
        front_share=cpu_s / max(result.duration_s, 1e-9),
        client_cpu_s=result.overhead.cpu_s,
    )


@asynccontextmanager
async def _child(command: Sequence[str]) -> AsyncIterator[tuple[int, str]]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is ours alone: we end it
    )
    try:
        url = (await process.stdout.readline()).decode().strip() if process.stdout else ""
        if not url:
            raise Refused("the front process did not start")
        yield process.pid, url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def _cpu_s(pid: int) -> tuple[float, float]:
    """User and system seconds of a process and its threads so far. Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick

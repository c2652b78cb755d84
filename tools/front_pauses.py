"""How long the front's event loop is kept by replies about all adapters, by how many there are.

    python tools/front_pauses.py [--adapters 100,2000,10000] [--repeats 7]

Makes the application over that many registered adapters, all known to have been asked for, a third
on the device and a third in host memory; no engine runs. Asks for each reply while another task
counts the longest time between two of its turns. Prints one JSON line a path and number: the
longest pause (median and worst of the repeats), in milliseconds of this thread's CPU time, so that
other work on the machine does not count. Replies are taken by ASGI, without a socket.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.bench.dummy_fleet import write_base
from multilora_cli.bench.pretend_engine import pretend_spawn
from multilora_cli.engine.messages import AdapterStatus, Snapshot
from multilora_cli.server.app import create_app
from multilora_cli.server.client import EngineClient
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.front import Front
from multilora_cli.sizing.geometry import read_geometry

VOCABULARY = 2000
PATHS = ("/metrics", "/v1/models", "/v1/lora_adapters")
TIERS = ("hot", "warm", "stored")


def main() -> None:
    """Measure every number of adapters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", default="100,2000,10000")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = write_base(Path(folder), "tiny", "none", VOCABULARY)
        for count in map(int, arguments.adapters.split(",")):
            front = make_front(base, count)
            app = create_app(front)
            gc.collect()
            gc.freeze()  # as the server does once it is ready
            for path in PATHS:
                found = asyncio.run(measure(app, path, arguments.repeats))
                print(json.dumps({"kind": "pause", "adapters": count, "path": path, **found}))
            gc.unfreeze()
            front.close()


def make_front(base: Path, count: int) -> Front:
    """A front whose adapters were all used, and an engine that was heard of."""
    registry = Registry(ServedBase(read_geometry(base), "base"))
    config = ServerConfig(base_name="base", base_path=base, vocab_size=VOCABULARY)
    front = Front(config, registry, EngineClient(pretend_spawn(0.01, VOCABULARY)))
    for index in range(count):
        request = AdapterRequest(f"tenant-{index}/adapter", f"/srv/adapters/{index}")
        digest = f"{index:064x}"
        registry._entries.put(
            AdapterEntry(request, request.source, index, 0.0, digest=digest, rank=16)
        )
        tier: Any = TIERS[index % 3]
        status = AdapterStatus(digest, tier, 3, 27 * 10**6, 0, False, 1, 1, 5.0)
        front.client.statuses[digest] = status
        meter = front.metrics.meter(request.name, 200)
        meter.admitted(tier)
        for tokens in (1, 2):
            meter.tokens(tokens)
        meter.ended()
    front.client.snapshot = Snapshot(0, 1, 64, 60, 1, 0, 3, {"steps": 1.0}, {}, {}, [])
    return front


async def measure(app: ASGIApp, path: str, repeats: int) -> dict[str, float]:
    """Pauses of the loop while `path` is answered, and what it takes alone."""
    pauses, tooks = [], []
    size = await answer(app, path)
    for _ in range(repeats):
        pauses.append(await longest_pause(app, path))
        began_s = time.thread_time()
        await answer(app, path)
        tooks.append(time.thread_time() - began_s)
    return {
        "pause_ms": round(statistics.median(pauses) * 1e3, 2),
        "worst_pause_ms": round(max(pauses) * 1e3, 2),
        "cpu_ms": round(statistics.median(tooks) * 1e3, 2),
        "bytes": size,
    }


async def longest_pause(app: ASGIApp, path: str) -> float:
    """Seconds of this thread between two turns of another task, at most."""
    longest_s = 0.0

    async def beat() -> None:
        nonlocal longest_s
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    task = asyncio.create_task(beat())
    await asyncio.sleep(0.01)
    longest_s = 0.0
    await answer(app, path)
    await asyncio.sleep(0)
    task.cancel()
    return longest_s


async def answer(app: ASGIApp, path: str) -> int:
    """Bytes of a reply's body."""
    size = 0

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal size
        size += len(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "headers": [(b"host", b"127.0.0.1")], "query_string": b"", "root_path": "",
        "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    await app(scope, receive, send)
    return size


if __name__ == "__main__":
    main()

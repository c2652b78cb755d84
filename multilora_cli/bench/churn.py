"""Adapters that come and go while others are measured."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from multilora_cli.bench.target import Adapter, Served
from multilora_cli.errors import BadInput, MloraError

INTERVAL_S = 0.25


@dataclass(frozen=True)
class Mark:
    """One thing that was done to an adapter; times in seconds from the start of the pass."""

    kind: str  # replace | unload | load
    adapter: str
    time_s: float
    seconds: float
    error: str = ""


@asynccontextmanager
async def churning(
    target: Served, asked: Sequence[Adapter], others: Sequence[Adapter]
) -> AsyncIterator[list[Mark]]:
    """While the context lives: `asked` are replaced in place, `others` unloaded and loaded.

    Whatever is unloaded at the end is loaded again. Raises BadInput where the server refuses.
    """
    start = time.perf_counter()
    marks: list[Mark] = []
    await _probe(target, asked)
    task = asyncio.create_task(_churn(target, asked, others, (start, marks)))
    try:
        yield marks
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _restore(target, others)


async def reload(target: Served, adapters: Sequence[Adapter]) -> None:
    """Unload and load each of some adapters. Raises MloraError where the server refuses."""
    for adapter in adapters:
        path = _path(adapter)
        await _probe(target, (adapter,))
        await target.unload(adapter.name)
        await target.load(adapter.name, path)


async def evict(target: Served, adapters: Sequence[Adapter], *, cold: bool) -> None:
    """Move adapters to host memory, or out of it too. BadInput where the server has no route."""
    for adapter in adapters:
        try:
            await target.evict(adapter.name, cold=cold)
        except BadInput as error:
            raise BadInput(f"the server cannot evict on request: {error.message}") from None


async def _probe(target: Served, adapters: Sequence[Adapter]) -> None:
    """Refuse before anything is unloaded, not after."""
    for adapter in adapters[:1]:
        try:
            await target.load(adapter.name, _path(adapter), inplace=True)
        except BadInput as error:
            raise BadInput(
                f"the server refuses to load adapters: {error.message}",
                hint="mlora: server.adapter_roots, or an admin key; vLLM:"
                " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            ) from None


async def _churn(
    target: Served,
    asked: Sequence[Adapter],
    others: Sequence[Adapter],
    log: tuple[float, list[Mark]],
) -> None:
    turn = 0
    while True:
        replaced = asked[turn % len(asked)]
        moved = others[turn % len(others)]
        for kind, adapter in (("replace", replaced), ("unload", moved), ("load", moved)):
            await _act(target, kind, adapter, log)
            await asyncio.sleep(INTERVAL_S)
        turn += 1


async def _act(target: Served, kind: str, adapter: Adapter, log: tuple[float, list[Mark]]) -> None:
    start, marks = log
    began, error = time.perf_counter(), ""
    try:
        if kind == "unload":
            await target.unload(adapter.name)
        else:
            await target.load(adapter.name, _path(adapter), inplace=kind == "replace")
    except MloraError as failure:
        error = failure.message
    now = time.perf_counter()
    marks.append(Mark(kind, adapter.name, began - start, now - began, error))


async def _restore(target: Served, adapters: Sequence[Adapter]) -> None:
    names = (await target.fleet()).names
    for adapter in adapters:
        if adapter.name not in names:
            await target.load(adapter.name, _path(adapter))


def _path(adapter: Adapter) -> str:
    if adapter.path is None:
        raise BadInput(f"the server does not tell the path of {adapter.name}, so it cannot load it")
    return adapter.path

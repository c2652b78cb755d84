"""The load generator: streams to one server over HTTP, in a closed loop or at given times."""

import asyncio
import time
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from multilora_cli.bench.load import Load, LoadResult, PlannedRequest, RequestRecord, Tally
from multilora_cli.bench.prompts import PATHS
from multilora_cli.bench.stream import Answer, error_message
from multilora_cli.errors import reason_of

_TICK_S = 0.02  # how often the loop's own lag is sampled
_TELL_S = 0.25  # how often progress is told
_READY_MAX = 8192  # bodies made before a load starts; 250 us each
_CUT = "cut by the end of the load"  # not an error, so no record has it as one
_HEADERS = {"content-type": "application/json", "accept": "text/event-stream"}


class HttpTarget(Protocol):
    """Where a load is sent to (target.Target)."""

    url: str
    timeout_s: float

    @property
    def session(self) -> aiohttp.ClientSession: ...


class _Run(Tally):
    """A load on one server while it runs."""

    def __init__(self, target: HttpTarget, requests: Sequence[PlannedRequest], load: Load) -> None:
        super().__init__(requests, load)
        self.target = target
        self.lags = array("d")
        self._ready: dict[int, bytes] = {}
        if not load.open_loop:  # those that are sent at once would wait for each other's
            at_once = min(load.concurrency or _READY_MAX, len(requests), _READY_MAX)
            self._ready = {index: self.body(index) for index in range(at_once)}
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def body(self, index: int) -> bytes:
        """What is posted for a request, made now unless it is ready."""
        if (made := self._ready.pop(index, None)) is not None:
            return made
        request, load = self.requests[index], self.load
        tokens = request.input_tokens, request.output_tokens
        return msgspec.json.encode(load.prompts.body(request.model, *tokens, (load.salt, index)))

    @property
    def is_over(self) -> bool:
        return self.load.limit_s is not None and self.now() >= self.load.limit_s

    def until_end(self) -> asyncio.Timeout:
        """Ends what runs in it when the load ends."""
        limit_s = self.load.limit_s
        return asyncio.timeout(None if limit_s is None else max(limit_s - self.now(), 0.0))


async def run_load(
    target: HttpTarget, requests: Sequence[PlannedRequest], load: Load
) -> LoadResult:
    """Send every request and wait for every answer; a failed one is a record, never a raise.

    With `load.limit_s` only what can be sent by then is sent.
    """
    run = _Run(target, requests, load)
    cpu = time.process_time()
    watch = asyncio.create_task(_watch(run))
    try:
        await (_open_loop(run) if load.open_loop else _closed_loop(run))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    result = run.result(run.now(), time.process_time() - cpu, run.lags)
    run.tell(0.0)
    return result


async def _closed_loop(run: _Run) -> None:
    """Workers that send the next request as soon as their last one ended."""
    queue: Iterator[int] = iter(range(len(run.requests)))

    async def work() -> None:
        for index in queue:
            if run.is_over:
                return
            await _send(run, index, run.now())

    workers = min(run.load.concurrency or len(run.requests), len(run.requests))
    await _all(work() for _ in range(workers))


async def _open_loop(run: _Run) -> None:
    """One task a request, at its arrival time, whatever became of the others."""
    gate = asyncio.Semaphore(run.load.concurrency) if run.load.concurrency else None

    async def one(index: int, due: float) -> None:
        if gate is None:
            await _send(run, index, due)
            return
        async with gate:
            if not run.is_over:
                await _send(run, index, due)

    async with asyncio.TaskGroup() as group:
        order = sorted(range(len(run.requests)), key=lambda i: run.requests[i].arrival_s)
        for index in order:
            due = run.requests[index].arrival_s
            if run.load.limit_s is not None and due >= run.load.limit_s:
                return  # and so are all that follow
            if (wait := due - run.now()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(index, due))


async def _all(works: "Iterator[Coroutine[Any, Any, None]]") -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


async def _send(run: _Run, index: int, scheduled_s: float) -> None:
    raw = run.body(index)
    answer = Answer()
    run.begin()
    sent_s = run.now()
    if not run.load.open_loop:
        scheduled_s = sent_s  # making the prompt is ours, not the server's
    failure = await _stream(run, raw, answer)
    run.end(_record(run, index, answer, (scheduled_s, sent_s), failure))


async def _stream(run: _Run, raw: bytes, answer: Answer) -> tuple[str | None, str]:
    """Read one answer to its end; gives the kind of error and its words."""
    url = run.target.url + PATHS[run.load.prompts.style]
    try:
        async with (
            run.until_end() as limit,
            run.target.session.post(url, data=raw, headers=_HEADERS) as response,
        ):
            if response.status >= 400:
                return f"http_{response.status}", error_message(await response.read())
            async for data in response.content.iter_any():
                if pieces := answer.feed(data, run.now()):
                    run.events += pieces
    except TimeoutError:
        if limit.expired():
            return _CUT, ""
        return "timeout", f"no whole answer within {run.target.timeout_s:g} s"
    except aiohttp.ClientConnectorError as failure:
        return "unreachable", reason_of(failure)
    except (aiohttp.ClientError, OSError) as failure:
        return "cut_off", str(failure) or type(failure).__name__
    if answer.error is not None:
        return "stream_error", answer.error
    if not answer.done:
        return "cut_off", "the stream ended without [DONE] and without a finish reason"
    return None, ""


def _record(
    run: _Run,
    index: int,
    answer: Answer,
    times: tuple[float, float],
    failure: tuple[str | None, str],
) -> RequestRecord:
    request = run.requests[index]
    scheduled_s, sent_s = times
    error, detail = failure
    is_cut = error is _CUT
    error = None if is_cut else error
    if error is None and (other := _other_model(request, answer)) is not None:
        error, detail = "wrong_model", f"asked {request.model}, answered by {other}"
    counted = answer.output_tokens is not None
    output = len(answer.times_s) if answer.output_tokens is None else answer.output_tokens
    first = answer.times_s[0] if answer.times_s else None
    if error is None and first is None and not is_cut:
        first = run.now()  # tokens without any text: the end is the first sign of them
    if first is not None:
        run.first(first - scheduled_s)
    return RequestRecord(
        index=index,
        model=request.model,
        adapter=request.adapter,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        first_s=first,
        end_s=run.now(),
        times_s=array("d", answer.times_s),
        last_s=answer.last_s,
        input_tokens=request.input_tokens if answer.input_tokens is None else answer.input_tokens,
        output_tokens=output,
        cached_tokens=answer.cached_tokens or 0,
        counted=counted,
        error=error,
        detail=detail,
        is_cut=is_cut,
    )


def _other_model(request: PlannedRequest, answer: Answer) -> str | None:
    """The model that answered, where it is not the one that was asked.

    Servers may write the name as `base:adapter`, as a path, or with `@revision` behind it.
    """
    if answer.adapter is not None:
        return None if answer.adapter == request.adapter else answer.adapter
    if answer.model is None or answer.model.partition("@")[0] == request.model:
        return None
    if answer.model.endswith((f":{request.model}", f"/{request.model}")):
        return None
    return answer.model


async def _watch(run: _Run) -> None:
    """Sample the lag of our own event loop, and tell the progress."""
    told, tokens = run.now(), 0
    while True:
        before = run.now()
        await asyncio.sleep(_TICK_S)
        now = run.now()
        run.lags.append(max(now - before - _TICK_S, 0.0))
        if now - told >= _TELL_S:
            run.tell((run.events - tokens) / (now - told))
            told, tokens = now, run.events

"""The load generator: streams to one server, in a closed loop or at given times.

All times are seconds on the performance counter, counted from the start of the load. A request's
clock starts when it was due (open loop) or sent (closed loop), so that a client that cannot keep
up shows in the latency instead of hiding it; how late it was is reported as its own overhead.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec

from multilora_cli.bench.prompts import PATHS, PromptMaker
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


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request with the model it names; `adapter` None is the base."""

    model: str
    adapter: str | None
    input_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; `error` is a kind, `detail` the server's own words."""

    index: int
    model: str
    adapter: str | None
    scheduled_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    times_s: "array[float]"  # arrival of every piece of text
    last_s: float | None  # of the last token
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    counted: bool  # the server told its usage; otherwise pieces of text stand for tokens
    error: str | None = None
    detail: str = ""
    is_cut: bool = False  # the load ended before its answer did; not an error

    @property
    def ttft_s(self) -> float | None:
        """Due to first token."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Due to the end of the answer."""
        return self.end_s - self.scheduled_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between the tokens of this answer."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Overhead:
    """What the load generator itself cost and how late it ran."""

    cpu_s: float
    cpu_share: float  # of one core
    events: int
    us_per_event: float
    lag_p50_s: float  # of its event loop
    lag_p99_s: float
    late_p99_s: float  # sending after the scheduled time, open loop only
    peak_in_flight: int


@dataclass(frozen=True)
class LoadResult:
    """A record of every request that was sent, in their order, and the generator's own cost."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    overhead: Overhead


@dataclass(frozen=True)
class Progress:
    """Where a load is."""

    done: int
    total: int
    in_flight: int
    errors: int
    tokens_per_s: float
    ttft_s: float | None  # mean so far


@dataclass(frozen=True)
class Load:
    """How requests are sent. `concurrency` None: as many at once as are due."""

    prompts: PromptMaker
    concurrency: int | None = None
    open_loop: bool = False  # at their arrival times
    salt: int = 0  # of the prompts of this pass
    limit_s: float | None = None  # the load ends then, and what is in flight is cut
    tell: Callable[[Progress], None] | None = None


@dataclass
class _Run:
    """The state of one load while it runs."""

    target: HttpTarget
    requests: Sequence[PlannedRequest]
    load: Load
    ready: dict[int, bytes] = field(default_factory=dict)  # bodies made ahead, by request
    start: float = field(default_factory=time.perf_counter)
    records: dict[int, RequestRecord] = field(default_factory=dict)
    in_flight: int = 0
    peak: int = 0
    events: int = 0
    errors: int = 0
    ttft_sum_s: float = 0.0
    ttft_count: int = 0
    lags: "array[float]" = field(default_factory=lambda: array("d"))

    def now(self) -> float:
        return time.perf_counter() - self.start

    def body(self, index: int) -> bytes:
        """What is posted for a request, made now unless it is ready."""
        if (made := self.ready.pop(index, None)) is not None:
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
    if not load.open_loop:  # those that are sent at once would wait for each other's
        at_once = min(load.concurrency or _READY_MAX, len(requests), _READY_MAX)
        run.ready = {index: run.body(index) for index in range(at_once)}
        run.start = time.perf_counter()
    cpu = time.process_time()
    watch = asyncio.create_task(_watch(run))
    try:
        await (_open_loop(run) if load.open_loop else _closed_loop(run))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    records = tuple(run.records[index] for index in sorted(run.records))
    duration = duration_of(records, run.now(), load)
    _tell(run)
    overhead = _overhead(run, time.process_time() - cpu, duration)
    return LoadResult(records, duration, overhead)


def duration_of(records: Sequence[RequestRecord], now_s: float, load: Load) -> float:
    """How long a load took, `now_s` after its start: hanging up on what was cut is not in it."""
    if load.limit_s is None:
        return now_s
    return min(max([load.limit_s, *(record.end_s for record in records)]), now_s)


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
    run.in_flight += 1
    run.peak = max(run.peak, run.in_flight)
    if not run.load.open_loop:
        scheduled_s = run.now()  # making the prompt is ours, not the server's
    sent_s = run.now()
    try:
        error, detail = await _stream(run, raw, answer)
    finally:
        run.in_flight -= 1
    record = _record(run, index, answer, (scheduled_s, sent_s), (error, detail))
    run.records[index] = record
    run.errors += record.error is not None


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
        run.ttft_sum_s += first - scheduled_s
        run.ttft_count += 1
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
            _tell(run, (run.events - tokens) / (now - told))
            told, tokens = now, run.events


def _tell(run: _Run, tokens_per_s: float = 0.0) -> None:
    if run.load.tell is None:
        return
    ttft = run.ttft_sum_s / run.ttft_count if run.ttft_count else None
    done, total = len(run.records), len(run.requests)
    run.load.tell(Progress(done, total, run.in_flight, run.errors, tokens_per_s, ttft))


def _overhead(run: _Run, cpu_s: float, duration_s: float) -> Overhead:
    late = [record.sent_s - record.scheduled_s for record in run.records.values()]
    return Overhead(
        cpu_s=cpu_s,
        cpu_share=cpu_s / max(duration_s, 1e-9),
        events=run.events,
        us_per_event=1e6 * cpu_s / max(run.events, 1),
        lag_p50_s=_quantile(run.lags, 0.5),
        lag_p99_s=_quantile(run.lags, 0.99),
        late_p99_s=_quantile(late, 0.99) if run.load.open_loop else 0.0,
        peak_in_flight=run.peak,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 where nothing was seen."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

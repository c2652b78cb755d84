"""The load generator without HTTP: the same loads, put on an engine of this process.

Requests are handed over between two steps, as a server's messages are, and a token's time is when
the step that made it was done. Engine and generator share a thread, so what the generator takes is
taken from the engine: `Overhead.cpu_s` is the time that was spent outside of it.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from multilora_cli.bench.load import Load, LoadResult, PlannedRequest, RequestRecord, Tally
from multilora_cli.bench.offline import Engine
from multilora_cli.engine.messages import Abort, AdapterRef, Delta, Fault, SamplingParams, Submit
from multilora_cli.errors import Refused

_STUCK_S = 120.0  # without a delta for that long although something runs, something is wrong
_NAP_S = 0.0005  # while adapters load and nothing can run
_BREATH_S = 0.25  # how often the event loop has its turn and progress is told


@dataclass(frozen=True)
class EngineSide:
    """An engine, and what turns requests into messages for it."""

    engine: Engine
    refs: Mapping[str, AdapterRef]  # by name, of every adapter that is asked
    take_ids: Callable[[int], int]  # the first of so many request ids that nobody has used
    stop_ids: tuple[int, ...] = ()  # that end an answer, unless they are ignored


@dataclass(slots=True)
class _Answer:
    """A request that was submitted and has not ended."""

    index: int
    scheduled_s: float
    sent_s: float
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0


async def run_engine_load(
    side: EngineSide, requests: Sequence[PlannedRequest], load: Load
) -> LoadResult:
    """Submit every request and step until every answer has ended. Raises Refused where the
    engine stops although something is unanswered; a request that fails is a record."""
    run = _Run(side, requests, load)
    await run.to_end()
    return run.result(run.now(), run.outside_s())


class _Run(Tally):
    """A load on one engine while it runs. Prompts are made before its clock starts."""

    def __init__(self, side: EngineSide, requests: Sequence[PlannedRequest], load: Load) -> None:
        super().__init__(requests, load)
        self._side, self._engine = side, side.engine
        self._prompts = [_prompt(load, request, i) for i, request in enumerate(requests)]
        self._first_id = side.take_ids(len(requests))
        self._order = list(range(len(requests)))
        if load.open_loop:
            self._order.sort(key=lambda index: requests[index].arrival_s)
        self._next = 0  # place in the order
        self._open: dict[int, _Answer] = {}  # by request id
        self._inside_s = self._asleep_s = 0.0  # in the engine, and in nobody
        self._told = (0.0, 0)  # when progress was told, and events then
        self._start = self._progress_s = time.perf_counter()

    def now(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._start

    async def to_end(self) -> None:
        """Until everything has ended, or the load's time is over."""
        limit_s = self.load.limit_s
        while self._next < len(self._order) or self._open:
            if limit_s is not None and self.now() >= limit_s:
                self._cut()
                break
            self._submit_due()
            began = time.perf_counter()
            deltas = self._engine.step()
            self._engine.take_events()
            self._engine.take_replies()
            self._inside_s += time.perf_counter() - began
            if deltas:
                self._take(deltas)
                await self._breathe()
            else:
                await self._rest()
        self._tell()

    # ---- requests

    def _submit_due(self) -> None:
        most = self.load.concurrency or len(self._order)
        while self._next < len(self._order) and len(self._open) < most:
            index = self._order[self._next]
            if self.load.open_loop and self.requests[index].arrival_s > self.now():
                return
            self._next += 1
            self._submit(index)

    def _submit(self, index: int) -> None:
        request, side = self.requests[index], self._side
        stops = () if self.load.prompts.ignore_eos else side.stop_ids
        params = SamplingParams(
            max_tokens=request.output_tokens, temperature=0.0, stop_token_ids=stops
        )
        adapter = None if request.adapter is None else side.refs[request.adapter]
        prompt = self._prompts[index].tolist()
        sent = self.now()
        due = request.arrival_s if self.load.open_loop else sent
        self._open[self._first_id + index] = _Answer(index, due, sent)
        self.begin()
        self._engine.handle(Submit(self._first_id + index, prompt, params, adapter))

    # ---- answers

    def _take(self, deltas: Sequence[Delta]) -> None:
        now, self._progress_s = self.now(), time.perf_counter()
        for delta in deltas:
            answer = self._open.get(delta.request_id)
            if answer is None:
                continue
            if delta.token_ids:
                if not answer.times_s:
                    answer.cached_tokens = delta.cached_tokens
                    self.first(now - answer.scheduled_s)
                answer.times_s.extend([now] * len(delta.token_ids))
                self.events += len(delta.token_ids)
            if delta.finish_reason is not None or delta.fault is not None:
                del self._open[delta.request_id]
                self._end(answer, now, delta.fault)

    def _end(
        self, answer: _Answer, now: float, fault: Fault | None = None, *, is_cut: bool = False
    ) -> None:
        request, times = self.requests[answer.index], answer.times_s
        record = RequestRecord(
            index=answer.index,
            model=request.model,
            adapter=request.adapter,
            scheduled_s=answer.scheduled_s,
            sent_s=answer.sent_s,
            first_s=times[0] if times else None,
            end_s=now,
            times_s=times,
            last_s=times[-1] if times else None,
            input_tokens=request.input_tokens,
            output_tokens=len(times),
            cached_tokens=answer.cached_tokens,
            counted=True,
            error=None if fault is None else fault.code,
            detail="" if fault is None else fault.message,
            is_cut=is_cut,
        )
        self.end(record)

    def _cut(self) -> None:
        """End what is in flight, and let the engine come to rest."""
        now = self.now()
        for request_id, answer in self._open.items():
            self._engine.handle(Abort(request_id))
            self._end(answer, now, is_cut=True)
        self._open.clear()
        began = time.perf_counter()
        while self._engine.idle_wait_s is not None:
            self._engine.step()
            self._engine.take_events()
        self._inside_s += time.perf_counter() - began

    # ---- time

    async def _rest(self) -> None:
        """Let loaders work, or wait for the next request."""
        wait_s = self._engine.idle_wait_s
        if not self._open:
            due = self.requests[self._order[self._next]].arrival_s - self.now()
            ends = (self.load.limit_s or float("inf")) - self.now()
            await self._sleep(max(min(due, ends, _BREATH_S), 0.0))
            self._progress_s = time.perf_counter()
        elif wait_s is None or time.perf_counter() - self._progress_s > _STUCK_S:
            raise Refused("the engine has stopped, although not everything is answered")
        elif wait_s:
            await self._sleep(_NAP_S)

    async def _sleep(self, seconds: float) -> None:
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        self._asleep_s += time.perf_counter() - began

    async def _breathe(self) -> None:
        """Now and then: tell where the load is, and let Ctrl-C be heard."""
        if self.now() - self._told[0] >= _BREATH_S:
            self._tell()
            await asyncio.sleep(0)

    def _tell(self) -> None:
        now, (before, events) = self.now(), self._told
        self._told = (now, self.events)
        self.tell((self.events - events) / max(now - before, 1e-9))

    def outside_s(self) -> float:
        """What was spent outside the engine: the generator's own time, one thread having both."""
        return max(self.now() - self._inside_s - self._asleep_s, 0.0)


def _prompt(load: Load, request: PlannedRequest, index: int) -> npt.NDArray[np.int32]:
    """The prompt that a server would be sent, as token ids. int32 [input_tokens]."""
    key = (load.salt, index)
    body = load.prompts.body(request.model, request.input_tokens, request.output_tokens, key)
    return np.asarray(body["prompt"], dtype=np.int32)

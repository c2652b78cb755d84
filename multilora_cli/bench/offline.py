"""Drives an engine in this process as its own loop does, and says how long each step took.

A step is timed from the deltas of the one before to its own: what a client sees between two
tokens, whatever the engine does ahead or behind.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median
from typing import Literal, NamedTuple, Protocol

from multilora_cli.bench.quantile import nearest_rank
from multilora_cli.engine.messages import (
    Abort,
    AdapterEvent,
    AdapterRef,
    Delta,
    EvictAdapter,
    LoadAdapter,
    Reply,
    Snapshot,
    Submit,
    ToEngine,
)
from multilora_cli.errors import Refused

_STUCK_S = 120.0  # without a delta or a reply for that long, something is wrong
_HOST = "_seconds"  # how the engine's counters of time are spelled
_PROMPT = "prompt_"  # and once more of steps with prompts
_NAP_S = 0.0005  # while an adapter loads and nothing can run


class Engine(Protocol):
    """What the driver asks of an engine (engine.engine.Engine)."""

    @property
    def idle_wait_s(self) -> float | None: ...
    def handle(self, message: ToEngine) -> None: ...
    def step(self) -> list[Delta]: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> list[Delta]: ...
    def take_events(self) -> list[AdapterEvent]: ...
    def take_replies(self) -> list[Reply]: ...
    def snapshot(self) -> Snapshot: ...


class Turn(NamedTuple):
    """The deltas of one turn of the loop, and when they were there, in seconds."""

    at_s: float
    deltas: list[Delta]


@dataclass(frozen=True)
class Batch:
    """One batch from its submission to its last token. Times in seconds from submission."""

    size: int
    output_tokens: int  # of all requests
    turns: tuple[Turn, ...]
    grown: Mapping[str, float]  # what the engine's counters grew by

    @property
    def wall_s(self) -> float:
        """To the last token."""
        return self.turns[-1].at_s

    @property
    def first_tokens(self) -> list[float]:
        """When each request had its first token, in the order in which they had it."""
        seen: dict[int, float] = {}
        for turn in self.turns:
            for delta in turn.deltas:
                if delta.token_ids:
                    seen.setdefault(delta.request_id, turn.at_s)
        return list(seen.values())

    def decode_gaps(self) -> list[float]:
        """Steps in which all requests decode; where there is none, those that begin no answer."""
        last_first = self.first_tokens[-1]
        full = [
            later.at_s - earlier.at_s
            for earlier, later in pairwise(self.turns)
            if earlier.at_s >= last_first and len(later.deltas) == self.size
        ]
        return full or self._gaps_without_beginnings()

    def _gaps_without_beginnings(self) -> list[float]:
        begun: set[int] = set()
        gaps, before = [], 0.0
        for turn in self.turns:
            ids = {delta.request_id for delta in turn.deltas}
            if ids <= begun:
                gaps.append(turn.at_s - before)
            begun |= ids
            before = turn.at_s
        return gaps


class Driver:
    """The loop of the engine's process without the socket. One thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._calls = count(1)
        self._ids = 1

    def take_ids(self, number: int) -> int:
        """The first of `number` request ids that nobody has used."""
        first = self._ids
        self._ids += number
        return first

    def load(self, adapters: Sequence[AdapterRef]) -> float:
        """Make adapters hot; the seconds it took. Raises Refused where one is refused."""
        started = self._clock()
        names = {}
        for adapter in adapters:
            call = next(self._calls)
            names[call] = adapter.name
            self._engine.handle(LoadAdapter(call, adapter, hot=True))
        progress = started
        while names:
            self._engine.step()
            for reply in self._engine.take_replies():
                progress = self._clock()
                name = names.pop(reply.call_id)
                if reply.fault is not None:
                    raise Refused(f"adapter {name} cannot be loaded: {reply.fault.message}")
            if names:
                self._rest(progress)
        return self._clock() - started

    def run(self, submits: Sequence[Submit]) -> Batch:
        """Submit all at once and step until all ended. Raises Refused where one failed."""
        engine, clock = self._engine, self._clock
        before = engine.snapshot().counters
        started = progress = clock()
        for submit in submits:
            engine.handle(submit)
        turns: list[Turn] = []
        unfinished = len(submits)
        while unfinished:
            deltas = engine.step()
            if deltas:
                progress = clock()
                turns.append(Turn(progress - started, deltas))
                unfinished -= sum(delta.finish_reason is not None for delta in deltas)
            else:
                self._rest(progress)
            engine.take_events()
            engine.take_replies()
        return Batch(
            size=len(submits),
            output_tokens=_checked_tokens(submits, turns),
            turns=tuple(turns),
            grown=_grown(before, engine.snapshot().counters),
        )

    # ---- answers that go on while something else is measured (loading.py)

    def begin(self, submits: Sequence[Submit]) -> None:
        """Submit all, and step until each has its first token."""
        for submit in submits:
            self._engine.handle(submit)
        begun: set[int] = set()
        while len(begun) < len(submits):
            begun |= {delta.request_id for delta in self._step() if delta.token_ids}

    def steps(self, count: int) -> list[float]:
        """Seconds between the tokens of the next `count` steps."""
        gaps = []
        for _ in range(count):
            before = self._clock()
            self._step()
            gaps.append(self._clock() - before)
        return gaps

    def load_beside(self, adapter: AdapterRef) -> tuple[float, list[float]]:
        """Make an adapter hot while answers go on: the seconds until the first step that may use it
        was launched, and those between tokens meanwhile. Raises Refused."""
        call, started = next(self._calls), self._clock()
        hot_after: list[float] = []

        def look() -> None:
            for reply in self._engine.take_replies():
                if reply.fault is not None:
                    raise Refused(f"adapter {adapter.name} cannot be loaded: {reply.fault.message}")
                if reply.call_id == call:
                    hot_after.append(self._clock() - started)

        self._engine.handle(LoadAdapter(call, adapter, hot=True))
        gaps = []
        while not hot_after:
            before = self._clock()
            self._step(launched=look)
            gaps.append(self._clock() - before)
        return hot_after[0], gaps

    def arrive_beside(self, submit: Submit) -> list[float]:
        """Seconds between tokens of the others until a request that arrives has its first one,
        which is all that it asks for. Its id must be free again by then."""
        gaps = []
        self._engine.handle(submit)
        while True:
            before = self._clock()
            deltas = self._step(ends=submit.request_id)
            gaps.append(self._clock() - before)
            if any(delta.request_id == submit.request_id for delta in deltas):
                return gaps

    def evict(self, adapter: AdapterRef, to: Literal["warm", "cold"]) -> None:
        """Give the adapter's pages back, and with `cold` its image in host memory too."""
        call = next(self._calls)
        self._engine.handle(EvictAdapter(call, adapter.digest, to))
        while not any(reply.call_id == call for reply in self._engine.take_replies()):
            self._step()

    def cancel(self, submits: Sequence[Submit]) -> None:
        """End what `begin` began."""
        for submit in submits:
            self._engine.handle(Abort(submit.request_id))
        self._engine.step()  # tells that they have ended
        while self._engine.idle_wait_s is not None:
            self._engine.step()

    def _step(
        self, ends: int | None = None, launched: Callable[[], None] = lambda: None
    ) -> list[Delta]:
        """One step that has tokens; `launched` is called before they are awaited. Raises Refused
        when an answer other than `ends` ends."""
        started = self._clock()
        while True:
            self._engine.begin_step()
            launched()
            deltas = self._engine.end_step()
            self._engine.take_events()
            if any(d.finish_reason is not None and d.request_id != ends for d in deltas):
                raise Refused("an answer ended before what was to be measured beside it")
            if deltas:
                return deltas
            self._rest(started)

    def _rest(self, progress: float) -> None:
        """Let loaders work where no step can run."""
        wait_s = self._engine.idle_wait_s
        if wait_s is None or self._clock() - progress > _STUCK_S:
            raise Refused("the engine has stopped, although not everything is answered")
        if wait_s:
            time.sleep(_NAP_S)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def _checked_tokens(submits: Sequence[Submit], turns: Sequence[Turn]) -> int:
    """Output tokens of all; every request must have had exactly what it asked for."""
    found = dict.fromkeys((submit.request_id for submit in submits), 0)
    for turn in turns:
        for delta in turn.deltas:
            if delta.fault is not None:
                raise Refused(f"a request failed: {delta.fault.code}: {delta.fault.message}")
            found[delta.request_id] += len(delta.token_ids)
    for submit in submits:
        if found[submit.request_id] != submit.params.max_tokens:
            raise Refused(
                f"a request of {submit.params.max_tokens} tokens got {found[submit.request_id]}"
            )
    return sum(found.values())


@dataclass(frozen=True)
class Figures:
    """What a cell reports. Times in milliseconds; medians over steps, requests and rounds."""

    step_ms: float  # between tokens while every request decodes
    step_p99_ms: float
    steps: int  # that were timed
    rows: float  # mean tokens of all steps: below the batch where not all run at once
    output_tokens_per_s: float  # of a whole batch, prefill included
    decode_tokens_per_s: float  # batch / step_ms
    ttft_median_ms: float
    ttft_last_ms: float
    wall_s: float
    host_ms: Mapping[str, float]  # per step that only decodes, by the engine's counters of time
    prompt_host_ms: Mapping[str, float]  # per step with prompts
    adapter_evictions: int  # per batch: adapters that gave their pages to something else
    preemptions: int  # per batch


def _per_step(grown: "Counter[str]") -> dict[str, float]:
    """Milliseconds of every phase in a step, without what counts for steps with prompts alone."""
    steps = grown["steps"] - grown[f"{_PROMPT}steps"]
    return {
        key.removesuffix(_HOST): (seconds - grown[f"{_PROMPT}{key}"]) / max(steps, 1) * 1e3
        for key, seconds in grown.items()
        if key.endswith(_HOST) and not key.startswith(_PROMPT)
    }


def figures(batches: Sequence[Batch]) -> Figures:
    """The measured rounds of one cell. Raises Refused where no step can be timed."""
    gaps = sorted(gap for batch in batches for gap in batch.decode_gaps())
    if not gaps:
        raise Refused("no decode step to time: ask for more output tokens")
    firsts = [batch.first_tokens for batch in batches]
    turns = [turn for batch in batches for turn in batch.turns]
    grown: Counter[str] = Counter()
    for batch in batches:
        grown.update(batch.grown)
    step = median(gaps)
    return Figures(
        step_ms=step * 1e3,
        step_p99_ms=nearest_rank(gaps, 0.99) * 1e3,
        steps=len(gaps),
        rows=sum(len(turn.deltas) for turn in turns) / len(turns),
        output_tokens_per_s=median(batch.output_tokens / batch.wall_s for batch in batches),
        decode_tokens_per_s=batches[0].size / step,
        ttft_median_ms=median(time_s for times in firsts for time_s in times) * 1e3,
        ttft_last_ms=median(times[-1] for times in firsts) * 1e3,
        wall_s=median(batch.wall_s for batch in batches),
        host_ms=_per_step(grown),
        prompt_host_ms=_per_step(
            Counter(
                {
                    key.removeprefix(_PROMPT): value
                    for key, value in grown.items()
                    if key.startswith(_PROMPT)
                }
            )
        ),
        adapter_evictions=round(grown["adapter_evictions"] / len(batches)),
        preemptions=round(grown["preemptions"] / len(batches)),
    )

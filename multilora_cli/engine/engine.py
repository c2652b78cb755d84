"""The loop: between steps adapters move and requests come and go; a step is decided, run, told.

On a CUDA device the loop is one step ahead: it decides and launches a step while the one before
still runs, and only then waits for that one's tokens. What the next step needs of them stays on the
device (engine.sequence). A sequence that turns out to have ended has then been computed once too
often, and that result is dropped.
"""

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import msgspec

from multilora_cli.adapters.lease import Done, Standing, State, tier_of
from multilora_cli.adapters.residency import Residency
from multilora_cli.engine.answers import Answers
from multilora_cli.engine.batch_plan import RowResult, ScheduledBatch
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.messages import (
    Abort,
    AdapterEvent,
    AdapterStatus,
    Delta,
    Drain,
    EvictAdapter,
    Fault,
    LoadAdapter,
    Query,
    Ready,
    Reply,
    Snapshot,
    Submit,
    ToEngine,
)
from multilora_cli.engine.phases import PhaseTimes
from multilora_cli.engine.scheduler import Scheduler
from multilora_cli.engine.sequence import Sequence, Status
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.page_pool import PagePool, PageUse
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS, PrefixCache, root_key
from multilora_cli.sizing.pages import pages_for_tokens

_log = logging.getLogger(__name__)

# Weights of the base that work beside the steps walks between two of them: about 0.2 ms of an H200,
# so that the DoRA adapter of an 8B takes 200 steps; and where no step waits for it.
_WEIGHTS_BESIDE = 2**25
_WEIGHTS_IDLE = 2**28
_LEARN_TOKENS = 128  # a smaller step says more about its overhead than about its tokens


class Flight(Protocol):
    """A step that was handed to the device."""

    def results(self) -> tuple[RowResult, ...]:
        """Wait for its end; one result per row, in order."""
        ...


class Runner(Protocol):
    """What the engine asks of a model (model_runner.ModelRunner)."""

    def launch(self, batch: ScheduledBatch) -> Flight:
        """Hand a step to the device, behind those before it."""
        ...


@dataclass(frozen=True)
class _Launched:
    """A step under way: its number at the pool's clock, and when it was launched."""

    number: int
    batch: ScheduledBatch
    flight: Flight
    at: float


@dataclass(frozen=True)
class EngineParts:
    """The owners of the engine's state, put together by assemble.build_engine or by a test."""

    config: EngineConfig
    base_digest: str
    max_model_len: int
    vocab_size: int
    pool: PagePool
    prefixes: PrefixCache | None
    kv: KVCache
    residency: Residency
    scheduler: Scheduler
    runner: Runner
    ready: Ready
    failpoints: Failpoints
    now: Callable[[], float] = time.monotonic
    loaders: ThreadPoolExecutor | None = None
    steps_ahead: int = 0  # steps that are launched before the oldest one's tokens are awaited
    # Work of loads between two steps (BaseRows.advance); its argument is how much of it.
    beside: Callable[[int], None] | None = None


class Engine:
    """Takes messages, makes steps, gives deltas, events and replies. One thread."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._answers = Answers(parts.scheduler, parts.kv)
        self._arrivals = 0
        self._refused: list[Delta] = []
        self._replies: list[Reply] = []
        self._drain_at: float | None = None
        self._under_way: deque[_Launched] = deque()
        self._ahead = 0  # steps that the present turn leaves under way
        self._landed_at = 0.0
        self._phases = PhaseTimes()

    # ---- the loop

    def step(self) -> list[Delta]:
        """One turn of the loop; the deltas it produced."""
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Decide the next step and hand it to the device. What adapters became of it is known."""
        parts, phases = self.parts, self._phases
        phases.start()
        parts.residency.poll()
        batch = parts.scheduler.schedule()
        if batch.rows:
            phases.end("schedule", prompts=batch.has_prompts)
            self._launch(batch)
            phases.end("launch", prompts=batch.has_prompts)
        self._ahead = parts.steps_ahead if batch.rows else 0
        if parts.beside is not None:
            parts.beside(_WEIGHTS_BESIDE if batch.rows else _WEIGHTS_IDLE)
            if batch.rows:
                phases.end("beside", prompts=batch.has_prompts)

    def end_step(self) -> list[Delta]:
        """Wait for the oldest step, or all where none was launched; the deltas of the turn."""
        parts = self.parts
        deltas: list[Delta] = []
        while len(self._under_way) > self._ahead:
            deltas += self._land()
        if self._drain_at is not None and parts.now() >= self._drain_at:
            self._end_all(Fault("server_shutting_down", "the server is shutting down", 5.0))
        if parts.config.debug:
            self.check_integrity()
        return deltas + self._take_refused() + parts.scheduler.take_ended()

    def _launch(self, batch: ScheduledBatch) -> None:
        parts = self.parts
        parts.failpoints.hit("step")
        number, at = parts.pool.clock.launch(), time.perf_counter()
        flight = parts.runner.launch(batch)
        parts.kv.copies_launched()
        parts.scheduler.launched(batch)
        self._under_way.append(_Launched(number, batch, flight, at))

    def _land(self) -> list[Delta]:
        """Wait for the oldest step and tell what it produced."""
        step, phases = self._under_way.popleft(), self._phases
        prompts = step.batch.has_prompts
        phases.start()
        results = step.flight.results()
        phases.end("wait", prompts=prompts)
        # What the steps that ended could still read may be overwritten now.
        self.parts.pool.clock.complete(step.number)
        landed_at = time.perf_counter()
        took_s = landed_at - max(step.at, self._landed_at)
        self._landed_at = landed_at
        phases.step(took_s, prompts=prompts)
        self._learn_cost(step.batch, took_s)
        deltas = self._answers.take(step.batch, results)
        phases.end("answer", prompts=prompts)
        return deltas

    def _learn_cost(self, batch: ScheduledBatch, step_s: float) -> None:
        """What a cached block is worth follows from how fast prompts are computed here."""
        prefixes = self.parts.prefixes
        if prefixes is not None and batch.num_tokens >= _LEARN_TOKENS:
            block_s = step_s * BLOCK_TOKENS / batch.num_tokens
            prefixes.block_s += 0.1 * (block_s - prefixes.block_s)

    @property
    def idle_wait_s(self) -> float | None:
        """How long the loop may wait for messages before the next step; None: until one comes."""
        if self.parts.scheduler.num_running or self._under_way:
            return 0.0
        if self.parts.residency.busy():
            return 0.001
        has_work = self.parts.scheduler.has_work or self.parts.residency.has_work
        if has_work or self._refused:
            return 0.005
        return self.parts.residency.prefetch.wait_s

    @property
    def drained(self) -> bool:
        """Whether a drain was asked for and nothing is left to do."""
        busy = self.parts.scheduler.has_work or self._under_way
        return self._drain_at is not None and not busy

    # ---- messages

    def handle(self, message: ToEngine) -> None:
        """Take one message in; what comes of it appears in later steps and replies."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self.parts.scheduler.abort(message.request_id)
        elif isinstance(message, LoadAdapter):
            self._load(message)
        elif isinstance(message, EvictAdapter):
            cold = message.to == "cold"
            self.parts.residency.evict(
                message.call_id, message.digest, cold=cold, unpin=message.unpin,
                purge=message.purge_cache,
            )  # fmt: skip
        elif isinstance(message, Query):
            self._replies.append(Reply(message.call_id, snapshot=self.changes()))
        elif isinstance(message, Drain):
            self._drain_at = self.parts.now() + message.deadline_s

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on a loader thread, whenever a load ends."""
        self.parts.residency.on_loaded = wake

    def take_replies(self) -> list[Reply]:
        """Replies to calls that are answered."""
        replies, self._replies = self._replies, []
        return replies + [_reply(done) for done in self.parts.residency.reports.take_done()]

    def take_events(self) -> list[AdapterEvent]:
        """Adapters that changed their tier."""
        return [AdapterEvent(_status(s)) for s in self.parts.residency.reports.take_events()]

    def _load(self, message: LoadAdapter) -> None:
        self._arrivals += 1
        self.parts.residency.load(
            message.call_id,
            message.adapter,
            self.parts.scheduler.fair.present(self._arrivals),
            hot=message.hot,
            pin=message.pin,
            priority=message.priority,
        )

    def _submit(self, message: Submit) -> None:
        if self.parts.scheduler.knows(message.request_id):
            _log.error("request id %d is in use: ignored", message.request_id)
            return
        fault = self._objection(message)
        if fault is not None:
            self._refused += [
                Delta(message.request_id, index, [], finish_reason="error", fault=fault)
                for index in range(max(message.n, 1))
            ]
            return
        self.parts.scheduler.add([self._sequence(message, index) for index in range(message.n)])

    def _objection(self, message: Submit) -> Fault | None:
        """Why a request cannot be admitted at all."""
        parts, prompt = self.parts, message.prompt
        if self._drain_at is not None:
            return Fault("server_shutting_down", "the server is shutting down", 5.0)
        if parts.scheduler.num_waiting + message.n > parts.config.max_queue:
            return Fault("server_is_overloaded", "the engine's queue is full", 1.0)
        if not prompt or message.n < 1 or message.params.max_tokens < 0:
            return Fault("invalid_value", "a request needs a prompt and at least one answer")
        if min(prompt) < 0 or max(prompt) >= parts.vocab_size:
            return Fault("invalid_value", f"token ids must be below {parts.vocab_size}")
        longest = min(len(prompt) + message.params.max_tokens, parts.max_model_len)
        if len(prompt) + (message.params.max_tokens > 0) > parts.max_model_len:
            return Fault(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the context holds {parts.max_model_len}",
            )
        if pages_for_tokens(max(longest - 1, len(prompt))) > parts.pool.usable:
            return Fault(
                "context_length_exceeded",
                f"{longest} tokens of prompt and answer do not fit into the"
                f" {parts.pool.usable} pages of 16 tokens that there are",
            )
        return None

    def _sequence(self, message: Submit, index: int) -> Sequence:
        parts, adapter, params = self.parts, message.adapter, message.params
        self._arrivals += 1
        digest = adapter.digest if adapter is not None else ""
        if index:
            params = msgspec.structs.replace(params, seed=(params.seed + index) % 2**63)
        sequence = Sequence(
            seq_id=self._arrivals,
            request_id=message.request_id,
            index=index,
            order=0,
            params=params,
            tokens=array("i", message.prompt),
            prompt_len=len(message.prompt),
            max_len=min(len(message.prompt) + params.max_tokens, parts.max_model_len),
            root=root_key(parts.base_digest, digest, message.cache_salt),
            stop_ids=frozenset(params.stop_token_ids),
            share=parts.scheduler.fair.share_of(message.tenant, digest),
            weight=message.weight,
            adapter=adapter,
        )
        parts.scheduler.place(sequence)
        if adapter is not None:
            sequence.lease = parts.residency.lease(adapter, sequence.order)
        return sequence

    def _end_all(self, fault: Fault) -> None:
        for sequence in self.parts.scheduler.sequences():
            if sequence.status is not Status.FINISHED:
                self.parts.scheduler.end(sequence, "error", fault)

    def _take_refused(self) -> list[Delta]:
        refused, self._refused = self._refused, []
        return refused

    # ---- looking in

    def snapshot(self) -> Snapshot:
        """Counters and residency at this moment."""
        return self._snapshot(self.parts.residency.reports.standings(), [])

    def changes(self) -> Snapshot:
        """The same, but of adapters only what changed since the last call."""
        return self._snapshot(*self.parts.residency.reports.take_changes())

    def _snapshot(self, adapters: list[Standing], gone: list[str]) -> Snapshot:
        parts, pool = self.parts, self.parts.pool
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for sequence in parts.scheduler.sequences():
            if sequence.adapter is not None:
                where = running if sequence.status is Status.RUNNING else waiting
                where[sequence.owner] += 1
        return Snapshot(
            waiting=parts.scheduler.num_waiting,
            running=parts.scheduler.num_running,
            pages_total=pool.usable,
            pages_free=pool.count(PageUse.FREE) + pool.count(PageUse.FENCED),
            pages_kv=pool.count(PageUse.KV),
            pages_cached=pool.count(PageUse.CACHED),
            pages_adapters=pool.count(PageUse.ADAPTER),
            counters=self._counters(),
            running_adapters=dict(running),
            waiting_adapters=dict(waiting),
            waits=dict(parts.scheduler.waits.waiting),
            wait_seconds=dict(parts.scheduler.waits.seconds),
            adapters=[_status(standing) for standing in adapters],
            gone=gone,
        )

    def _counters(self) -> dict[str, float]:
        parts = self.parts
        return {
            **self._phases.counters(),
            "prompt_tokens": self._answers.prompt_tokens,
            "cached_tokens": self._answers.cached_tokens,
            "generated_tokens": self._answers.generated_tokens,
            "failed_requests": self._answers.failures,
            "preemptions": parts.scheduler.preemptions,
            "adapter_loads": parts.residency.loads,
            "adapter_load_failures": parts.residency.failed_loads,
            "adapter_evictions": parts.residency.evictions,
            "adapter_prefetch_copies": parts.residency.prefetch.copies,
            "adapter_prefetch_loads": parts.residency.prefetch.loads,
            "adapter_prefetch_bytes": parts.residency.prefetch.bytes,
            "adapter_prefetch_hits": parts.residency.prefetch.hits,
            "prefix_evictions": parts.prefixes.evictions if parts.prefixes is not None else 0,
            "loop_age_s": 0.0,
        }

    def close(self) -> None:
        """End the loader threads; loads under way are waited for. Nothing may be asked after."""
        if self.parts.loaders is not None:
            self.parts.loaders.shutdown()

    def check_integrity(self) -> None:
        """Every owner's audit. Raises IntegrityError."""
        self.parts.pool.check_integrity()
        self.parts.scheduler.check_integrity()
        self.parts.residency.check_integrity()


def _status(standing: Standing) -> AdapterStatus:
    return AdapterStatus(
        digest=standing.digest,
        tier=tier_of(standing.state),
        pages=standing.pages,
        host_bytes=standing.host_bytes,
        references=standing.references,
        pinned=standing.pin is not None,
        loads=standing.loads,
        hits=standing.hits,
        last_used_s=standing.idle_s,
        detail=standing.detail,
        load_s=standing.load_s,
        copy_s=standing.copy_s,
    )


def _reply(done: Done) -> Reply:
    fault = None
    if done.failure is not None:
        standing = done.standing
        failed = standing is not None and standing.state is State.FAILED
        fault = Fault("adapter_unavailable" if failed else "adapter_refused", done.failure)
    return Reply(
        done.call_id,
        fault=fault,
        status=_status(done.standing) if done.standing is not None else None,
        freed_pages=done.freed_pages,
        freed_host_bytes=done.freed_host_bytes,
    )

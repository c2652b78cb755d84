"""One generation, from admission to its last token, for streamed and whole replies alike."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from multilora_cli.engine.messages import AdapterRef, Delta, Fault, Submit
from multilora_cli.errors import RequestError
from multilora_cli.server.choice import Choice, Growth, TextRules, Usage
from multilora_cli.server.client import EngineClient
from multilora_cli.server.contract import (
    about_adapter,
    fault_error,
    internal_error,
    unavailable,
)
from multilora_cli.server.metrics import Metrics
from multilora_cli.server.quota import Held
from multilora_cli.server.replies import Frame
from multilora_cli.server.ticket import ClientGone, Ticket
from multilora_cli.server.tier_traffic import found_tier
from multilora_cli.text.tokenizer import Tokenizer

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True)
class Job:
    """A request that was checked and can be admitted."""

    frame: Frame
    submits: list[Submit]  # one a prompt
    rules: TextRules
    tokenizer: Tokenizer  # of the version that it was admitted with
    num_top: int | None = None  # alternatives a logprob; None: no logprobs
    echo: list[str] | None = None  # text of each prompt, sent before its answer
    include_usage: bool = False
    continuous_usage: bool = False
    return_ids: bool = False  # token ids of prompts and answers beside their text
    ids_as_tokens: bool = False  # of logprobs: `token_id:N` for their text

    @property
    def n(self) -> int:
        """Answers a prompt."""
        return self.submits[0].n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(submit.prompt) for submit in self.submits)


class Step(NamedTuple):
    """One delta as text."""

    choice: Choice
    growth: Growth
    delta: Delta


class Run:
    """A job in the engine. `close` is always called; it aborts what is unfinished."""

    def __init__(self, job: Job, metrics: Metrics, held: Held) -> None:
        """`held`: what it takes of its tenant's limits, given back by `close`."""
        self.job = job
        self._held = held
        self.tokenizer = job.tokenizer
        self.usage = Usage(prompt_tokens=job.prompt_tokens)
        count = len(job.submits) * job.n
        self.choices = [Choice(index, job.tokenizer, job.rules) for index in range(count)]
        adapter = job.frame.adapter
        self._meter = metrics.meter(adapter.name if adapter else None, job.prompt_tokens)
        self._metrics = metrics
        self._outcome = "abort"
        self._ticket: Ticket | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def admit(
        self, client: EngineClient, receive: Receive, deadline_s: float, load_s: float
    ) -> None:
        """Submit to the engine; from here on a client that leaves is noticed.

        It ends after `deadline_s`, and after `load_s` where its adapter is not in memory by then.
        """
        ticket = self._ticket = client.submit(self.job.submits)
        loop = asyncio.get_running_loop()
        adapter = self.job.frame.adapter
        if adapter is not None:
            tier = found_tier(client.statuses, adapter.digest)
            self._meter.admitted(tier)
            if tier == "stored":
                self._timers.append(loop.call_later(load_s, self._check_loaded, client, adapter))
        self._watcher = loop.create_task(_watch(receive, ticket))
        error = RequestError(
            f"not finished within {deadline_s:g} s",
            status=408,
            code="timeout",
            kind="timeout_error",
        )
        self._timers.append(loop.call_later(deadline_s, ticket.fail, error))

    def _check_loaded(self, client: EngineClient, adapter: AdapterRef) -> None:
        """A disk that hangs is told long before the deadline of an answer."""
        is_begun = any(choice.num_tokens for choice in self.choices)
        if not is_begun and found_tier(client.statuses, adapter.digest) == "stored":
            message = f"adapter {adapter.name} is still being read"
            self._admitted().fail(unavailable("adapter_loading", message, 5))

    async def next(self) -> list[Step]:
        """What came since the last call; nothing once all answers ended. Raises RequestError."""
        ticket = self._admitted()
        with self._failing():
            while deltas := await ticket.next():
                if steps := self._steps(ticket, deltas):
                    return steps
        return []

    async def relay(self, consume: Callable[[list[Step]], bool]) -> bool:
        """Hand steps to `consume` as the engine's messages come, without a task in between.

        True once all answers ended, False as soon as `consume` wants a pause. Raises RequestError
        and ClientGone, and whatever `consume` raises.
        """
        ticket = self._admitted()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told() -> None:
            """One step of the engine; what comes after the turn's end waits in the ticket."""
            try:
                while not turn.done() and (deltas := ticket.take()):
                    steps = self._steps(ticket, deltas)
                    if steps and not consume(steps):
                        turn.set_result(None)
                if ticket.ended and not turn.done():
                    turn.set_result(None)
            except Exception as error:  # for whoever waits, not for the engine's messages
                turn.set_exception(error)

        with self._failing():
            ticket.listen(told)
            try:
                told()
                await turn
            finally:
                ticket.listen(None)
        return ticket.ended

    def _admitted(self) -> Ticket:
        if self._ticket is None:
            raise RuntimeError("not admitted")
        return self._ticket

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A request that fails is counted as failed."""
        try:
            yield
        except RequestError:
            self._outcome = "error"
            raise

    def _steps(self, ticket: Ticket, deltas: Sequence[Delta]) -> list[Step]:
        return [step for delta in deltas if (step := self._step(ticket, delta)) is not None]

    @property
    def headers(self) -> dict[str, str]:
        """Which adapter version answers, and what is left of its tenant's limits."""
        return {**self.job.frame.headers, **self._held.headers}

    def close(self) -> None:
        """Release everything, whatever happened."""
        for timer in self._timers:
            timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._ticket is not None:
            with self._ticket:
                pass
        if all(choice.ending.finish_reason for choice in self.choices):
            self._outcome = str(self.choices[0].ending.finish_reason)
        self._metrics.ended(self._outcome)
        self._meter.ended()
        self._held.end()

    def _step(self, ticket: Ticket, delta: Delta) -> Step | None:
        choice = self.choices[ticket.place(delta) * self.job.n + delta.index]
        if choice.ending.finish_reason is not None:
            return None  # sent before the engine learned of a cut
        if delta.fault is not None:
            raise fault_error(self._told(delta.fault))
        if delta.finish_reason in ("abort", "error"):
            raise internal_error()  # nobody here asked for it, and there is no fault to show
        if delta.cached_tokens and delta.index == 0:
            self.usage.cached_tokens += delta.cached_tokens
        if delta.queued_s:
            self._meter.queued(delta.queued_s)
        before = choice.num_tokens
        growth = choice.add(delta)
        added = choice.num_tokens - before
        if added:
            self.usage.completion_tokens += added
            self._meter.tokens(added)
            self._held.used(added)
        if growth.ending.finish_reason is not None and delta.finish_reason is None:
            ticket.cut(delta)
        return Step(choice, growth, delta)

    def _told(self, fault: Fault) -> Fault:
        """A fault in the words of who asked."""
        adapter = self.job.frame.adapter
        if adapter is None or not fault.code.startswith("adapter_"):
            return fault
        message = about_adapter(adapter.name, fault.message, (adapter.path,))
        return Fault(fault.code, message, fault.retry_after_s)


async def _watch(receive: Receive, ticket: Ticket) -> None:
    """Notice that the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(ClientGone())

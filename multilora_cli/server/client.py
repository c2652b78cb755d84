"""The one client of the engine process: submits, aborts, calls, restarts.

If the engine dies, every open request fails at once and the engine is started again; after five
deaths within a minute of serving it stays down and requests are told so. Names and adapters live
in the registry of the front, so nothing but work in progress is lost.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import socket
from typing import Literal, Protocol

import msgspec

from multilora_cli.engine.messages import (
    Abort,
    AdapterEvent,
    AdapterRef,
    AdapterStatus,
    Delta,
    Drain,
    EvictAdapter,
    FromEngine,
    LoadAdapter,
    Progress,
    Query,
    Ready,
    Reply,
    Snapshot,
    StartFailed,
    Step,
    Submit,
    ToEngine,
)
from multilora_cli.errors import BadInput, MloraError, Refused, RequestError, Unreachable
from multilora_cli.server.contract import unavailable
from multilora_cli.server.statuses import Statuses
from multilora_cli.server.ticket import Ticket
from multilora_cli.server.wire import Wire

_log = logging.getLogger(__name__)

BREAKER_DEATHS = 5
BREAKER_WINDOW_S = 60.0  # of serving: a large base may take a minute to load each time
POLL_S = 1.0
STALL_S = 3.0  # without an answer for this long, the engine counts as stalled
_START_ERRORS: dict[int, type[MloraError]] = {1: Refused, 2: BadInput, 3: Unreachable}
State = Literal["starting", "ready", "restarting", "down", "draining", "stopped"]


class Process(Protocol):
    """What is needed of subprocess.Popen."""

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once it has ended."""

    def kill(self) -> None:
        """End it now."""


Spawn = Callable[[], tuple[Process, socket]]


class EngineClient:
    """Owns the engine process and everything that is in flight to it."""

    def __init__(self, spawn: Spawn, *, max_sequences: int = 1280) -> None:
        self._spawn = spawn
        self._max_sequences = max_sequences
        self._wire: Wire | None = None
        self._tickets: dict[int, Ticket] = {}
        self.num_sequences = 0  # of all requests in flight, ended ones of several included
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._last_id = 0
        self._deaths: deque[float] = deque(maxlen=BREAKER_DEATHS)  # in seconds of serving
        self._served_s = 0.0
        self._serves_since: float | None = None
        self._start_error: MloraError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._heard_s = time.monotonic()
        self.state: State = "starting"
        self.reason = "the engine is starting"
        self.ready: Ready | None = None
        self.snapshot: Snapshot | None = None
        self.statuses = Statuses()
        self.restarts = 0
        self.on_progress: list[Callable[[Progress], None]] = []
        self.on_adapter: list[Callable[[AdapterStatus], None]] = []  # it changed its tier
        self.on_ready: list[Callable[[Ready], None]] = []

    def start(self) -> None:
        """Spawn the engine and keep it alive, from the running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._supervise()), loop.create_task(self._poll())]

    async def wait_ready(self) -> Ready:
        """The first Ready. Raises what the engine said instead."""
        while self.ready is None:
            if self._start_error is not None:
                raise self._start_error
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    @property
    def stalled(self) -> bool:
        """Whether a ready engine has not answered for some seconds."""
        return self.state == "ready" and time.monotonic() - self._heard_s > STALL_S

    def submit(self, submits: Sequence[Submit]) -> Ticket:
        """Admit the sequences of one request; request ids are given here. Raises RequestError."""
        self.check_admission(sum(submit.n for submit in submits))
        numbered = []
        for submit in submits:
            numbered.append(msgspec.structs.replace(submit, request_id=self._next_id()))
        ticket = Ticket(numbered, self._abort)
        for submit in numbered:
            self._tickets[submit.request_id] = ticket
            self.num_sequences += submit.n
            self._send(submit)
        return ticket

    def check_admission(self, num_sequences: int = 1) -> None:
        """Raise RequestError 503 while nothing can be admitted."""
        if self.state == "draining" or self.state == "stopped":
            raise unavailable("server_shutting_down", "the server is shutting down", 5)
        if self.state != "ready":
            retry_s = None if self.state == "down" else 2
            raise unavailable("engine_unavailable", self.reason, retry_s)
        if self.num_sequences + num_sequences > self._max_sequences:
            raise unavailable("server_is_overloaded", "the queue is full", 1)

    async def load(
        self,
        adapter: AdapterRef,
        *,
        hot: bool = False,
        pin: Literal["hot", "warm"] | None = None,
        priority: int = 0,
        timeout_s: float,
    ) -> Reply:
        """Make an adapter warm, or hot where that is asked for or it is pinned there."""
        call_id = self._next_id()
        on_device = hot or pin == "hot"
        message = LoadAdapter(call_id, adapter, hot=on_device, pin=pin, priority=priority)
        return await self._call(call_id, message, timeout_s)

    async def forget(self, digest: str, timeout_s: float) -> Reply:
        """Free all that a digest holds, pins and the prefixes computed with it included."""
        call_id = self._next_id()
        message = EvictAdapter(call_id, digest, to="cold", unpin=True, purge_cache=True)
        return await self._call(call_id, message, timeout_s)

    async def evict(
        self, digest: str, *, to: Literal["warm", "cold"], unpin: bool, timeout_s: float
    ) -> Reply:
        """Move a digest down; the prefixes computed with it stay, since it may come back."""
        call_id = self._next_id()
        message = EvictAdapter(call_id, digest, to=to, unpin=unpin)
        return await self._call(call_id, message, timeout_s)

    async def query(self, timeout_s: float = 1.0) -> Snapshot | None:
        """Fresh counters; the last known ones when the engine does not answer in time."""
        call_id = self._next_id()
        with suppress(RequestError):
            await self._call(call_id, Query(call_id), timeout_s)
        return self.snapshot

    def begin_drain(self) -> None:
        """Admit nothing more."""
        self._become("draining", "the server is shutting down")

    async def wait_idle(self, deadline_s: float) -> bool:
        """Whether everything admitted ended within `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        while self._tickets and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        return not self._tickets

    def fail_all(self, error: RequestError) -> None:
        """End everything in flight with `error`."""
        tickets, self._tickets, self.num_sequences = set(self._tickets.values()), {}, 0
        for ticket in tickets:
            ticket.fail(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the engine: asked first, killed after `timeout_s`; at once where it only starts."""
        timeout_s = timeout_s if self.state in ("ready", "draining") else 0.2
        self._become("stopped", "the server has stopped")
        self.fail_all(unavailable("server_shutting_down", "the server is shutting down", 5))
        self._send(Drain(0.0))
        if self._tasks:
            supervisor, poller = self._tasks
            poller.cancel()
            done, _ = await asyncio.wait([supervisor], timeout=timeout_s)
            if not done and self._wire is not None:
                self._wire.close()  # the supervisor then kills the process
            await asyncio.wait([supervisor, poller], timeout=10)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, message: ToEngine) -> None:
        if self._wire is not None:
            self._wire.send(message)

    def _abort(self, request_id: int) -> None:
        if self._let_go(request_id):
            self._send(Abort(request_id))

    async def _call(self, call_id: int, message: ToEngine, timeout_s: float) -> Reply:
        if self.state not in ("ready", "draining"):
            self.check_admission()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise unavailable("adapter_loading", "the engine is still at it", 5) from None
        finally:
            self._calls.pop(call_id, None)

    def _receive(self, message: FromEngine) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Step):
            self._take(message.deltas)
        elif isinstance(message, Reply):
            if message.snapshot is not None:
                self._seen(message.snapshot)
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, AdapterEvent):
            self.statuses[message.status.digest] = message.status
            for moved in self.on_adapter:
                moved(message.status)
        elif isinstance(message, Progress):
            for progress in self.on_progress:
                progress(message)
        else:
            self._started(message)

    def _seen(self, snapshot: Snapshot) -> None:
        """What changed in the engine since it said so last; nobody may wait for it any more."""
        self.snapshot = snapshot
        for status in snapshot.adapters:
            self.statuses[status.digest] = status
        for digest in snapshot.gone:
            self.statuses.pop(digest, None)

    def _let_go(self, request_id: int) -> bool:
        """A request is over; whether it was in flight."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self.num_sequences -= ticket.sizes[request_id]
        return ticket is not None

    def _take(self, deltas: Sequence[Delta]) -> None:
        """Hand each request its share of a step, all of it in one call."""
        told: dict[Ticket, None] = {}
        for delta in deltas:
            ticket = self._tickets.get(delta.request_id)
            if ticket is not None:
                told[ticket] = None
                if ticket.push(delta):
                    self._let_go(delta.request_id)
        for ticket in told:
            ticket.tell()

    def _started(self, message: Ready | StartFailed) -> None:
        if isinstance(message, StartFailed):
            self.reason = f"the engine cannot start: {message.message}"
            kind = _START_ERRORS.get(message.exit_code, Refused)
            self._start_error = kind(message.message, hint=message.hint)
            return
        self.ready = message
        self._serves_since = time.monotonic()
        self._changed.set()
        if self.state in ("starting", "restarting"):
            self._become("ready", "")
        for ready in self.on_ready:
            ready(message)

    def _become(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._changed.set()

    async def _supervise(self) -> None:
        while self.state not in ("draining", "stopped"):
            status = await self._run_once()
            if self.state in ("draining", "stopped"):
                break
            if self.ready is None:
                self._start_error = self._start_error or MloraError(
                    f"the engine process ended while it started ({_ending(status)})"
                )
                self._become("down", self._start_error.message)
                return
            _log.error("engine ended with status %s", status)
            if not self._may_restart():
                return
            self.restarts += 1
            await asyncio.sleep(0.1 * len(self._deaths))
        if self.ready is None:
            self._start_error = MloraError("the server was stopped before the engine was ready")
            self._changed.set()

    def _may_restart(self) -> bool:
        if self._serves_since is not None:
            self._served_s += time.monotonic() - self._serves_since
            self._serves_since = None
        self._deaths.append(self._served_s)
        served_s = self._served_s - self._deaths[0]
        if len(self._deaths) == BREAKER_DEATHS and served_s < BREAKER_WINDOW_S:
            reason = (
                f"the engine ended {BREAKER_DEATHS} times within a minute of serving and stays down"
            )
            self._become("down", reason)
            _log.error(reason)
            return False
        return True

    def _lost(self) -> None:
        """The connection ended: nothing in flight will be answered."""
        self.statuses.clear()
        self.snapshot = None
        if self.state in ("draining", "stopped"):
            error = unavailable("server_shutting_down", "the server is shutting down", 5)
        else:
            error = unavailable("engine_unavailable", "the engine ended and is restarted", 2)
            if self.state == "ready":
                self._become("restarting", "the engine is restarting")
        self.fail_all(error)

    async def _run_once(self) -> int | None:
        """One life of the engine process; its exit status."""
        loop = asyncio.get_running_loop()
        try:
            process, connection = await loop.run_in_executor(None, self._spawn)
        except (OSError, MloraError) as error:
            reason = f"the engine process cannot be started: {error}"
            self._start_error = error if isinstance(error, MloraError) else MloraError(reason)
            return None
        wire = Wire(self._receive)
        connection.setblocking(False)
        await loop.create_unix_connection(lambda: wire, sock=connection)
        self._wire = wire
        if self.state == "stopped":
            wire.close()
        try:
            await wire.lost
        finally:
            self._wire = None
            wire.close()
            self._lost()
        return await loop.run_in_executor(None, _reap, process)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self.state in ("ready", "draining"):
                await self.query(STALL_S)


def _ending(status: int | None) -> str:
    """An exit status in words: most engines that are killed took more memory than there was."""
    if status == -signal.SIGKILL:
        return "killed, as the system does with a process when memory runs out"
    return f"exit status {status}"


def _reap(process: Process) -> int | None:
    """Exit status of a process whose socket is closed; killed when it lingers."""
    for timeout_s in (2.0, 5.0):
        try:
            return process.wait(timeout=timeout_s)
        except Exception:
            process.kill()
    return None

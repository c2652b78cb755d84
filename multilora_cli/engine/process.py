"""The engine as a child process: how it is started, what it listens to, how it ends.

It is joined to the front by one inherited socket. It ends when the front does: by the end of the
socket, and by the kernel's parent-death signal should a step hang. SIGINT and SIGTERM are the
front's to act on (it sends Drain); here they are ignored, so that Ctrl-C in a terminal does not
cut streams. Torch is imported in the child only, after the first sign of life.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.link import Closed, Link, read_message, write_frame
from multilora_cli.engine.messages import (
    Progress,
    Query,
    Reply,
    Snapshot,
    StartFailed,
    Step,
    ToEngine,
)
from multilora_cli.errors import MloraError
from multilora_cli.logs import log_to_stderr

if TYPE_CHECKING:
    from multilora_cli.engine.engine import Engine

_log = logging.getLogger(__name__)

EXIT_CRASHED = 70  # an error outside any request: the front starts a new engine
_PR_SET_PDEATHSIG = 1
_CREDENTIALS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
_SWITCH_S = 0.0005  # loader threads hold the interpreter for at most this long, not for 5 ms
_STALLED_S = 1.0  # a step older than this is told of by the reader thread


def spawn(config: EngineConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an engine; returns the process and the front's end of the socket (blocking).

    The engine sends Progress messages, then Ready or StartFailed. Closing the socket ends it.
    """
    here, there = socket.socketpair()
    started: list[subprocess.Popen[bytes] | OSError] = []
    is_started = threading.Event()

    def keep() -> None:
        """Live as long as the child: the kernel ties its death to the thread that started it."""
        try:
            with there:
                command = [sys.executable, "-m", __name__, str(there.fileno()), str(os.getpid())]
                started.append(
                    subprocess.Popen(
                        command,
                        pass_fds=[there.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env=_child_environment(),
                    )
                )
        except OSError as error:
            started.append(error)
        is_started.set()
        while isinstance(started[0], subprocess.Popen) and started[0].poll() is None:
            time.sleep(0.5)

    threading.Thread(target=keep, name="engine-keeper", daemon=True).start()
    is_started.wait()
    process = started[0]
    if isinstance(process, OSError):
        here.close()
        raise process
    with contextlib.suppress(OSError):  # a child that is gone already shows as end of file
        write_frame(here, msgspec.msgpack.encode(config))
    return process, here


def _child_environment() -> dict[str, str]:
    """The environment without the credentials of sources: the engine fetches nothing."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AWS_") and name not in _CREDENTIALS
    }


class _Watch:
    """Queries go past the inbox: the loop answers them between steps, and while a step hangs a
    thread does, from the last snapshot and with the age of the step."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Link(connection, lost=lambda: os._exit(0), intercept=self._keep)
        self._queries: deque[Query] = deque()
        self._snapshot: Snapshot | None = None  # the last one, without adapters: they stay
        self._step_began: float | None = None

    def start(self) -> None:
        """Begin to listen and to watch."""
        self.link.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def step_begins(self) -> None:
        """A turn of the loop starts."""
        self._step_began = time.monotonic()

    def step_ended(self) -> None:
        """The loop is between steps."""
        self._step_began = None

    def answer(self, snapshot: Callable[[], Snapshot]) -> None:
        """Answer every query, on the loop's thread."""
        while (query := self._next()) is not None:
            found = snapshot()
            self._snapshot = msgspec.structs.replace(found, adapters=[], gone=[])
            self.link.send(Reply(query.call_id, snapshot=found))

    def _next(self) -> Query | None:
        """The oldest query, for one of the two threads."""
        try:
            return self._queries.popleft()
        except IndexError:
            return None

    def _keep(self, message: ToEngine) -> bool:
        if not isinstance(message, Query):
            return False
        self._queries.append(message)
        self.link.wake()
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(_STALLED_S / 4)
            began, snapshot = self._step_began, self._snapshot
            if began is None or snapshot is None:
                continue
            age_s = time.monotonic() - began
            while age_s > _STALLED_S and (query := self._next()) is not None:
                counters = {**snapshot.counters, "loop_age_s": age_s}
                aged = msgspec.structs.replace(snapshot, counters=counters)
                self.link.send(Reply(query.call_id, snapshot=aged))


def main(arguments: list[str]) -> int:
    """Entry of the child: descriptor of the socket and process id of the front."""
    connection = socket.socket(fileno=int(arguments[0]))
    _tie_to_front(int(arguments[1]))
    log_to_stderr(logging.WARNING)
    try:
        config = read_message(connection, EngineConfig)
    except Closed:
        return 0
    watch = _Watch(connection)
    watch.start()
    try:
        engine = _build(config, watch.link)
    except MloraError as error:
        watch.link.send(StartFailed(error.message, error.hint, error.exit_code))
        watch.link.close()
        return error.exit_code
    watch.link.send(engine.parts.ready)
    try:
        with settled_interpreter():
            _serve(engine, watch)
    except Exception:
        _log.exception("the engine's loop failed")
        return EXIT_CRASHED
    watch.link.close()
    return 0


def _build(config: EngineConfig, link: Link) -> "Engine":
    link.send(Progress("import", 0, 1))
    from multilora_cli.engine.assemble import build_engine  # torch: 1 to 3 s

    link.send(Progress("import", 1, 1))
    engine = build_engine(
        config, lambda phase, done, total: link.send(Progress(phase, done, total))
    )
    engine.on_loaded(link.wake)
    return engine


@contextlib.contextmanager
def settled_interpreter() -> Iterator[None]:
    """How the interpreter is set while an engine's loop runs.

    Steps make no cycles, so the collector finds nothing; at its defaults it took half of the
    host's time of a step with 256 rows.
    """
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(switch_s)


def _serve(engine: "Engine", watch: _Watch) -> None:
    """Messages in, a step, deltas and events out, until a drain is complete.

    What is known once the step is launched is told before its tokens are awaited.
    """
    link = watch.link
    while True:
        for message in link.take(engine.idle_wait_s):
            engine.handle(message)
        watch.answer(engine.changes)
        watch.step_begins()
        engine.begin_step()
        _tell(engine, link)
        deltas = engine.end_step()
        watch.step_ended()
        if deltas:
            link.send(Step(deltas))
        _tell(engine, link)
        if engine.drained:
            return


def _tell(engine: "Engine", link: Link) -> None:
    """Send what adapters became, and replies to calls."""
    for event in engine.take_events():
        link.send(event)
    for reply in engine.take_replies():
        link.send(reply)


def _tie_to_front(front_pid: int) -> None:
    """Die with the front, and leave the signals that a terminal or operator sends to it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != front_pid:  # it died before the signal was set
        os._exit(0)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # not sys.exit: it would wait for a loader in mid-read

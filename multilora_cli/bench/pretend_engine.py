"""An engine that only pretends: every open sequence gets a random token every `gap` seconds.

It speaks over the socket as the real one does, so that the front process can be measured alone.
Run as `python -m multilora_cli.bench.pretend_engine FD '{"gap_s": 0.01}'`.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from multilora_cli.engine.link import Closed, read_message, write_frame
from multilora_cli.engine.messages import (
    Abort,
    Delta,
    Drain,
    EvictAdapter,
    FromEngine,
    LoadAdapter,
    Query,
    Ready,
    Reply,
    Snapshot,
    Step,
    Submit,
    ToEngine,
)


@dataclass
class _Open:
    """One sequence: tokens that are still to come."""

    request_id: int
    index: int
    left: int


class PretendEngine:
    """Answers every call and gives every sequence a token a step."""

    def __init__(self, connection: socket.socket, gap_s: float, vocab_size: int) -> None:
        self._connection = connection
        self._gap_s = gap_s
        # Ordinary words: the first ids are single bytes, the last one is the end.
        self._tokens = np.random.default_rng(0).integers(300, vocab_size - 1, 65536).tolist()
        self._open: dict[tuple[int, int], _Open] = {}
        self._lock = threading.Lock()
        self._gone = False  # the front has hung up
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self) -> None:
        """Until the front hangs up."""
        self._send(Ready("cpu", "float32", 2**20, 2, 1, {}, {}))
        threading.Thread(target=self._read, daemon=True).start()
        due = time.perf_counter()
        while not self._gone:
            due = max(due + self._gap_s, time.perf_counter() - self._gap_s)
            time.sleep(max(due - time.perf_counter(), 0.0))
            if deltas := self._step():
                self._send(Step(deltas))

    def _step(self) -> list[Delta]:
        deltas = []
        with self._lock:
            for key, sequence in list(self._open.items()):
                sequence.left -= 1
                reason = None if sequence.left else "length"
                token = self._tokens[(sequence.left * 977 + sequence.request_id) & 65535]
                deltas.append(Delta(*key, [token], finish_reason=reason))  # type: ignore[arg-type]
                if reason is not None:
                    del self._open[key]
        return deltas

    def _read(self) -> None:
        while True:
            try:
                message: ToEngine = read_message(self._connection, ToEngine)  # type: ignore[arg-type]
            except Closed:
                self._gone = True
                return
            self._take(message)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            with self._lock:
                for index in range(message.n):
                    open_one = _Open(message.request_id, index, message.params.max_tokens)
                    self._open[message.request_id, index] = open_one
        elif isinstance(message, Abort):
            with self._lock:
                for key in [key for key in self._open if key[0] == message.request_id]:
                    del self._open[key]
        elif isinstance(message, Query):
            snapshot = Snapshot(0, len(self._open), 2, 2, 0, 0, 0, {}, {}, {}, [])
            self._send(Reply(message.call_id, snapshot=snapshot))
        elif isinstance(message, LoadAdapter | EvictAdapter):
            self._send(Reply(message.call_id))
        elif isinstance(message, Drain):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self, message: FromEngine) -> None:
        payload = self._encode(message)
        with self._lock:
            write_frame(self._connection, payload)


def pretend_spawn(
    gap_s: float, vocab_size: int
) -> Callable[[], tuple["subprocess.Popen[bytes]", socket.socket]]:
    """What the front calls to start its engine."""
    options = json.dumps({"gap_s": gap_s, "vocab_size": vocab_size})

    def spawn() -> tuple["subprocess.Popen[bytes]", socket.socket]:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", __name__, str(there.fileno()), options]
            return subprocess.Popen(command, pass_fds=[there.fileno()]), here

    return spawn


def main(arguments: list[str]) -> None:
    """Entry of the process: descriptor of the socket, options as JSON."""
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        PretendEngine(connection, **json.loads(arguments[1])).run()
    except OSError:
        return  # the front is gone


if __name__ == "__main__":
    main(sys.argv[1:])

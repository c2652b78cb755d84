"""The engine's end of the socket: length-prefixed msgpack, one thread per direction.

A frame is 4 bytes little-endian length and the message. Two threads, so that neither a slow front
nor a long step ever makes the other side wait.
"""

import queue
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from multilora_cli.engine.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 64 * 2**20

M = TypeVar("M")


class Closed(Exception):
    """The other side is gone, or what it sends is no message."""


def read_frame(connection: socket.socket) -> bytes:
    """The next frame. Raises Closed."""
    length = int.from_bytes(_read(connection, 4), "little")
    if length > MAX_FRAME_BYTES:
        raise Closed(f"a frame of {length} bytes, {MAX_FRAME_BYTES} allowed")
    return _read(connection, length)


def write_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one frame. Raises OSError."""
    connection.sendall(len(payload).to_bytes(4, "little") + payload)


def read_message(connection: socket.socket, kind: type[M]) -> M:
    """The next frame as a message of `kind`. Raises Closed."""
    try:
        return msgspec.msgpack.decode(read_frame(connection), type=kind)
    except msgspec.DecodeError as error:
        raise Closed(str(error)) from None


def _read(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        try:
            got = connection.recv_into(view[done:])
        except OSError as error:
            raise Closed(str(error)) from None
        if not got:
            raise Closed("end of file")
        done += got
    return bytes(buffer)


class Link:
    """An inbox that a reader thread fills and an outbox that a writer thread empties.

    `lost` is called once, on the reader thread, when the front is gone. `intercept` sees every
    message first, on the reader thread; one it returns True for does not reach the inbox.
    """

    def __init__(
        self,
        connection: socket.socket,
        lost: Callable[[], None],
        intercept: Callable[[ToEngine], bool] = lambda message: False,
    ) -> None:
        self._connection = connection
        self._lost = lost
        self._intercept = intercept
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._reader = threading.Thread(target=self._read_all, name="inbox", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._reader.start()
        self._writer.start()

    def send(self, message: FromEngine) -> None:
        """Queue one message; never blocks."""
        self._outbox.put(message)

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """Every message that has arrived; waits up to `wait_s` (None: as long as it takes)."""
        messages: list[ToEngine] = []
        try:
            first = self._inbox.get(wait_s != 0.0, wait_s)
            while True:
                if first is not None:
                    messages.append(first)
                first = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def wake(self) -> None:
        """End a `take` that waits; from any thread."""
        self._inbox.put(None)

    def close(self) -> None:
        """Send what is queued, then close."""
        self._outbox.put(None)
        self._writer.join()
        self._connection.close()

    def _read_all(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        try:
            while True:
                message = decoder.decode(read_frame(self._connection))
                if not self._intercept(message):
                    self._inbox.put(message)
        except (Closed, msgspec.DecodeError):
            self._lost()

    def _write_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                write_frame(self._connection, self._encoder.encode(message))
        except OSError:
            return  # the reader notices that the front is gone

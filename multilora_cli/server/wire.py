"""Messages over the engine's socket: 4-byte little-endian length, then msgpack."""

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from multilora_cli.engine.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 64 * 2**20


class Wire(asyncio.Protocol):
    """One connection to an engine; calls `receive` for each message, in order."""

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self._receive = receive
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: parse every whole frame; a broken one ends the connection."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= 4:
            length = int.from_bytes(self._buffer[start : start + 4], "little")
            if length > MAX_FRAME_BYTES:
                self.close()
                return
            end = start + 4 + length
            if len(self._buffer) < end:
                break
            try:
                message = self._decoder.decode(memoryview(self._buffer)[start + 4 : end])
            except msgspec.DecodeError:
                self.close()
                return
            self._receive(message)
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the engine is gone."""
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: ToEngine) -> None:
        """Queue one message; without effect once the connection is lost."""
        if self._transport is None or self._transport.is_closing():
            return
        frame = self._encoder.encode(message)
        self._transport.write(len(frame).to_bytes(4, "little") + frame)

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

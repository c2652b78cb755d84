"""A transport that sends what is written within one turn of the event loop at once."""

import asyncio
from typing import Any


class JoinedWrites(asyncio.Transport):
    """Stands before a transport of the event loop.

    uvicorn writes the head of a reply, its body and the end of a chunked one each by itself, and
    each was a system call: five for the shortest stream, now three.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: Any) -> None:
        """asyncio: send `data` at the end of this turn, or with what is written at once."""
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def write_at_once(self, data: bytes) -> None:
        """Send `data` now, behind what waits for the end of the turn."""
        if self._parts:
            self._parts.append(data)
            self.flush()
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send what waits."""
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)

    def close(self) -> None:
        """asyncio: close once everything is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """asyncio: close at once."""
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """asyncio: whether it closes or is closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """asyncio: of the transport behind it."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """asyncio: read nothing for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """asyncio: read on."""
        self._transport.resume_reading()

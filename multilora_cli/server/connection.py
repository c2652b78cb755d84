"""Connections: how many, how long their headers may take, and what junk is answered.

uvicorn leaves a connection open for ever while a header is incomplete; here a timer ends it. Idle
connections between requests are uvicorn's own keep-alive timer.
"""

import asyncio
import sys
import uuid
from collections import Counter
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from multilora_cli.errors import RequestError
from multilora_cli.server.config import ServerLimits, is_loopback
from multilora_cli.server.contract import error_body, unavailable

CONNECTION = "connection"  # in the state of an ASGI scope
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Headers Too Large", 503: "Busy"}


def protocol_class(limits: ServerLimits) -> type[H11Protocol]:
    """uvicorn's protocol with these limits."""
    addresses: Counter[str] = Counter()

    class Connection(GuardedConnection):
        """One connection of one server."""

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            # The state of a request names its connection, which streams are written to.
            super().__init__(config, server_state, app_state | {CONNECTION: self}, _loop)
            self.limits = limits
            self.addresses = addresses

    return Connection


class GuardedConnection(H11Protocol):
    """H11Protocol with caps and a header deadline."""

    limits: ServerLimits
    addresses: Counter[str]  # open connections by peer address, shared by all
    _timer: asyncio.TimerHandle | None = None
    _counted: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio: refuse what is over a cap, else start the header deadline."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""  # a unix socket has none
        self._counted = address
        self.addresses[address] += 1
        crowded = self.addresses[address] > self.limits.max_connections_per_address
        is_remote = bool(address) and not is_loopback(address)
        if len(self.connections) > self.limits.max_connections or (crowded and is_remote):
            self._refuse(unavailable("server_is_overloaded", "too many connections", 1))
            return
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: give back what the connection held."""
        self._stop_timer()
        if self._counted is not None:
            self.addresses[self._counted] -= 1
            if not self.addresses[self._counted]:
                del self.addresses[self._counted]
            self._counted = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio: let uvicorn read, then see whether a header is still incomplete."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_header()

    def send_400_response(self, msg: str) -> None:
        """uvicorn: the bytes are not HTTP, or the headers are too large."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            error = RequestError("the headers are too large", status=431, code="headers_too_large")
        else:
            error = RequestError("this is not an HTTP/1.1 request", code="invalid_http")
        self._refuse(error)

    def body(self) -> "ChunkedBody":
        """The body of a reply whose headers were sent, without a length."""
        return ChunkedBody(self.transport, self.flow, self.conn.their_http_version == b"1.1")

    def _watch_header(self) -> None:
        between = self.cycle is None or self.cycle.response_complete
        unfinished = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if between and unfinished and self.timeout_keep_alive_task is None:
            if self._timer is None:
                self._timer = self.loop.call_later(self.limits.header_s, self._too_slow)
        else:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        cycle: Any = self.cycle
        if cycle is not None:  # after a reply nobody waits for another one
            self.transport.close()
            return
        message = f"the headers did not arrive within {self.limits.header_s:g} s"
        self._refuse(RequestError(message, status=408, code="timeout", kind="timeout_error"))

    def _refuse(self, error: RequestError) -> None:
        """Answer without the application and close; only close in the middle of a reply."""
        self._stop_timer()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            body = error_body(error)
            head = (
                f"HTTP/1.1 {error.status} {_PHRASES.get(error.status, 'Error')}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class ChunkedBody:
    """Writes pieces of a reply's body past the layers that its headers and its end go through.

    They cost 25 us a piece, half of what a streamed token costs altogether.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, framed: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._framed = framed  # HTTP/1.0 has no chunks: the end of the connection ends the body

    @property
    def is_full(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Send `data`, unless the client is gone; nothing for no data, which would end the body."""
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    async def drain(self) -> None:
        """Until the client has read on."""
        await self._flow.drain()

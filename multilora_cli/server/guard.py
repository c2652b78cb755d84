"""What stands before every route: request ids, header limits, Host and Origin, the last catch."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilora_cli.errors import MloraError, RequestError
from multilora_cli.logs import clean
from multilora_cli.server.config import ServerConfig, is_loopback
from multilora_cli.server.contract import (
    as_request_error,
    error_body,
    error_headers,
    internal_error,
)
from multilora_cli.server.ticket import ClientGone

_log = logging.getLogger(__name__)
REQUEST_ID = "mlora.request_id"  # in the scope of every request
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Guard:
    """Outermost ASGI layer: every reply gets an x-request-id, every failure the error contract."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[int], None]) -> None:
        """`count` is told the status of every reply."""
        self._app = app
        self._config = config
        self._loopback = config.loopback
        self._guarded = config.loopback or bool(config.allowed_hosts)
        # Clients say few names: looking into each took 25 us of every request.
        self._allowed = lru_cache(256)(self._may_name)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return  # nothing to start or to end here, and no web sockets
        began_s = time.monotonic()
        reply = _Reply(
            send, _request_id(scope), lambda status: self._answered(scope, status, began_s)
        )
        scope[REQUEST_ID] = reply.request_id.decode()
        try:
            self._check(scope)
            await self._app(scope, receive, reply.send)
        except MloraError as error:
            await reply.fail(as_request_error(error))
        except (ClientGone, ClientDisconnect):
            pass
        except Exception:
            _log.exception("request %s failed", reply.request_id.decode())
            await reply.fail(internal_error())

    def _answered(self, scope: Scope, status: int, began_s: float) -> None:
        """The status is known; a stream goes on after it."""
        self._count(status)
        if _log.isEnabledFor(logging.INFO):
            took_ms = (time.monotonic() - began_s) * 1000
            path = clean(scope["path"][:200])
            _log.info(
                "%s %s %s: %d in %.0f ms", scope[REQUEST_ID], scope["method"], path, status, took_ms
            )

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > self._config.limits.max_headers:
            raise RequestError(
                f"{len(headers)} headers, expected at most {self._config.limits.max_headers}",
                status=431,
                code="headers_too_large",
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            raise RequestError(
                "both Content-Length and Transfer-Encoding", code="invalid_http"
            )  # whatever stands before this server may have read another length
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or not (self._allowed(hosts[0]) if hosts else not self._guarded):
            raise _forbidden("host_not_allowed", "the Host header is not one of this server's")
        for name, value in headers:
            if name == b"origin" and self._loopback and not self._same_machine(value):
                raise _forbidden("origin_not_allowed", "requests from other origins are refused")

    def _may_name(self, value: bytes) -> bool:
        """On loopback only loopback names, so that a rebound DNS name gets nothing."""
        if not self._guarded:
            return True
        name = _host_name(value)
        if name is None:
            return False
        return name in self._config.allowed_hosts or is_loopback(name)

    def _same_machine(self, origin: bytes) -> bool:
        try:
            parts = urlsplit(origin.decode("ascii"))
            name = parts.hostname
        except (ValueError, UnicodeDecodeError):
            return False
        return name is not None and (name in self._config.allowed_hosts or is_loopback(name))


class _Reply:
    """Adds the request id, and remembers whether anything was sent."""

    def __init__(self, send: Send, request_id: bytes, count: Callable[[int], None]) -> None:
        self._send = send
        self._count = count
        self._started = False
        self.request_id = request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._count(message["status"])
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id)]
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, error: RequestError) -> None:
        """Send an error as the whole reply; what has begun can only be cut off."""
        if self._started:
            raise error
        body = error_body(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error_headers(error),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _host_name(value: bytes) -> str | None:
    match = re.fullmatch(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?", value)
    return match[1].decode().strip("[]").lower() if match else None


def _forbidden(code: str, message: str) -> RequestError:
    return RequestError(message, status=403, code=code, kind="permission_error")

"""A route with a policy, and the way from a raw request to its endpoint."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilora_cli.errors import RequestError
from multilora_cli.server.access import LiveAccess
from multilora_cli.server.auth import Caller, Policy
from multilora_cli.server.config import ServerLimits

_CALLER = "mlora.caller"  # in the scope of an authorised request
Endpoint = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body", bound=msgspec.Struct)
JSON = "application/json"


@dataclass(frozen=True)
class RouteSpec:
    """One line of the route table."""

    method: str
    path: str
    endpoint: Endpoint
    policy: Policy
    summary: str
    body: type[msgspec.Struct] | None = None
    media: str = JSON  # of a good reply


class RouteTable:
    """The application behind the guard: who asks for what may be asked for, and nothing else.

    It decides about the caller on the matched route itself, never on a path or a header. A table
    and no framework: its layers were a third of what a request cost.
    """

    def __init__(self, specs: Sequence[RouteSpec], access: LiveAccess) -> None:
        self._access = access
        self._fixed: dict[str, dict[str, RouteSpec]] = {}  # by path, then by method
        self._patterns: dict[re.Pattern[str], dict[str, RouteSpec]] = {}
        for spec in specs:
            if "{" in spec.path:
                self._patterns.setdefault(_pattern(spec.path), {})[spec.method] = spec
            else:
                self._fixed.setdefault(spec.path, {})[spec.method] = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises what the guard answers: RequestError 401, 403, 404, 405 and the routes'."""
        spec, scope["path_params"] = self._find(scope["path"], scope["method"])
        request = Request(scope, receive, send)
        scope[_CALLER] = self._access.now.ring.authorise(spec.policy, scope["headers"])
        response = await spec.endpoint(request)
        await response(scope, receive, send)

    def _find(self, path: str, method: str) -> tuple[RouteSpec, dict[str, str]]:
        """The route, and what stands for the names in its path. Raises RequestError."""
        methods, values = self._at(path)
        if method in methods:
            return methods[method], values
        error = RequestError("this route has another method", status=405, code="method_not_allowed")
        error.headers = {"allow": ", ".join(methods)}
        raise error

    def _at(self, path: str) -> tuple[dict[str, RouteSpec], dict[str, str]]:
        """The routes of a path, by method."""
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, {}
        for pattern, methods in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None:
                return methods, match.groupdict()
        raise RequestError("no such route", status=404, code="not_found")


def _pattern(path: str) -> re.Pattern[str]:
    """`{name:path}` stands for anything, slashes included."""
    return re.compile(re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path))


def caller_of(request: Request) -> Caller:
    """Who sent an authorised request."""
    caller: Caller = request.scope[_CALLER]
    return caller


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A good JSON reply."""
    return Response(msgspec.json.encode(value), media_type=JSON, headers=headers)


def body_bytes(request: Request) -> int | None:
    """Bytes of a request's body as its head says; None where it says nothing, or no number."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 10 else None


async def read_body(request: Request, limits: ServerLimits, max_bytes: int) -> bytes:
    """The whole body, at most `max_bytes`, in time. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON or request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(
            "expected Content-Type: application/json, not encoded",
            status=415,
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {limits.body_s:g} s",
            status=408,
            code="timeout",
            kind="timeout_error",
        ) from None
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes",
        status=413,
        code="request_too_large",
    )

"""A route with a policy, and the way from raw request to endpoint and from error to reply."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from multilora_cli.errors import MloraError, RequestError
from multilora_cli.server.access import LiveAccess
from multilora_cli.server.auth import Caller, Policy
from multilora_cli.server.config import ServerLimits
from multilora_cli.server.contract import (
    as_request_error,
    error_body,
    error_headers,
    internal_error,
)
from multilora_cli.server.guard import REQUEST_ID
from multilora_cli.server.ticket import ClientGone

_log = logging.getLogger(__name__)

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


class PolicyRoute(APIRoute):
    """Decides about the caller on the matched route itself, never on a path or a header."""

    policy: Policy | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI: what handles a matched request."""
        endpoint: Endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            try:
                access: LiveAccess = request.app.state.access
                if self.policy is None:
                    raise internal_error()
                request.state.caller = access.now.ring.authorise(self.policy, request.headers.raw)
                return await endpoint(request)
            except MloraError as error:
                return error_response(as_request_error(error))
            except ClientDisconnect:
                raise ClientGone from None
            except ClientGone:
                raise
            except Exception:  # Starlette would answer it in words of its own
                _log.exception("request %s failed", request.scope.get(REQUEST_ID))
                return error_response(internal_error())

        return handle


def add_routes(app: FastAPI, specs: Sequence[RouteSpec]) -> None:
    """Put every line of the table into the app, with its policy."""
    app.router.route_class = PolicyRoute
    for spec in specs:
        app.router.add_api_route(
            spec.path, spec.endpoint, methods=[spec.method], response_model=None
        )
        route = app.router.routes[-1]
        if isinstance(route, PolicyRoute):
            route.policy = spec.policy


def check_policies(app: FastAPI) -> None:
    """Refuse an app with a route that nobody decided about."""
    for route in app.router.routes:
        if not isinstance(getattr(route, "policy", None), Policy):
            path = getattr(route, "path", route)
            raise RuntimeError(f"route {path} has no policy: public, tenant or admin")


def caller_of(request: Request) -> Caller:
    """Who sent an authorised request."""
    caller: Caller = request.state.caller
    return caller


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A good JSON reply."""
    return Response(msgspec.json.encode(value), media_type=JSON, headers=headers)


def error_response(error: RequestError) -> Response:
    """A failed reply, as the error contract has it."""
    return Response(
        error_body(error),
        status_code=error.status,
        media_type=JSON,
        headers=dict(error_headers(error)),
    )


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

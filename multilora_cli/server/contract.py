"""The error contract: one JSON shape, one status and one set of headers for every failure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from multilora_cli.engine.messages import Fault
from multilora_cli.errors import AdapterUnavailable, BadInput, MloraError, RequestError

MAX_MESSAGE_CHARS = 2000
MAX_RETRY_AFTER_S = 120  # the openai client gives up above it
# code -> (status, type); a code that is not here is a bug and answered as one
_FAULTS: dict[str, tuple[int, str]] = {
    "adapter_loading": (503, "service_unavailable_error"),
    "adapter_refused": (400, "invalid_request_error"),
    "adapter_unavailable": (503, "service_unavailable_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "engine_unavailable": (503, "service_unavailable_error"),
    "invalid_value": (400, "invalid_request_error"),
    "server_is_overloaded": (503, "service_unavailable_error"),
    "server_shutting_down": (503, "service_unavailable_error"),
    "timeout": (408, "timeout_error"),
}
_NO_RETRY = frozenset({"adapter_unavailable", "adapter_exists"})
_CLOSE = frozenset(
    {"headers_too_large", "invalid_http", "request_too_large", "server_shutting_down", "timeout"}
)


def fault_error(fault: Fault) -> RequestError:
    """The request error that an engine's fault becomes."""
    if fault.code not in _FAULTS:
        return internal_error()
    status, kind = _FAULTS[fault.code]
    return RequestError(
        fault.message,
        status=status,
        code=fault.code,
        kind=kind,
        retry_after_s=fault.retry_after_s,
    )


def unavailable(code: str, message: str, retry_after_s: float | None = None) -> RequestError:
    """A 503 of the front's own."""
    return fault_error(Fault(code, message, retry_after_s))


def about_adapter(name: str, message: str, places: Iterable[str]) -> str:
    """What is wrong with an adapter, for who asks for it: named, and without the `places` (folders,
    addresses) where it lies. Those are the operator's, who finds them in the listing."""
    text = message.removeprefix(f"adapter {name}: ")
    for place in places:
        if place:
            text = text.replace(f"{place.rstrip('/')}/", "").replace(place, "its source")
    return f"adapter {name}: {text}"


def internal_error() -> RequestError:
    """A bug: the client learns only that it is one; the log has the rest under the request id."""
    message = "internal error; the server's log has it under this x-request-id"
    return RequestError(message, status=500, code="internal_error", kind="internal_error")


def as_request_error(error: MloraError) -> RequestError:
    """Any error of ours as what a client is told."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, AdapterUnavailable):
        return unavailable("adapter_unavailable", error.message)
    if isinstance(error, BadInput):
        return RequestError(error.message)
    return internal_error()


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of every failed request. A code of digits is vLLM's: the status as a number."""
    return {
        "error": {
            "message": error.message[:MAX_MESSAGE_CHARS],
            "type": error.kind,
            "param": error.param,
            "code": int(error.code) if error.code.isdigit() else error.code,
        }
    }


def error_body(error: RequestError) -> bytes:
    """The body of every failed request, encoded; at most 8 KB."""
    return msgspec.json.encode(error_object(error))


def error_headers(error: RequestError) -> Mapping[str, str]:
    """Headers that tell clients whether and when to try again."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(min(max(math.ceil(error.retry_after_s), 1), MAX_RETRY_AFTER_S))
    if error.code in _NO_RETRY:
        headers["x-should-retry"] = "false"
    if error.code in _CLOSE:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers

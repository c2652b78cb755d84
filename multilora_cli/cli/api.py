"""The commands' view of a running server: its routes, its errors, its streams."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from multilora_cli.errors import BadInput, MloraError, Refused, Unreachable, reason_of

DEFAULT_URL = "http://127.0.0.1:8000"
# The request was good and the answer is no.
_REFUSALS = frozenset({"adapter_refused", "fleet_refused", "restart_needed"})
# Reading waits as long as a queue may: the server itself bounds every request.
_TIMEOUT = httpx.Timeout(10.0, read=620.0)


def server_url(url: str | None, fleet: Path | None = None) -> str:
    """`url`, else the address in the fleet file that would be served, else the default."""
    if url:
        return clean_url(url)
    from multilora_cli.fleet.load import DEFAULT_FILES, load_fleet

    if fleet is None and not any(Path(name).is_file() for name in DEFAULT_FILES):
        return DEFAULT_URL
    server = load_fleet(fleet).fleet.server
    return own_url(server.host, server.port or 8000)


def clean_url(url: str, flag: str = "--url") -> str:
    """The server's root address without `/v1`. Raises BadInput."""
    try:
        is_good = url.startswith(("http://", "https://")) and bool(urlsplit(url).netloc)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_good = False
    if not is_good:
        raise BadInput(f"{flag} {url}: expected http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def own_url(host: str, port: int) -> str:
    """Where this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class UnknownName(BadInput):
    """No model of that name is served."""


# What commands read of replies without asking whether it is there.


class _Card(TypedDict):
    id: str


class _Cards(TypedDict):
    data: list[_Card]


class _Row(_Card):
    tier: str


class _Listing(TypedDict):
    data: list[_Row]


class _Moved(_Row):
    pages: int
    pinned: bool


class _Evicted(_Moved):
    freed_pages: int
    freed_host_bytes: int


class _Change(TypedDict):
    name: str
    change: str
    fields: dict[str, dict[str, Any]]


class _Restart(TypedDict):
    key: str
    running: Any
    file: Any


class _Report(TypedDict):
    fleet: str
    changes: list[_Change]
    restart: list[_Restart]
    runtime: list[str]


class Api:
    """An HTTP client of one server; use as an async context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url`: without `/v1`, as `server_url` gives it."""
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise BadInput("--api-key: expected printable ASCII characters")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False
        )

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _get(self, path: str, shape: type) -> Any:
        """The JSON at `path`. Raises MloraError."""
        return await self._ask("GET", path, None, shape)

    async def _post(self, path: str, body: dict[str, Any], shape: type) -> Any:
        """The JSON that `path` answers to `body`. Raises MloraError."""
        return await self._ask("POST", path, body, shape)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, shape: type) -> Any:
        """Raises MloraError; Unreachable where what answers is no mlora, by the reply's shape."""
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise _error_of(response.status_code, response.content)
        try:
            value = json.loads(response.content)
            msgspec.convert(value, shape)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            raise self._stranger() from None
        return value

    async def warm(
        self, name: str, *, hot: bool, pin: bool, ttl: float | None = None
    ) -> dict[str, Any]:
        """Bring an adapter up a step; its row. `ttl`: seconds."""
        path = f"/v1/adapters/{path_segment(name)}/warm"
        body = {"hot": hot, "pin": pin, "ttl": ttl}
        row: dict[str, Any] = await self._post(path, body, _Moved)
        return row

    async def evict(self, name: str, *, cold: bool, unpin: bool) -> dict[str, Any]:
        """Move an adapter down a step; its row and what became free."""
        path = f"/v1/adapters/{path_segment(name)}/evict"
        row: dict[str, Any] = await self._post(path, {"cold": cold, "unpin": unpin}, _Evicted)
        return row

    async def fleet(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a fleet differs in from the one served, and, unless a dry run, serve it."""
        report: dict[str, Any] = await self._post("/v1/fleet", body, _Report)
        return report

    async def models(self) -> list[dict[str, Any]]:
        """The cards of /v1/models: the base first, then its adapters."""
        cards: list[dict[str, Any]] = (await self._get("/v1/models", _Cards))["data"]
        return cards

    async def model(self, name: str) -> dict[str, Any]:
        """One card. Raises MloraError where the name is unknown."""
        card: dict[str, Any] = await self._get(f"/v1/models/{path_segment(name)}", _Card)
        return card

    async def adapters(self) -> list[dict[str, Any]]:
        """Every registered adapter with its tier and counters."""
        rows: list[dict[str, Any]] = (await self.listing())["data"]
        return rows

    async def listing(self) -> dict[str, Any]:
        """The adapters, and what requests found since the server started."""
        reply: dict[str, Any] = await self._get("/v1/lora_adapters", _Listing)
        return reply

    async def chat(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Pieces of the answer as they come. Raises MloraError, also in mid-stream."""
        whole = False
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True}
            ) as response:
                if response.is_error:
                    raise _error_of(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        whole = True
                    elif line.startswith("data: "):
                        for piece in _pieces(json.loads(line[6:])):
                            yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise self._stranger() from None
        if not whole:
            raise Unreachable(f"{self.url}: the answer was cut off")

    def _stranger(self) -> Unreachable:
        return Unreachable(
            f"{self.url}: what answers is no mlora server",
            hint="name the address that mlora serve printed",
        )

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        return Unreachable(
            f"{self.url}: {reason_of(error)}",
            hint="is the server running? start it with: mlora serve",
        )


def _pieces(chunk: dict[str, Any]) -> list[str]:
    if "error" in chunk:
        raise MloraError(str(chunk["error"].get("message", "the server reported an error")))
    return [text for c in chunk.get("choices", ()) if (text := c.get("delta", {}).get("content"))]


def path_segment(name: str) -> str:
    """A name as one part of a path, so that no `..` in it can lead to another route."""
    return quote(name, safe="")


def _error_of(status: int, body: bytes) -> MloraError:
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message, code = f"the server answered {status}", None
    if code in _REFUSALS:
        return Refused(message)
    if status in (401, 403):
        return BadInput(message, hint="give a key: --api-key or MLORA_API_KEY")
    if code == "model_not_found":
        return UnknownName(message, hint="mlora list shows the names")
    return Unreachable(message) if status >= 500 else BadInput(message)

"""One OpenAI-style server under measurement: what it lists, and its load and unload routes."""

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp

from multilora_cli.bench.load import Load, LoadResult, PlannedRequest
from multilora_cli.bench.loadgen import run_load
from multilora_cli.bench.stream import error_message
from multilora_cli.errors import BadInput, MloraError, Unreachable, reason_of


@dataclass(frozen=True)
class Adapter:
    """An adapter as its server lists it; what the server does not tell is None."""

    name: str
    path: str | None = None
    rank: int | None = None
    tier: str | None = None
    requests: int | None = None
    hits: int | None = None
    loads: int | None = None


@dataclass(frozen=True)
class Fleet:
    """What a server serves: its base, its adapters, its context in tokens where it tells."""

    base: str
    adapters: tuple[Adapter, ...]
    max_model_len: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters, in the server's order."""
        return tuple(adapter.name for adapter in self.adapters)

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of every adapter whose rank the server tells."""
        return {a.name: a.rank for a in self.adapters if a.rank is not None}


class Served(Protocol):
    """What is measured: a server, or an engine in this process. All methods raise MloraError."""

    url: str

    async def fleet(self, base_name: str | None = None) -> Fleet:
        """Base and adapters, with what is known of each."""
        ...

    async def drive(self, requests: Sequence[PlannedRequest], load: Load) -> LoadResult:
        """Send every request and wait for every answer; a failed one is a record, never a raise."""
        ...

    async def load(self, name: str, path: str, *, inplace: bool = False) -> None:
        """Load an adapter, or with `inplace` replace it."""
        ...

    async def unload(self, name: str) -> None:
        """Forget an adapter."""
        ...

    async def evict(self, name: str, *, cold: bool = False) -> None:
        """Move an adapter to host memory, or out of it too."""
        ...


def raise_file_limit() -> None:
    """Let this process have as many connections as the system allows; 1024 is a common default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def public_url(url: str) -> str:
    """`url` without user name, password and query, fit for a report."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Target:
    """An HTTP session with one server; use as an async context manager."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Target":
        # No limit on connections: how many are open is what the load decides.
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, connect=60.0),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("the target is not open: use it as an async context manager")
        return self._session

    async def fleet(self, base_name: str | None = None) -> Fleet:
        """Base and adapters, with rank, tier and counters where the server tells. MloraError.

        Adapters are the models that name a parent; where none does, all models but the base.
        """
        cards = (await self._json("GET", "/v1/models")).get("data")
        if not isinstance(cards, list) or not cards or not all(map(_is_card, cards)):
            raise BadInput(f"{self.url}: /v1/models lists no model, so it cannot be measured")
        base = self._base(cards, base_name)
        others = [card for card in cards if card.get("parent")] or cards
        rows = await self._rows()
        adapters = tuple(
            _adapter(card, rows.get(card["id"], {})) for card in others if card["id"] != base["id"]
        )
        length = base.get("max_model_len")
        return Fleet(str(base["id"]), adapters, length if isinstance(length, int) else None)

    def _base(self, cards: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
        if name is None:
            return next((card for card in cards if not card.get("parent")), cards[0])
        for card in cards:
            if card["id"] == name:
                return card
        raise BadInput(
            f"--model {name}: {public_url(self.url)} does not list it",
            hint=f"it lists: {', '.join(str(card['id']) for card in cards[:5])}",
        )

    async def drive(self, requests: Sequence[PlannedRequest], load: Load) -> LoadResult:
        """Put a load on the server."""
        return await run_load(self, requests, load)

    async def load(self, name: str, path: str, *, inplace: bool = False) -> None:
        """vLLM's route to load, or with `inplace` to replace, an adapter. Raises MloraError."""
        body: dict[str, Any] = {"lora_name": name, "lora_path": path}
        if inplace:
            body["load_inplace"] = True
        await self._json("POST", "/v1/load_lora_adapter", body)

    async def unload(self, name: str) -> None:
        """vLLM's route to unload an adapter. Raises MloraError."""
        await self._json("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def evict(self, name: str, *, cold: bool = False) -> None:
        """Our own route to move an adapter to host memory, or out of it too. Raises MloraError."""
        await self._json("POST", f"/v1/adapters/{quote(name)}/evict", {"cold": cold})

    async def _rows(self) -> dict[str, dict[str, Any]]:
        """Our own listing by adapter name; empty where the server has none."""
        try:
            rows = (await self._json("GET", "/v1/lora_adapters")).get("data")
        except BadInput:
            return {}
        if not isinstance(rows, list):
            return {}
        return {row["id"]: row for row in rows if _is_card(row)}

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            async with self.session.request(method, self.url + path, json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.unreachable(error) from None
        if response.status >= 400:
            raise error_of(response.status, raw, f"{self.url}{path}")
        try:
            value = json.loads(raw)
        except ValueError:
            return {}  # vLLM answers load and unload with a line of text
        return value if isinstance(value, dict) else {}

    def unreachable(self, error: BaseException) -> Unreachable:
        """The error for a server that does not answer."""
        return Unreachable(
            f"{public_url(self.url)}: {reason_of(error)}",
            hint="is the server running? start it with: mlora serve",
        )


def error_of(status: int, raw: bytes, where: str) -> MloraError:
    """The error that a server's answer stands for."""
    message = error_message(raw) or f"{public_url(where)}: the server answered {status}"
    if status in (401, 403):
        return BadInput(message, hint="give a key: --api-key or MLORA_API_KEY")
    return Unreachable(message) if status >= 500 else BadInput(message)


def _is_card(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("id"), str)


def _adapter(card: Mapping[str, Any], row: Mapping[str, Any]) -> Adapter:
    return Adapter(
        name=str(card["id"]),
        path=card.get("root") if isinstance(card.get("root"), str) else None,
        rank=_count(row, "rank"),
        tier=row.get("tier") if isinstance(row.get("tier"), str) else None,
        requests=_count(row, "requests"),
        hits=_count(row, "hits"),
        loads=_count(row, "loads"),
    )


def _count(row: Mapping[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

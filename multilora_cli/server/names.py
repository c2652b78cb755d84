"""From a requested name to its entry: registered, or found at the source of a name pattern.

Whoever asks for an unknown name costs a request at somebody's bucket: what was not found is
remembered for a while, one name is looked for once however many ask, and only so many names are
looked for, or known, at a time.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest
from multilora_cli.adapters.registry import Registry
from multilora_cli.errors import AdapterError, MloraError, RequestError
from multilora_cli.fleet.pattern import NamePattern, covering
from multilora_cli.server.contract import about_adapter, unavailable
from multilora_cli.server.protocol import model_not_found
from multilora_cli.server.threads import Threads

_log = logging.getLogger(__name__)
# Of an AdapterError: there is no such adapter, or none could ever have this name.
_UNKNOWN = frozenset({"missing", "name", "name_taken", "address", "not_a_folder"})


@dataclass(frozen=True)
class NameLimits:
    """Bounds on names of patterns. Times in seconds."""

    known: int = 10_000  # resolved names kept at a time
    searches: int = 256  # running and waiting at a time
    misses: int = 10_000  # names that were not found, remembered
    miss_s: float = 30.0  # for so long
    wait_s: float = 60.0  # a request waits so long for a name


@dataclass(frozen=True)
class _Miss:
    until: float  # monotonic
    detail: str  # empty: there is no such adapter


class Names:
    """The registry, and the patterns behind it. Belongs to the event loop."""

    def __init__(
        self,
        registry: Registry,
        threads: Threads,
        patterns: tuple[NamePattern, ...] = (),
        limits: NameLimits | None = None,
    ) -> None:
        self._registry = registry
        self._threads = threads
        self._limits = limits or NameLimits()
        self.patterns = patterns
        self._misses: OrderedDict[str, _Miss] = OrderedDict()
        self._searches: dict[str, asyncio.Task[AdapterEntry]] = {}
        self._used: dict[str, float] = {}  # monotonic, by name
        self.fetched: Callable[[float], None] = lambda seconds: None  # one came from its origin
        self.make_room: Callable[[], Awaitable[bool]] = _no_room  # forget idle resolved names

    async def find(self, name: str) -> AdapterEntry:
        """The entry of `name`, failed or not. Raises RequestError 404, 503."""
        entry = self._registry.get(name)
        if entry is None:
            entry = await self._search(name)
        return entry

    def touch(self, name: str) -> None:
        """Somebody uses it."""
        self._used[name] = time.monotonic()

    def idle_s(self, name: str) -> float | None:
        """Seconds since somebody used it; None: nobody did."""
        used = self._used.get(name)
        return None if used is None else max(time.monotonic() - used, 0.0)

    def forget(self, name: str) -> None:
        """It is gone."""
        self._used.pop(name, None)

    def ttl_of(self, name: str) -> float | None:
        """What the pattern that covers the name says, in seconds."""
        covered = covering(self.patterns, name)
        return covered[0].ttl if covered is not None else None

    def replace_patterns(self, patterns: tuple[NamePattern, ...]) -> None:
        """Other patterns: what was not found may be there now."""
        self.patterns = patterns
        self._misses.clear()

    async def _search(self, name: str) -> AdapterEntry:
        covered = covering(self.patterns, name)
        if covered is None:
            raise model_not_found(name)
        search = self._searches.get(name.lower())
        if search is None:
            self._check_miss(name)
            search = self._start(name, *covered)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                entry = await asyncio.shield(search)
        except TimeoutError:
            raise unavailable("adapter_loading", f"adapter {name} is being fetched", 5) from None
        if entry.name != name:
            raise model_not_found(name)
        return entry

    def _check_miss(self, name: str) -> None:
        miss = self._misses.get(name)
        if miss is None:
            return
        left = miss.until - time.monotonic()
        if left <= 0:
            del self._misses[name]
        elif miss.detail:
            raise unavailable("adapter_unavailable", miss.detail, left)
        else:
            raise model_not_found(name)

    def _start(self, name: str, pattern: NamePattern, source: str) -> "asyncio.Task[AdapterEntry]":
        if len(self._searches) >= self._limits.searches:
            raise unavailable("server_is_overloaded", "too many new adapters at once", 2)
        search = asyncio.get_running_loop().create_task(self._resolve(name, pattern, source))
        self._searches[name.lower()] = search
        search.add_done_callback(lambda task: self._ended(name, task))
        return search

    async def _resolve(self, name: str, pattern: NamePattern, source: str) -> AdapterEntry:
        if self._registry.num_resolved >= self._limits.known and not await self.make_room():
            raise unavailable("server_is_overloaded", "too many adapters are in use", 2)
        request = AdapterRequest(
            name, source, priority=pattern.priority, ttl=pattern.ttl, via="pattern"
        )
        began_s = time.monotonic()
        try:
            done = await self._threads.run(self._register, request, pattern)
        except AdapterError as error:
            if error.reason in _UNKNOWN:
                self._remember(name, "")
                raise model_not_found(name) from None
            raise self._cannot(name, error, source) from None
        except MloraError as error:
            raise self._cannot(name, error, source) from None
        if not pattern.is_local:
            self.fetched(time.monotonic() - began_s)
        self.touch(name)
        return done

    def _register(self, request: AdapterRequest, pattern: NamePattern) -> AdapterEntry:
        if pattern.is_local:
            root = os.path.realpath(pattern.root)
            folder = os.path.realpath(request.source)
            if not Path(folder).is_relative_to(root):  # by a link
                raise AdapterError(f"{request.name}: leaves its folder", reason="missing")
        return self._registry.register(request).entry

    def _cannot(self, name: str, error: MloraError, source: str) -> RequestError:
        _log.warning("%s", error.of_adapter(name))
        detail = about_adapter(name, error.message, (source,))
        self._remember(name, detail)
        return unavailable("adapter_unavailable", detail)

    def _remember(self, name: str, detail: str) -> None:
        self._misses[name] = _Miss(time.monotonic() + self._limits.miss_s, detail)
        while len(self._misses) > self._limits.misses:
            self._misses.popitem(last=False)

    def _ended(self, name: str, task: "asyncio.Task[AdapterEntry]") -> None:
        self._searches.pop(name.lower(), None)
        if not task.cancelled():
            task.exception()  # those who waited have seen it; perhaps nobody waits any more


async def _no_room() -> bool:
    return False

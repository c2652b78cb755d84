"""The adapters as requests see them: names to exact versions, loading, unloading, keeping."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from multilora_cli.adapters.entry import AdapterEntry, Candidate, Pin
from multilora_cli.adapters.registry import Registry
from multilora_cli.engine.messages import AdapterRef, AdapterStatus, Reply
from multilora_cli.errors import AdapterError, AdapterUnavailable, MloraError, RequestError
from multilora_cli.fleet.schema import is_adapter_name
from multilora_cli.server.bodies import EvictBody, LoadBody, UnloadBody, WarmBody
from multilora_cli.server.changes import RuntimeChanges, ServedFleet
from multilora_cli.server.client import EngineClient
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.contract import about_adapter, fault_error, unavailable
from multilora_cli.server.listing import adapter_row, listing, status_of
from multilora_cli.server.long_replies import in_turns, json_array
from multilora_cli.server.movements import Movements
from multilora_cli.server.names import NameLimits, Names
from multilora_cli.server.protocol import duration, model_not_found
from multilora_cli.server.threads import Threads

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
_ABSENT = frozenset({"missing", "ambiguous"})  # reasons of an AdapterError: no adapter there
_DRAIN_WAIT_S = 5.0  # an unload answers after this, even if streams still hold the adapter
_THREADS = 8  # that read and fetch adapters; never those that tokenize
_FRESH_S = 2.0  # a name just asked for stays: its request may not have reached the engine
_FORGOTTEN = 64  # resolved names that make room together, so that finding them is paid for once


class Adapters:
    """Keeps registry and engine in step."""

    def __init__(
        self,
        registry: Registry,
        client: EngineClient,
        config: ServerConfig,
        changes: RuntimeChanges | None = None,
    ) -> None:
        self.registry = registry
        self.changes = changes or RuntimeChanges(ServedFleet())
        self.client = client
        self.config = config
        self.movements = Movements()
        client.on_adapter.append(self.movements.told)
        self._threads = Threads(_THREADS)
        self._fetching = Threads(_THREADS)  # a slow origin delays no reading of what is here
        limits = NameLimits(known=config.max_resolved, wait_s=config.limits.load_s)
        self.names = Names(registry, self._fetching, self.changes.fleet.patterns, limits)
        self.names.make_room = self._forget_idle
        self.names.fetched = self.movements.fetched
        # One call a name at a time; a lock lives as long as somebody holds or awaits it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_unload: list[Callable[[str], None]] = []
        self.on_retired: list[Callable[[], None]] = []  # a version is served no more

    def close(self) -> None:
        """Start nothing more."""
        for task in self._tasks:
            task.cancel()

    async def resolve(self, name: str) -> AdapterEntry:
        """The version a request is served with. Raises RequestError 404, never the base."""
        entry = await self.names.find(name)
        self.names.touch(name)
        if entry.digest is not None and entry.state == "ready":
            return entry
        try:
            return await self.in_thread(lambda: self.registry.with_digest(name))
        except (AdapterError, AdapterUnavailable) as error:
            raise _cannot(name, error, (entry.path, entry.source)) from None

    # ---- load and unload

    async def load(self, body: LoadBody) -> str:
        """Register and make warm; vLLM's words on success. Raises RequestError.

        The new version is read, checked and converted beside the one that is served, and takes the
        name only then.
        """
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise _vllm_error("Both 'lora_name' and 'lora_path' must be provided.")
        if body.is_3d_lora_weight:
            raise _vllm_error("is_3d_lora_weight: adapters of fused experts are not supported.")
        if not is_adapter_name(name):
            raise _vllm_error(
                "lora_name: expected letters, digits, '.', '_' and '-', at most two parts joined"
                " by '/'."
            )
        async with self.lock(name):
            await self._load(name, path, body)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadBody) -> tuple[str, Reply | None]:
        """Forget a name, free what it held; vLLM's words and what the engine freed."""
        name = body.lora_name
        if not name:
            raise _vllm_error("'lora_name' needs to be provided to unload a LoRA adapter.")
        if self.registry.get(name) is None:
            shown = f" '{name}'" if is_adapter_name(name) else ""
            raise _vllm_error(f"The lora adapter{shown} cannot be found.", 404)
        async with self.lock(name):
            gone = self._unregister(name, body.expected_generation)
            self.forgotten(name)
            await self.changes.note(name, None)
            freed = await self.free(gone.digest)
        return f"Success: LoRA adapter '{name}' removed successfully.", freed

    def lock(self, name: str) -> asyncio.Lock:
        """Held while a name changes."""
        return self._locks.setdefault(name, asyncio.Lock())

    def forgotten(self, name: str) -> None:
        """A name is gone from the registry."""
        self.names.forget(name)
        for forget in self.on_unload:
            forget(name)
        self.retired()

    def retired(self) -> None:
        """Some version may be served no more: what was kept for it goes."""
        for told in self.on_retired:
            told()

    async def free(self, digest: str | None) -> Reply | None:
        """Evict a digest that no name has any more, here and on disk; what the engine freed."""
        if digest is None or self.registry.holds(digest):
            return None
        try:
            reply = await self.client.forget(digest, _DRAIN_WAIT_S)
        except RequestError:
            self.background(self._free_later(digest))
            return None  # draining goes on in the engine, or the engine is gone and holds nothing
        self._gone(digest, reply)
        return reply

    async def _free_later(self, digest: str) -> None:
        """Its folder is not read any more once the requests that hold it have ended."""
        while not self.registry.holds(digest):
            try:
                reply = await self.client.forget(digest, self.config.limits.request_s)
            except RequestError:
                if self.client.state in ("draining", "stopped"):
                    return
                await asyncio.sleep(_DRAIN_WAIT_S)
            else:
                self._gone(digest, reply)
                return

    def _gone(self, digest: str, reply: Reply) -> None:
        """Nothing of it is held or read any more."""
        self.registry.release(digest)
        self.movements.sent_away("retired", reply)
        self.movements.forget(digest)

    async def verify(self, candidate: Candidate, pin: Pin | None = None) -> None:
        """Let the engine read every byte of a version that nobody is served with yet.

        Raises RequestError; the candidate is then discarded, and nothing of it stays.
        """
        digest = candidate.entry.digest
        try:
            await self._make_warm(candidate.entry, pin)
        except RequestError:
            self.registry.discard(candidate)
            await self.free(digest)
            raise

    async def _load(self, name: str, path: str, body: LoadBody) -> None:
        old = self.registry.get(name)
        if old is not None and old.state == "ready" and not body.load_inplace:
            raise _exists(name)
        self.client.check_admission()
        pin: Pin | None = "hot" if body.pinned else None
        try:
            candidate = await self.in_thread(lambda: self._candidate(name, path, body, old))
        except AdapterError as error:
            raise _exists(name) if error.reason == "adapter_exists" else _refused(error) from None
        kept = candidate.entry.pin
        try:
            await self.verify(candidate, pin if kept == pin else None)
        except RequestError as error:
            raise _vllm_error(error.message, error.status) from None
        try:
            (done,) = self.registry.enter((candidate,))
        except AdapterError as error:
            self.registry.discard(candidate)
            raise _refused(error) from None
        self.names.touch(name)
        self.retired()
        await self.changes.note(name, done.entry)
        if done.previous is not None and done.previous.digest != done.entry.digest:
            await self.free(done.previous.digest)
        if kept is not None and kept != pin:  # what was pinned stays pinned
            await self._make_warm(done.entry, kept)

    def _candidate(
        self, name: str, path: str, body: LoadBody, old: AdapterEntry | None
    ) -> Candidate:
        request = self.registry.from_client(name, path, "hot" if body.pinned else None)
        if old is not None:
            pin = request.pin or old.pin
            request = replace(old.request, source=request.source, pin=pin, digest=None, via="api")
        return self.registry.candidate(
            request,
            replacing=body.load_inplace,
            expected_generation=body.expected_generation,
            digested=True,
        )

    async def _make_warm(self, entry: AdapterEntry, pin: Pin | None) -> None:
        reply = await self.client.load(
            AdapterRef.of(entry),
            pin=pin,
            priority=entry.priority,
            timeout_s=self.config.limits.load_s,
        )
        if reply.fault is not None:
            if reply.fault.code in ("adapter_unavailable", "adapter_refused"):  # its content
                raise RequestError(reply.fault.message)
            raise fault_error(reply.fault)
        if reply.status is not None:
            self.client.statuses[reply.status.digest] = reply.status

    def _unregister(self, name: str, expected_generation: int | None) -> AdapterEntry:
        try:
            return self.registry.unregister(name, expected_generation)
        except AdapterError as error:
            raise _refused(error) from None
        except RequestError:  # gone since it was looked up
            raise _vllm_error(f"The lora adapter '{name}' cannot be found.", 404) from None

    async def _forget_idle(self) -> bool:
        """Names of patterns that nobody uses make room for new ones; False: all are used."""
        await self.client.query()
        idle = [
            (idle_s, entry)
            async for entry in in_turns(self.registry.entries())
            if (idle_s := self._forgettable_s(entry)) is not None
        ]
        idle.sort(key=lambda pair: pair[0], reverse=True)
        for _, entry in idle[:_FORGOTTEN]:
            is_there = self.registry.get(entry.name) is entry
            if is_there and self._forgettable_s(entry) is not None:  # still: others had their turn
                self.registry.unregister(entry.name)
                self.forgotten(entry.name)
                self.background(self.free(entry.digest))
        return bool(idle)

    def _forgettable_s(self, entry: AdapterEntry) -> float | None:
        """How long nobody has used a name of a pattern that nothing keeps; None: it stays."""
        if entry.request.via != "pattern" or entry.pin is not None:
            return None
        idle_s = self.names.idle_s(entry.name) or 0.0
        is_used = idle_s < _FRESH_S or status_of(entry, self.client.statuses).references
        return None if is_used else idle_s

    # ---- tiers

    async def warm(self, name: str, body: WarmBody, counts: Mapping[str, int]) -> dict[str, Any]:
        """Bring an adapter up to host memory, or to the device; its row. Raises RequestError.

        One that could not be had is tried again.
        """
        ttl = duration(body.ttl, "ttl")
        entry = await self.names.find(name)
        async with self.lock(name):
            if entry.state == "failed":
                await self.retry(name)
            ref = await self._known(name)
            tier: Pin = "hot" if body.hot else "warm"
            pin = tier if body.pin else None
            reply = await self.client.load(
                ref, hot=body.hot, pin=pin, timeout_s=self.config.limits.load_s
            )
            if reply.fault is not None:
                raise fault_error(reply.fault)
            if pin is not None or ttl is not None:
                await self.keep(name, pin or entry.pin, ttl or entry.request.ttl)
        return self._moved(name, reply, counts)

    async def evict(self, name: str, body: EvictBody, counts: Mapping[str, int]) -> dict[str, Any]:
        """Move an adapter down once its requests have ended; its row and what became free.

        Its own pin ends with `unpin`, also where its pages stay because another name of the same
        content has pinned them: `kept_by` says which. Raises RequestError.
        """
        if self.registry.get(name) is None:  # what no one asked for yet has nothing to free
            raise model_not_found(name)
        async with self.lock(name):
            entry = self.registry.get(name)
            if entry is None:
                raise model_not_found(name)
            other = None if entry.digest is None else self._pinned_by(name, entry.digest)
            ends_pin = body.unpin and entry.pin is not None
            if entry.digest is None or (other is not None and ends_pin):
                # Never used, or kept by another name: nothing moves. Between the look at that name
                # and the end of this pin nothing runs, so the last of several names frees them.
                if body.unpin:
                    await self.keep(name, None, self.declared_ttl(name))
                kept_by = {} if other is None else {"kept_by": other.name}
                row = self._row(self.registry.get(name) or entry, counts)
                return {**row, "freed_pages": 0, "freed_host_bytes": 0, **kept_by}
            self._check_shared_pin(name, entry.digest)
            reply = await self.client.evict(
                entry.digest,
                to="cold" if body.cold else "warm",
                unpin=body.unpin,
                timeout_s=self.config.limits.load_s,
            )
            if reply.fault is not None:
                raise fault_error(reply.fault)
            self.movements.sent_away("operator", reply)
            if body.unpin:
                await self.keep(name, None, self.declared_ttl(name))
        row = self._moved(name, reply, counts)
        return {
            **row,
            "freed_pages": reply.freed_pages,
            "freed_host_bytes": reply.freed_host_bytes,
        }

    async def keep(self, name: str, pin: Pin | None, ttl: float | None) -> None:
        """Remember where and how long an adapter is kept, over a restart too."""
        entry = self.registry.set_kept(name, pin, ttl)
        if entry is not None:
            await self.changes.note(name, entry)

    def declared_ttl(self, name: str) -> float | None:
        """What the fleet file says about the name's time to live, in seconds."""
        declared = self.changes.fleet.requests.get(name)
        return declared.ttl if declared is not None else self.names.ttl_of(name)

    async def retry(self, name: str) -> None:
        """Ask the source of a failed adapter again. Raises RequestError with what is wrong."""
        try:
            await self.fetching(lambda: self.registry.retry(name))
        except (AdapterError, AdapterUnavailable) as error:
            raise _cannot(name, error) from None

    async def load_pinned(self) -> None:
        """Bring pinned adapters back where they belong, after every start of the engine."""
        await self.pin(entry for entry in self.registry.entries() if entry.pin is not None)

    async def pin(self, entries: Iterable[AdapterEntry]) -> None:
        """Bring some adapters where they are pinned; what goes wrong is logged."""
        for entry in entries:
            if entry.state == "failed":
                continue
            try:
                ref = AdapterRef.of(await self.in_thread(self.registry.with_digest, entry.name))
                reply = await self.client.load(
                    ref,
                    pin=entry.pin,
                    priority=entry.priority,
                    timeout_s=self.config.limits.load_s,
                )
                wrong = None if reply.fault is None else reply.fault.message
            except MloraError as error:
                wrong = error.message
            if self.client.state != "ready":  # the server ends, or the next start pins them all
                return
            if wrong is not None:
                _log.error("adapter %s is not pinned: %s", entry.name, wrong)

    async def unpin(self, entry: AdapterEntry) -> None:
        """The engine may move it again; what goes wrong is logged."""
        if entry.digest is None:
            return
        try:
            self._check_shared_pin(entry.name, entry.digest)
            await self.client.evict(
                entry.digest, to="warm", unpin=True, timeout_s=self.config.limits.load_s
            )
        except RequestError as error:
            _log.error("adapter %s stays pinned: %s", entry.name, error.message)

    async def _known(self, name: str) -> AdapterRef:
        return AdapterRef.of(await self.resolve(name))

    def _check_shared_pin(self, name: str, digest: str) -> None:
        """What another name has pinned does not leave by this one."""
        other = self._pinned_by(name, digest)
        if other is not None:
            raise RequestError(
                f"adapter {name} is the same content as {other.name}, which is pinned {other.pin}",
                code="adapter_refused",
            )

    def _pinned_by(self, name: str, digest: str) -> AdapterEntry | None:
        """Another name of the same content that is pinned."""
        for entry in self.registry.of_digest(digest):
            if entry.name != name and entry.pin is not None:
                return entry
        return None

    def _moved(self, name: str, reply: Reply, counts: Mapping[str, int]) -> dict[str, Any]:
        if reply.status is not None:
            self.client.statuses[reply.status.digest] = reply.status
        entry = self.registry.get(name)
        if entry is None:
            raise model_not_found(name)
        return self._row(entry, counts)

    # ---- what is shown

    async def listing(
        self,
        counts: Mapping[str, int],
        allows: Callable[[str], bool] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> list[bytes]:
        """Adapters with tier, pages and use, JSON in pieces; `counts` are their requests so far,
        `facts` are said beside them.

        With `allows` only those that it is true for, and what the engine holds of them.
        """
        entries = self.registry.entries()
        shown = (entry for entry in entries if allows is None or allows(entry.name))
        rows = await json_array(shown, lambda entry: self._row(entry, counts))
        return await listing(rows, self._held(allows), facts or {})

    def _held(
        self, allows: Callable[[str], bool] | None
    ) -> Iterator[tuple[AdapterStatus, list[AdapterEntry]]]:
        """The versions that the engine holds, each with the names that stand for it."""
        for status in self.client.statuses.held:
            entries = self.registry.of_digest(status.digest)
            own = [entry for entry in entries if allows is None or allows(entry.name)]
            if own or allows is None:
                yield status, own

    def fleet_facts(self) -> dict[str, Any]:
        """What the listing says of the fleet as a whole: `max_adapters` may run in one step, of at
        most `max_rank`; host memory holds `max_bytes`."""
        return {
            "max_adapters": self.config.max_loras,
            "max_rank": self.registry.base.max_rank,
            "max_bytes": self.config.host_adapter_bytes,
            "patterns": [
                {"pattern": pattern.pattern, "source": pattern.source}
                for pattern in self.names.patterns
            ],
            "unsaved": self.changes.unsaved or None,
        }

    def _row(self, entry: AdapterEntry, counts: Mapping[str, int]) -> dict[str, Any]:
        status = status_of(entry, self.client.statuses)
        idle_s = self.names.idle_s(entry.name)
        return adapter_row(entry, status, idle_s, counts.get(entry.name, 0))

    # ---- inside

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run what reads files off the event loop."""
        return await self._threads.run(function, *arguments)

    async def fetching(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run what may ask an origin off the event loop."""
        return await self._fetching.run(function, *arguments)

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _exists(name: str) -> RequestError:
    return _vllm_error(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in"
        " place, set 'load_inplace' to True."
    )


def _cannot(name: str, error: MloraError, places: Iterable[str] = ()) -> RequestError:
    return unavailable("adapter_unavailable", about_adapter(name, error.message, places))


def _refused(error: AdapterError) -> RequestError:
    """In vLLM's words: 404 where there is no such adapter, 400 where it cannot be served."""
    message = error.message + (f" ({error.hint})" if error.hint else "")
    return _vllm_error(message, 404 if error.reason in _ABSENT else 400)


def _vllm_error(message: str, status: int = 400) -> RequestError:
    """vLLM's error object: the code is the status, the type one of its two words."""
    kinds = {400: "InvalidUserInput", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError" if status == 500 else "ServiceUnavailable")
    return RequestError(message, status=status, code=str(status), kind=kind)

"""The adapters as requests see them: names to exact versions, loading, unloading, the list."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from multilora_cli.adapters.registry import AdapterEntry, Pin, Registry
from multilora_cli.engine.messages import AdapterRef, AdapterStatus, Reply
from multilora_cli.errors import AdapterError, AdapterUnavailable, RequestError
from multilora_cli.fleet.schema import is_adapter_name
from multilora_cli.server.bodies import EvictBody, LoadBody, UnloadBody, WarmBody
from multilora_cli.server.client import EngineClient
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.contract import fault_error, unavailable
from multilora_cli.server.protocol import model_not_found

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
_DRAIN_WAIT_S = 5.0  # an unload answers after this, even if streams still hold the adapter


class Adapters:
    """Keeps registry and engine in step."""

    def __init__(
        self, registry: Registry, client: EngineClient, config: ServerConfig, pool: Executor
    ) -> None:
        self.registry = registry
        self._client = client
        self._config = config
        self._pool = pool
        # One call a name at a time; a lock lives as long as somebody holds or awaits it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.on_unload: list[Callable[[str], None]] = []

    async def resolve(self, name: str | None) -> AdapterRef | None:
        """The version a request is served with. Raises RequestError 404, never the base."""
        if name is None:
            return None
        entry = self.registry.get(name)
        if entry is None:
            raise model_not_found(name)
        if entry.digest is not None and entry.state == "ready":
            return _ref(entry)
        try:
            return _ref(await self._in_thread(lambda: self.registry.with_digest(name)))
        except (AdapterError, AdapterUnavailable) as error:
            raise unavailable("adapter_unavailable", f"adapter {name}: {error.message}") from None

    async def load(self, body: LoadBody) -> str:
        """Register and make warm; vLLM's words on success. Raises RequestError."""
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
        async with self._locks.setdefault(name, asyncio.Lock()):
            await self._load(name, path, body)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadBody) -> tuple[str, Reply | None]:
        """Forget a name, free what it held; vLLM's words and what the engine freed."""
        name = body.lora_name
        if not name:
            raise _vllm_error("'lora_name' needs to be provided to unload a LoRA adapter.")
        entry = self.registry.get(name)
        if entry is None:
            shown = f" '{name}'" if is_adapter_name(name) else ""
            raise _vllm_error(f"The lora adapter{shown} cannot be found.", 404)
        async with self._locks.setdefault(name, asyncio.Lock()):
            gone = self._unregister(name, body.expected_generation)
            for forget in self.on_unload:
                forget(name)
            freed = await self._free(gone.digest)
        return f"Success: LoRA adapter '{name}' removed successfully.", freed

    async def warm(self, name: str, body: WarmBody, counts: Mapping[str, int]) -> dict[str, Any]:
        """Bring an adapter up to host memory, or to the device; its row. Raises RequestError."""
        ref = await self._known(name)
        tier: Pin = "hot" if body.hot else "warm"
        pin = tier if body.pin else None
        reply = await self._client.load(
            ref, hot=body.hot, pin=pin, timeout_s=self._config.limits.load_s
        )
        if reply.fault is not None:
            raise fault_error(reply.fault)
        if pin is not None:
            self.registry.set_pin(name, pin)
        return self._moved(name, reply, counts)

    async def evict(self, name: str, body: EvictBody, counts: Mapping[str, int]) -> dict[str, Any]:
        """Move an adapter down once its requests have ended; its row and what became free."""
        ref = await self._known(name)
        reply = await self._client.evict(
            ref.digest,
            to="cold" if body.cold else "warm",
            unpin=body.unpin,
            timeout_s=self._config.limits.load_s,
        )
        if reply.fault is not None:
            raise fault_error(reply.fault)
        if body.unpin:
            self.registry.set_pin(name, None)
        row = self._moved(name, reply, counts)
        return {
            **row,
            "freed_pages": reply.freed_pages,
            "freed_host_bytes": reply.freed_host_bytes,
        }

    async def _known(self, name: str) -> AdapterRef:
        ref = await self.resolve(name)
        assert ref is not None, "a route's name is never empty"
        return ref

    def _moved(self, name: str, reply: Reply, counts: Mapping[str, int]) -> dict[str, Any]:
        if reply.status is not None:
            self._client.statuses[reply.status.digest] = reply.status
        entry = self.registry.get(name)
        if entry is None:
            raise model_not_found(name)
        return self._row(entry, counts)

    async def load_pinned(self) -> None:
        """Bring pinned adapters back where they belong, after every start of the engine."""
        for entry in self.registry.entries():
            if entry.pin is None or entry.state == "failed":
                continue
            try:
                ref = await self.resolve(entry.name)
                if ref is not None:
                    load_s = self._config.limits.load_s
                    reply = await self._client.load(
                        ref, pin=entry.pin, priority=entry.priority, timeout_s=load_s
                    )
                    if reply.fault is not None:
                        _log.error("adapter %s is not pinned: %s", entry.name, reply.fault.message)
            except RequestError as error:
                _log.error("adapter %s is not pinned: %s", entry.name, error.message)

    def names(self) -> dict[str, str]:
        """Digest to name, of what has a digest."""
        return {e.digest: e.name for e in self.registry.entries() if e.digest is not None}

    def listing(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Every adapter with tier, pages and use; `counts` are its requests so far.

        `generations` are the versions that the engine holds, those without a name included: they
        are retired, and go when their last request ends.
        """
        entries = self.registry.entries()
        by_digest: dict[str, list[AdapterEntry]] = {}
        for entry in entries:
            if entry.digest is not None:
                by_digest.setdefault(entry.digest, []).append(entry)
        held = [
            status for status in self._client.statuses.values() if status.tier in ("warm", "hot")
        ]
        generations = [_generation(status, by_digest.get(status.digest, [])) for status in held]
        return {
            "object": "list",
            "data": [self._row(entry, counts) for entry in entries],
            "generations": generations,
            "resident_generations": len(held),
            "retired_generations": sum(row["retired"] for row in generations),
            "resident_bytes": sum(status.host_bytes for status in held),
        }

    def _row(self, entry: AdapterEntry, counts: Mapping[str, int]) -> dict[str, Any]:
        # A digest is known once every byte was read: then a verified copy is on this machine.
        unheld = _COLD if entry.digest is None else _STORED
        status = self._client.statuses.get(entry.digest or "") or unheld
        failed = entry.state == "failed"
        return {
            "id": entry.name,
            "object": "lora_adapter",
            "generation": entry.generation,
            "rank": entry.rank,
            "modules": list(entry.modules),
            "bytes": entry.num_bytes,
            "source": entry.source,
            "revision": None,
            "digest": f"sha256:{entry.digest}" if entry.digest else None,
            "tier": "failed" if failed else status.tier,
            "detail": entry.detail if failed else status.detail,
            "pages": status.pages,
            "host_bytes": status.host_bytes,
            "pin": entry.pin,
            "priority": entry.priority,
            "pinned": status.pinned,
            "in_flight": status.references,
            "last_used_s": status.last_used_s if status.last_used_s >= 0 else None,
            "requests": counts.get(entry.name, 0),
            "hits": status.hits,
            "loads": status.loads,
        }

    async def _load(self, name: str, path: str, body: LoadBody) -> None:
        old = self.registry.get(name)
        if old is not None and old.state == "ready" and not body.load_inplace:
            raise _exists(name)
        self._client.check_admission()
        pin: Literal["hot"] | None = "hot" if body.pinned else None
        try:
            done = await self._in_thread(
                lambda: self.registry.load(
                    name,
                    path,
                    replacing=body.load_inplace,
                    expected_generation=body.expected_generation,
                    pin=pin,
                )
            )
        except AdapterError as error:
            raise _exists(name) if error.reason == "adapter_exists" else _refused(error) from None
        try:
            ref = await self._warm(name, pin)
        except RequestError as error:
            refused = self.registry.get(name)
            self.registry.take_back(done)
            await self._free(refused.digest if refused is not None else None)
            raise _vllm_error(error.message, error.status) from None
        if done.previous is not None and done.previous.digest != ref.digest:
            await self._free(done.previous.digest)

    async def _warm(self, name: str, pin: Literal["hot"] | None) -> AdapterRef:
        """Let the engine read every byte, so that a broken file is refused now."""
        try:
            ref = _ref(await self._in_thread(lambda: self.registry.with_digest(name)))
        except (AdapterError, AdapterUnavailable) as error:
            raise RequestError(error.message) from None
        reply = await self._client.load(ref, pin=pin, timeout_s=self._config.limits.load_s)
        if reply.fault is not None:
            if reply.fault.code in ("adapter_unavailable", "adapter_refused"):  # its content
                raise RequestError(reply.fault.message)
            raise fault_error(reply.fault)
        if reply.status is not None:
            self._client.statuses[ref.digest] = reply.status
        return ref

    def _unregister(self, name: str, expected_generation: int | None) -> AdapterEntry:
        try:
            return self.registry.unregister(name, expected_generation)
        except AdapterError as error:
            raise _refused(error) from None
        except RequestError:  # gone since it was looked up
            raise _vllm_error(f"The lora adapter '{name}' cannot be found.", 404) from None

    async def _free(self, digest: str | None) -> Reply | None:
        """Evict a digest that no name has any more."""
        if digest is None or digest in self.names():
            return None
        try:
            return await self._client.forget(digest, _DRAIN_WAIT_S)
        except RequestError:
            return None  # draining goes on in the engine, or the engine is gone and holds nothing

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


_COLD = AdapterStatus("", "cold", 0, 0, 0, False, 0, 0, -1.0)
_STORED = AdapterStatus("", "stored", 0, 0, 0, False, 0, 0, -1.0)


def _generation(status: AdapterStatus, entries: list[AdapterEntry]) -> dict[str, Any]:
    """A version that the engine holds, and the names that stand for it."""
    return {
        "generation": max((entry.generation for entry in entries), default=None),
        "digest": f"sha256:{status.digest}",
        "aliases": [entry.name for entry in entries],
        "rank": max((entry.rank for entry in entries), default=None),
        "bytes": status.host_bytes,
        "retired": not entries,
        "active_leases": status.references,
    }


def _ref(entry: AdapterEntry) -> AdapterRef:
    return AdapterRef(entry.name, entry.digest or "", entry.path, entry.generation)


def _exists(name: str) -> RequestError:
    return _vllm_error(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in"
        " place, set 'load_inplace' to True."
    )


def _refused(error: AdapterError) -> RequestError:
    return _vllm_error(error.message + (f" ({error.hint})" if error.hint else ""))


def _vllm_error(message: str, status: int = 400) -> RequestError:
    """vLLM's error object: the code is the status, the type one of its two words."""
    kinds = {400: "InvalidUserInput", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError" if status == 500 else "ServiceUnavailable")
    return RequestError(message, status=status, code=str(status), kind=kind)

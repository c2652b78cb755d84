"""What happens by itself: adapters go back to cold, sources that were down are asked again."""

import asyncio
import logging
import time

from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.errors import MloraError, RequestError
from multilora_cli.server.adapters import Adapters
from multilora_cli.server.listing import expires_in_s, status_of
from multilora_cli.server.long_replies import in_turns

_log = logging.getLogger(__name__)
PERIOD_S = 1.0
_RETRIES = 4  # sources asked again at the same time; the other threads stay for requests


class Upkeep:
    """Looks after a server's adapters once a second."""

    def __init__(self, adapters: Adapters, period_s: float = PERIOD_S) -> None:
        self._adapters = adapters
        self._period_s = period_s
        self._retrying: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.tick()
            except Exception:  # a fault in one round must not end the upkeep of all adapters
                _log.exception("upkeep of adapters failed")

    async def tick(self) -> None:
        """One look at every adapter."""
        registry = self._adapters.registry
        async for entry in in_turns(registry.entries()):
            if entry.state != "failed" and entry.request.ttl is None:
                continue
            if registry.get(entry.name) is not entry:  # changed while others had their turn
                continue
            if entry.state == "failed":
                self._retry_when_due(entry)
            elif self._adapters.client.state == "ready":
                await self._expire_when_due(entry)

    def _retry_when_due(self, entry: AdapterEntry) -> None:
        due = entry.retry_at is not None and entry.retry_at <= time.monotonic()
        if due and entry.name not in self._retrying and len(self._retrying) < _RETRIES:
            self._retrying.add(entry.name)
            self._adapters.background(self._retry(entry))

    async def _retry(self, entry: AdapterEntry) -> None:
        adapters = self._adapters
        try:
            async with adapters.lock(entry.name):
                ready = await adapters.fetching(adapters.registry.retry, entry.name)
        except MloraError as error:
            _log.warning("adapter %s: attempt %d: %s", entry.name, entry.attempts + 1, error)
        else:
            _log.info("adapter %s can be had again", entry.name)
            if ready.pin is not None and adapters.client.state == "ready":
                await adapters.pin((ready,))
        finally:
            self._retrying.discard(entry.name)

    async def _expire_when_due(self, entry: AdapterEntry) -> None:
        adapters = self._adapters
        status = status_of(entry, adapters.client.statuses)
        idle_s = adapters.names.idle_s(entry.name)
        if status.references or idle_s is None:
            adapters.names.touch(entry.name)
        elif expires_in_s(entry, status, idle_s) == 0:
            try:
                await self._expire(entry)
            except RequestError as error:
                _log.warning("adapter %s is not back to cold: %s", entry.name, error.message)

    async def _expire(self, entry: AdapterEntry) -> None:
        """Unpin it and free what it holds, as far as no other name of the same content stays."""
        adapters, name = self._adapters, entry.name
        others = [
            other
            for other in adapters.registry.of_digest(entry.digest or "")
            if other.name != name and other.state == "ready"
        ]
        async with adapters.lock(name):
            if entry.digest is not None and not any(other.pin for other in others):
                reply = await adapters.client.evict(
                    entry.digest,
                    to="warm" if any(map(self._stays, others)) else "cold",
                    unpin=True,
                    timeout_s=adapters.config.limits.load_s,
                )
                if reply.fault is not None:
                    raise RequestError(reply.fault.message)
                adapters.movements.sent_away("ttl", reply)
                if reply.status is not None:
                    adapters.client.statuses[entry.digest] = reply.status
            await self._unkeep(entry)
        _log.info("adapter %s: unused for %g s, back to cold", name, entry.request.ttl)

    def _stays(self, other: AdapterEntry) -> bool:
        """Whether another name of the same content has a right to where it is."""
        idle_s = self._adapters.names.idle_s(other.name)
        status = status_of(other, self._adapters.client.statuses)
        return expires_in_s(other, status, idle_s) != 0

    async def _unkeep(self, entry: AdapterEntry) -> None:
        """As the fleet file has it, but without a pin: that comes back with the next start."""
        adapters, ttl = self._adapters, self._adapters.declared_ttl(entry.name)
        declared = adapters.changes.fleet.requests.get(entry.name)
        if declared is not None and declared.pin is not None:
            adapters.registry.set_kept(entry.name, None, ttl)
        else:
            await adapters.keep(entry.name, None, ttl)

"""What the fleet file declares, and what operators changed since: merged at start, kept on disk.

One rule decides between file and operator, at a restart and in `mlora apply` alike: a change stands
as long as the file says about that adapter what it said when the change was made.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest
from multilora_cli.errors import FleetError
from multilora_cli.fleet.pattern import NamePattern, covering
from multilora_cli.fleet.schema import Adapter
from multilora_cli.fleet.statefile import Change, StateAdapter, StateFile
from multilora_cli.server.bodies import FleetAdapter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedFleet:
    """What a fleet file says, as a running server remembers it."""

    path: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # section.key -> value, as served
    written: Mapping[str, Any] = field(default_factory=dict)  # the same without command-line flags
    requests: Mapping[str, AdapterRequest] = field(default_factory=dict)  # by name
    patterns: tuple[NamePattern, ...] = ()


def request_of(adapter: Adapter | FleetAdapter) -> AdapterRequest:
    """The registry's request for an adapter of a fleet file, read here or sent by `mlora apply`."""
    return AdapterRequest(
        name=adapter.name,
        source=adapter.source,
        pin=adapter.pin,
        priority=adapter.priority,
        digest=adapter.digest,
        ttl=adapter.ttl,
        tokenizer=adapter.tokenizer,
        chat_template=adapter.chat_template,
    )


def by_name(requests: Iterable[AdapterRequest]) -> dict[str, AdapterRequest]:
    """Requests by their names."""
    return {request.name: request for request in requests}


def merge(
    fleet: ServedFleet, changes: Mapping[str, Change]
) -> tuple[list[AdapterRequest], dict[str, Change], list[str]]:
    """What to register, the changes that still stand, and a line for each that does not."""
    standing, notes = {}, []
    for name, change in changes.items():
        if _stands(name, change, fleet):
            standing[name] = change
        else:
            notes.append(
                f"adapter {name}: the fleet file has changed: what was done at run time is undone"
            )
    served = dict(fleet.requests)
    for name, change in standing.items():
        if change.adapter is not None:
            served[name] = AdapterRequest(name=name, **change.adapter.model_dump())
        else:
            del served[name]
    return list(served.values()), standing, notes


def _stands(name: str, change: Change, fleet: ServedFleet) -> bool:
    """Whether the file says about the name what it said when the change was made."""
    declared = fleet.requests.get(name)
    if change.declared != _fingerprint(declared) or (change.adapter is None and declared is None):
        return False
    if change.adapter is None or change.adapter.via != "pattern":
        return True
    covered = covering(fleet.patterns, name)
    return covered is not None and covered[1] == change.adapter.source


class RuntimeChanges:
    """The changes that stand, and the file that keeps them. Belongs to the event loop."""

    def __init__(
        self,
        fleet: ServedFleet,
        file: StateFile | None = None,
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        """`file`: None keeps nothing beyond this process."""
        self.fleet = fleet
        self._file = file
        self._changes = dict(changes or {})
        self._writing = asyncio.Lock()
        self._written = dict(self._changes)
        self.unsaved = ""  # why the last change is not on disk

    @property
    def names(self) -> frozenset[str]:
        """What differs from the file."""
        return frozenset(self._changes)

    async def note(self, name: str, entry: AdapterEntry | None) -> None:
        """`name` stands for `entry` now, or for nothing; on disk when this returns, or logged."""
        declared = self.fleet.requests.get(name)
        change = _change(declared, entry)
        if change is None:
            self._changes.pop(name, None)
        else:
            self._changes[name] = change
        await self.save()

    def declare(self, fleet: ServedFleet) -> None:
        """Another file is served: changes of adapters about which it says something new are gone.

        `save` afterwards.
        """
        self.fleet = fleet
        self._changes = {
            name: change for name, change in self._changes.items() if _stands(name, change, fleet)
        }

    async def save(self) -> None:
        """Write what changed since the last time; changes of one moment share a write."""
        if self._file is None:
            return
        async with self._writing:
            changes = dict(sorted(self._changes.items()))
            if changes == self._written:
                return
            try:
                await asyncio.to_thread(self._file.write, changes)
            except (OSError, FleetError) as error:
                why = error.message if isinstance(error, FleetError) else error.strerror or error
                self.unsaved = f"{self._file.path}: {why}"
                _log.error("a change at run time will not survive a restart: %s", self.unsaved)
            else:
                self.unsaved = ""
                self._written = changes

    def close(self) -> None:
        """Let another server write the file."""
        if self._file is not None:
            self._file.close()


def _change(declared: AdapterRequest | None, entry: AdapterEntry | None) -> Change | None:
    """How `entry` differs from what is declared; None: not at all, or nothing worth keeping."""
    fingerprint = _fingerprint(declared)
    if entry is None:
        return Change(declared=fingerprint, adapter=None) if declared is not None else None
    request = entry.request
    if declared is not None and replace(request, via="fleet") == declared:
        return None
    if request.via == "pattern" and declared is None and request.pin is None:
        return None  # found again when somebody asks for it
    return Change(
        declared=fingerprint,
        adapter=StateAdapter(
            source=request.source,
            via=request.via,
            pin=request.pin,
            ttl=request.ttl,
            priority=request.priority,
            digest=request.digest,
            tokenizer=request.tokenizer,
            chat_template=request.chat_template,
        ),
    )


def _fingerprint(declared: AdapterRequest | None) -> str | None:
    return declared.fingerprint() if declared is not None else None

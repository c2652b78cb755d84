"""A running server and a changed fleet file: what differs, and how the one becomes the other.

Everything new is read and judged first; then all names change in one step, or none does. What the
file says as before is not touched, what operators changed about it included.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest, Candidate
from multilora_cli.adapters.source import is_remote
from multilora_cli.errors import AdapterError, MloraError, RequestError
from multilora_cli.fleet.declared import spoken
from multilora_cli.fleet.pattern import NamePattern, covering
from multilora_cli.server.access import LIVE_SETTINGS, Access, LiveAccess
from multilora_cli.server.adapters import Adapters
from multilora_cli.server.bodies import FleetBody
from multilora_cli.server.changes import ServedFleet, by_name, request_of

_MADE_HERE = ("demo:", "dummy:")
_SHOWN = 5  # problems told in one message
_PARALLEL = 8
_FIELDS = ("source", "pin", "ttl", "priority", "digest", "tokenizer", "chat_template")
_IGNORED = "verify."  # of no concern to a server


@dataclass
class _Plan:
    """What a file changes."""

    fleet: ServedFleet  # as it will be
    rows: list[dict[str, Any]] = field(default_factory=list)
    restart: list[dict[str, Any]] = field(default_factory=list)
    wanted: list[AdapterRequest] = field(default_factory=list)  # added or changed
    gone: list[AdapterEntry] = field(default_factory=list)
    access: Access | None = None  # with other keys, where these changed


class FleetApply:
    """`mlora diff` and `mlora apply`, on the server's side."""

    def __init__(self, adapters: Adapters, access: LiveAccess) -> None:
        self._adapters = adapters
        self._access = access
        self._one = asyncio.Lock()

    async def apply(self, body: FleetBody) -> dict[str, Any]:
        """Say what differs and, unless `dry_run`, serve the file. Raises RequestError.

        Nothing is changed where anything is refused.
        """
        async with self._one:
            plan = await self._adapters.in_thread(self._plan, body)
            if not body.dry_run:
                _refuse_restart(plan.restart)
                await self._carry_out(plan)
            changes = self._adapters.changes
            return {
                "object": "fleet_diff",
                "fleet": changes.fleet.path,
                "changes": plan.rows,
                "restart": plan.restart,
                "runtime": sorted(changes.names - {row["name"] for row in plan.rows}),
                "applied": not body.dry_run,
            }

    # ---- what differs

    def _plan(self, body: FleetBody) -> _Plan:
        changes, registry = self._adapters.changes, self._adapters.registry
        running = changes.fleet
        requests = _requests(body)
        patterns = _patterns(body)
        plan = _Plan(
            fleet=replace(
                running, written=dict(body.settings), requests=requests, patterns=patterns
            ),
            restart=list(_restart(running, body.settings)),
        )
        for name in dict.fromkeys((*running.requests, *requests)):
            old, new = running.requests.get(name), requests.get(name)
            entry = registry.get(name)
            if old != new:
                plan.rows.append(_row("adapter", name, old, new))
            elif entry is not None and new is not None and registry.base.has_other_template(entry):
                plan.rows.append(_edited_row(name, str(new.template_file)))
            else:
                continue
            if new is not None:
                plan.wanted.append(new)
            elif entry is not None:
                plan.gone.append(entry)
        plan.rows += _pattern_rows(running.patterns, patterns)
        self._plan_access(plan, running, body.settings)
        plan.gone += self._uncovered(plan.fleet)
        return plan

    def _plan_access(self, plan: _Plan, running: ServedFleet, settings: Mapping[str, Any]) -> None:
        """Other keys, or the same references with other secrets in their files."""
        changed = {key: settings[key] for key in LIVE_SETTINGS if _differs(running, settings, key)}
        if not (changed or self._access.may_change):
            return
        live = {**running.settings, **changed}
        try:
            access = self._access.read(live)
        except MloraError as error:
            raise _refused([error.message], hint=error.hint) from None
        for key, value in changed.items():
            plan.rows.append(_setting_row(key, running.settings.get(key), value))
        if not changed and access.fingerprint != self._access.now.fingerprint:
            key = LIVE_SETTINGS[0]
            plan.rows.append(_setting_row(key, "secrets as they were read", "as they are"))
        plan.access = access
        plan.fleet = replace(plan.fleet, settings=live)

    def _uncovered(self, fleet: ServedFleet) -> Iterator[AdapterEntry]:
        """Names that a pattern found, where the patterns say something else now."""
        for entry in self._adapters.registry.entries():
            if entry.request.via == "pattern" and entry.name not in fleet.requests:
                covered = covering(fleet.patterns, entry.name)
                if covered is None or covered[1] != entry.source:
                    yield entry

    # ---- how it is done

    async def _carry_out(self, plan: _Plan) -> None:
        adapters = self._adapters
        candidates = await self._read(plan)
        try:
            done = adapters.registry.enter(candidates, plan.gone)
        except AdapterError as error:
            self._discard(candidates)
            raise _refused([error.message], hint=error.hint) from None
        if plan.access is not None:
            self._access.use(plan.access)
        adapters.names.replace_patterns(plan.fleet.patterns)
        adapters.changes.declare(plan.fleet)
        adapters.retired()
        left = [entry.digest for entry in plan.gone]
        for entry in plan.gone:
            adapters.forgotten(entry.name)
        for candidate, registered in zip(candidates, done, strict=True):
            before, now = candidate.previous, registered.entry
            if before is not None and before.digest != now.digest:
                left.append(before.digest)
            elif before is not None and before.pin and not now.pin:
                adapters.background(adapters.unpin(now))
        await adapters.changes.save()
        await asyncio.gather(*map(adapters.free, left))
        adapters.background(adapters.pin([r.entry for r in done if r.entry.pin is not None]))

    async def _read(self, plan: _Plan) -> list[Candidate]:
        """Everything new, read; where it replaces what is served, by the engine too."""
        slots = asyncio.Semaphore(_PARALLEL)
        self._adapters.client.check_admission()

        async def read(request: AdapterRequest) -> Candidate | str:
            async with slots:
                try:
                    return await self._candidate(request)
                except MloraError as error:
                    return error.of_adapter(request.name)

        found = await asyncio.gather(*map(read, plan.wanted))
        problems = [item for item in found if isinstance(item, str)]
        candidates = [item for item in found if not isinstance(item, str)]
        if problems:
            self._discard(candidates)
            raise _refused(problems)
        return candidates

    async def _candidate(self, request: AdapterRequest) -> Candidate:
        adapters, registry = self._adapters, self._adapters.registry
        entry = registry.get(request.name)
        if entry is not None and _stays(entry, request):
            return Candidate(replace(entry, request=request), entry, "unchanged")
        known = {old.source for old in adapters.changes.fleet.requests.values()}
        is_folder = not is_remote(request.source) and not request.source.startswith(_MADE_HERE)
        if is_folder and request.source not in known:
            registry.check_root(request.source)
        serves = entry is not None and entry.state == "ready"
        candidate = await adapters.fetching(
            lambda: registry.candidate(request, replacing=True, digested=serves)
        )
        before = candidate.previous
        if serves and before is not None and before.digest != candidate.entry.digest:
            await adapters.verify(candidate)
        return candidate

    def _discard(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate.outcome != "unchanged":
                self._adapters.registry.discard(candidate)
                self._adapters.background(self._adapters.free(candidate.entry.digest))


def _stays(entry: AdapterEntry, request: AdapterRequest) -> bool:
    """Whether the version that is served is what the file asks for, kept in another way."""
    digest = f"sha256:{entry.digest}" if entry.digest else None
    return (
        entry.state == "ready"
        and entry.source == request.source
        and entry.request.uses_own_tokenizer == request.uses_own_tokenizer
        and entry.request.uses_own_template == request.uses_own_template
        and entry.request.template_file == request.template_file
        and request.template_file is None  # else its content counts
        and request.digest in (None, digest)
    )


def _requests(body: FleetBody) -> dict[str, AdapterRequest]:
    seen: set[str] = set()
    requests = []
    for adapter in body.adapters:
        if adapter.name.lower() in seen:
            raise RequestError("adapters: one name is given twice", param="adapters")
        seen.add(adapter.name.lower())
        requests.append(request_of(adapter))
    return by_name(requests)


def _patterns(body: FleetBody) -> tuple[NamePattern, ...]:
    try:
        return tuple(NamePattern(p.pattern, p.source, p.priority, p.ttl) for p in body.patterns)
    except ValueError as error:
        raise RequestError(f"patterns: {error}", param="patterns") from None


def _row(kind: str, name: str, old: Any, new: Any) -> dict[str, Any]:
    """One difference; `fields` are those that differ, as the server has them and as the file."""
    change = "added" if old is None else "removed" if new is None else "changed"
    fields = {}
    for key in _FIELDS:
        before, after = getattr(old, key, None), getattr(new, key, None)
        if before != after:
            fields[key] = {"running": before, "file": after}
    return {"kind": kind, "name": name, "change": change, "fields": fields}


def _edited_row(name: str, file: str) -> dict[str, Any]:
    """The same file of a template, with other content."""
    fields = {"chat_template": {"running": f"{file} as it was read", "file": f"{file} as it is"}}
    return {"kind": "adapter", "name": name, "change": "changed", "fields": fields}


def _pattern_rows(
    old: tuple[NamePattern, ...], new: tuple[NamePattern, ...]
) -> Iterator[dict[str, Any]]:
    if old == new:
        return
    before, after = ({p.pattern: p for p in patterns} for patterns in (old, new))
    rows = [
        _row("pattern", text, before.get(text), after.get(text))
        for text in dict.fromkeys((*before, *after))
        if before.get(text) != after.get(text)
    ]
    order = {"order": {"running": [p.pattern for p in old], "file": [p.pattern for p in new]}}
    yield from rows or [{"kind": "pattern", "name": "*", "change": "changed", "fields": order}]


def _restart(running: ServedFleet, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings in which the file differs both from what is served and from what it said."""
    for key in sorted({*running.written, *settings} - {*LIVE_SETTINGS}):
        if _differs(running, settings, key) and not key.startswith(_IGNORED):
            yield {"key": key, "running": running.settings.get(key), "file": settings.get(key)}


def _differs(running: ServedFleet, settings: Mapping[str, Any], key: str) -> bool:
    known = (running.settings.get(key), running.written.get(key))
    return settings.get(key) not in known and (key in settings or key not in LIVE_SETTINGS)


def _setting_row(key: str, running: Any, file: Any) -> dict[str, Any]:
    """A setting that changes while the server runs: references to keys, never keys."""
    fields = {"value": {"running": running, "file": file}}
    return {"kind": "setting", "name": key, "change": "changed", "fields": fields}


def _refuse_restart(restart: list[dict[str, Any]]) -> None:
    if restart:
        keys = "; ".join(
            f"{row['key']}: running {spoken(row['key'], row['running'])}, the file says"
            f" {spoken(row['key'], row['file'])}"
            for row in restart[:_SHOWN]
        )
        raise RequestError(
            f"nothing was changed: a restart is needed for {keys}",
            code="restart_needed",
            param=str(restart[0]["key"])[:80],
        )


def _refused(problems: list[str], hint: str | None = None) -> RequestError:
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    end = f" ({hint})" if hint else ""
    return RequestError(f"nothing was changed: {shown}{more}{end}", code="fleet_refused")

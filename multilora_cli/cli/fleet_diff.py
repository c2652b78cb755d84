"""`mlora diff` and `mlora apply`: a running server beside a changed fleet file."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import (
    FleetArgument,
    JsonOption,
    KeyOption,
    QuietOption,
    SetOption,
    UrlOption,
)

if TYPE_CHECKING:
    from multilora_cli.fleet.load import LoadedFleet

_SIGNS = {"added": "+", "removed": "-", "changed": "~", "restart": "!"}


def diff(
    fleet: FleetArgument = None,
    url: UrlOption = None,
    settings: SetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what differs between a fleet file and the server that runs; changes nothing.

    Exit code 0: nothing differs; 1: something does; 2: bad input; 3: no server.

    Example: mlora diff fleet.yaml
    """
    console = Console(as_json=as_json, quiet=quiet)
    report = _ask(fleet, settings or (), url, api_key, dry_run=True)
    _show(console, report)
    if report["changes"] or report["restart"]:
        raise typer.Exit(1)
    if not quiet:
        console.line("nothing differs")


def apply(
    fleet: FleetArgument = None,
    url: UrlOption = None,
    settings: SetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a changed fleet file without a restart, and without touching what did not change.

    Everything new is read and checked first; if anything is refused, nothing is changed. Keys
    change at once; the base, memory, limits and the address need a restart.

    Exit code 0: served; 1: refused; 2: bad input; 3: no server.

    Example: mlora apply fleet.yaml
    """
    console = Console(as_json=as_json, quiet=quiet)
    report = _ask(fleet, settings or (), url, api_key, dry_run=False)
    _show(console, report)
    if not quiet:
        count = len(report["changes"])
        console.line(f"applied, {count} changed" if count else "nothing differs")


def _ask(
    path: Path | None, settings: Sequence[str], url: str | None, key: str | None, *, dry_run: bool
) -> dict[str, Any]:
    """The server's report on a fleet file, which it serves unless `dry_run`. Raises MloraError."""
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.fleet.load import load_fleet

    loaded = load_fleet(path, settings)

    async def send() -> dict[str, Any]:
        async with Api(server_url(url, loaded.path), key) as api:
            return await api.fleet({**fleet_body(loaded), "dry_run": dry_run})

    return {**asyncio.run(send()), "file": str(loaded.path)}


def fleet_body(loaded: "LoadedFleet") -> dict[str, Any]:
    """A fleet file as the server takes it: globs and locks resolved, folders absolute."""
    from multilora_cli.fleet.declared import (
        declared_adapters,
        declared_patterns,
        declared_settings,
    )

    fields = {
        "name", "source", "pin", "ttl", "priority", "digest", "tokenizer", "chat_template",
    }  # fmt: skip
    return {
        "settings": declared_settings(loaded),
        "adapters": [a.model_dump(mode="json", include=fields) for a in declared_adapters(loaded)],
        "patterns": [
            {"pattern": p.pattern, "source": p.source, "ttl": p.ttl, "priority": p.priority}
            for p in declared_patterns(loaded)
        ],
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    """The differences as a table or JSON, and what is not part of them."""
    from multilora_cli.fleet.declared import spoken

    rows: list[tuple[str, str, str]] = [
        (_SIGNS[row["change"]], str(row["name"]), _fields(row)) for row in report["changes"]
    ]
    for row in report["restart"]:
        key = str(row["key"])
        values = f"{spoken(key, row['running'])} -> {spoken(key, row['file'])}"
        rows.append((_SIGNS["restart"], key, f"{values} (needs a restart)"))
    if rows:
        console.table(("", "name", "difference"), rows)
    if report["runtime"]:
        names = ", ".join(map(str, report["runtime"][:5]))
        more = f" and {len(report['runtime']) - 5} more" if len(report["runtime"]) > 5 else ""
        console.note(f"changed at run time, and left so: {names}{more}")
    if report["file"] != report["fleet"]:
        console.note(
            f"the server was started with {report['fleet']}: after a restart it serves that file"
        )
    console.value(report)


def _fields(row: dict[str, Any]) -> str:
    fields: dict[str, Any] = row["fields"]
    if row["change"] == "added":
        return ", ".join(f"{key} {_shown(value['file'])}" for key, value in _given(fields))
    if row["change"] == "removed":
        return ", ".join(
            _shown(value["running"]) for key, value in fields.items() if key == "source"
        )
    return ", ".join(
        f"{key} {_shown(value['running'])} -> {_shown(value['file'])}"
        for key, value in fields.items()
    )


def _given(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in fields.items() if value["file"] not in (None, 0)]


def _shown(value: object) -> str:
    return "none" if value is None else str(value)  # whole: two folders may differ in the middle

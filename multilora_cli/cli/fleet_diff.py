"""What `mlora diff` and `mlora apply` share: the file as one request, the answer as a table."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_cli.cli.console import Console

if TYPE_CHECKING:
    from multilora_cli.fleet.load import LoadedFleet

_SIGNS = {"added": "+", "removed": "-", "changed": "~", "restart": "!"}


def ask(
    path: Path | None, settings: list[str], url: str | None, key: str | None, *, dry_run: bool
) -> dict[str, Any]:
    """The server's report on a fleet file, which it serves unless `dry_run`. Raises MloraError."""
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.fleet.load import load_fleet
    from multilora_cli.fleet.support import check_served

    loaded = load_fleet(path, settings)
    check_served(loaded)
    body = {**fleet_body(loaded), "dry_run": dry_run}

    async def send() -> dict[str, Any]:
        async with Api(server_url(url, loaded.path), key) as api:
            return await api.fleet(body)

    report = asyncio.run(send())
    return {**report, "file": str(loaded.path)}


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


def show(console: Console, report: dict[str, Any]) -> None:
    """The differences as a table, and what is not part of them."""
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


def differs(report: dict[str, Any]) -> bool:
    """Whether the server serves something else than the file says."""
    return bool(report["changes"] or report["restart"])


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
    if value is None:
        return "none"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-29:]}"

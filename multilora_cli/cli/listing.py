"""`mlora list`: the adapters of a running server."""

import asyncio
from typing import Any

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption

_COLUMNS = (
    "adapter", "tier", "rank", "modules", "size", "pages", "pin, ttl", "in flight", "used",
    "hits", "loads", "digest",
)  # fmt: skip


def list_adapters(
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the adapters of a running server: where each is, what it costs, who keeps it, its use.

    Names of patterns are there once somebody has asked for them.

    Example: mlora list --url http://127.0.0.1:8000
    """
    from multilora_cli.cli.api import server_url

    console = Console(as_json=as_json, quiet=quiet)
    rows = asyncio.run(_fetch(server_url(url, fleet), api_key))
    console.value(rows)
    if quiet:
        for row in rows:
            console.line(str(row["id"]))
        return
    console.table(_COLUMNS, [_cells(row) for row in rows])
    for row in rows:
        if row.get("tier") == "failed":
            console.note(f"{row['id']}: {row.get('detail') or 'failed'}{_retry(row)}")


async def _fetch(url: str, api_key: str | None) -> list[dict[str, Any]]:
    from multilora_cli.cli.api import Api

    async with Api(url, api_key) as api:
        return await api.adapters()


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    from multilora_cli.units import format_duration, format_size

    modules = row.get("modules") or []
    idle_s = row.get("last_used_s")
    return (
        row["id"],
        row.get("tier", "-"),
        row.get("rank") or "-",
        " ".join(str(module).removesuffix("_proj") for module in modules) or "-",
        format_size(int(row.get("bytes") or 0)),
        row.get("pages", 0),
        _kept(row),
        row.get("in_flight", 0),
        "-" if idle_s is None else f"{format_duration(float(idle_s))} ago",
        row.get("hits", 0),
        row.get("loads", 0),
        str(row.get("digest") or "-").removeprefix("sha256:")[:12],
    )


def _kept(row: dict[str, Any]) -> str:
    """Where it is pinned, and how long it stays without being used: `hot, 58 min of 1 h`."""
    from multilora_cli.units import format_duration

    words = [str(row["pin"])] if row.get("pin") else []
    ttl_s, left_s = row.get("ttl_s"), row.get("expires_in_s")
    if ttl_s is not None:
        whole = format_duration(float(ttl_s))
        left = "" if left_s is None else f"{format_duration(float(left_s))} of "
        words.append(left + whole)
    return ", ".join(words) or "-"


def _retry(row: dict[str, Any]) -> str:
    from multilora_cli.units import format_duration

    left_s = row.get("retry_in_s")
    if left_s is None:
        return f" (mlora warm {row['id']} tries it again)"
    return f" (attempt {int(row.get('attempts') or 0) + 1} in {format_duration(float(left_s))})"

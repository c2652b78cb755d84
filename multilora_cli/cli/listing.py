"""`mlora list`: the adapters of a running server."""

import asyncio
from typing import Any

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption


def list_adapters(
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the adapters of a running server: tier, rank, pages, references, traffic.

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
    columns = ("adapter", "tier", "rank", "modules", "size", "pages", "in flight", "hits", "pinned")
    console.table(columns, [_cells(row) for row in rows])


async def _fetch(url: str, api_key: str | None) -> list[dict[str, Any]]:
    from multilora_cli.cli.api import Api

    async with Api(url, api_key) as api:
        return await api.adapters()


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    from multilora_cli.units import format_size

    modules = row.get("modules") or []
    return (
        row["id"],
        row.get("tier", "-"),
        row.get("rank", "-"),
        " ".join(str(module).removesuffix("_proj") for module in modules) or "-",
        format_size(int(row.get("bytes") or 0)),
        row.get("pages", 0),
        row.get("in_flight", 0),
        row.get("hits", 0),
        row.get("pinned") or "-",
    )

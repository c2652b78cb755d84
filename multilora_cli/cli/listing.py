"""`mlora list`: the adapters of a running server."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption
from multilora_cli.units import format_size, format_span

if TYPE_CHECKING:
    from multilora_cli.cli.api import Api

_COLUMNS = (
    "adapter", "tier", "rank", "modules", "size", "pages", "pin, ttl", "in flight", "last use",
    "uses", "loads", "digest",
)  # fmt: skip
_LEFT_OUT = ("digest", "loads", "modules", "uses", "in flight", "rank")
_SETS = {
    "q k v o": "attention", "gate up down": "mlp", "q k v o gate up down": "all",
}  # fmt: skip
_MAX_NOTES = 10
_TRAFFIC = ("found", "requests", "share", "TTFT p50", "TTFT p95")


def list_adapters(
    traffic: Annotated[
        bool, typer.Option("--traffic", help="What requests found, instead of the adapters.")
    ] = False,
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the adapters of a running server: where each is, what it costs, how it is used.

    Names of patterns are there once somebody has asked for them. With --traffic: how many requests
    found their adapter on the device, how many had to wait for its files, and for how long.

    Example: mlora list --url http://127.0.0.1:8000
    """
    from multilora_cli.cli.api import Api, server_url

    console = Console(as_json=as_json, quiet=quiet)
    reply = asyncio.run(_fetch(Api(server_url(url, fleet), api_key)))
    rows, found = reply["data"], reply.get("traffic") or {}
    if traffic:
        _show_traffic(console, reply)
        return
    console.value(rows)
    if quiet:
        for row in rows:
            console.line(str(row["id"]))
        return
    console.table(_COLUMNS, [row_cells(row) for row in rows], spare=_LEFT_OUT)
    for row in rows:
        if row.get("tier") == "failed":
            console.note(f"{row['id']}: {row.get('detail') or 'failed'}{retry_words(row)}")
    for note in told_notes((str(row["id"]), row.get("notes") or ()) for row in rows):
        console.note(note)
    for pattern in reply.get("patterns") or ():
        console.note(f"{pattern['pattern']}: on request, from {pattern['source']}")
    if reply.get("unsaved"):
        console.note(f"changes at run time will not survive a restart: {reply['unsaved']}")
    if found.get("requests"):
        console.note(_summary(found))


def _show_traffic(console: Console, reply: dict[str, Any]) -> None:
    """Raises BadInput where the server does not tell."""
    from multilora_cli.errors import BadInput

    if "traffic" not in reply:
        raise BadInput("this key is limited to some models, and traffic is about all of them")
    found = reply["traffic"]
    console.value(found)
    console.table(_TRAFFIC, _tiers(found))
    console.note(_summary(found))


def told_notes(notes: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """`acme: what to know of it`; once for all adapters of which the same is said."""
    named: dict[str, list[str]] = {}
    for name, texts in notes:
        for text in texts:
            named.setdefault(text, []).append(name)
    lines = [
        f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''}: {text}"
        for text, names in named.items()
    ]
    if len(lines) > _MAX_NOTES:
        lines[_MAX_NOTES:] = [f"and {len(lines) - _MAX_NOTES} more: mlora list --json"]
    return lines


async def _fetch(api: "Api") -> dict[str, Any]:
    async with api:
        return await api.listing()


def _summary(found: dict[str, Any]) -> str:
    """`1,200 requests: 87.5% with a hot adapter, cold starts: 3; TTFT p95 hot 8 ms, ...`."""
    requests = int(found.get("requests") or 0)
    if not requests:
        return "no request with an adapter yet"
    waits = [
        f"{tier} {_milliseconds(row['ttft_p95_s'])}"
        for tier, row in found["tiers"].items()
        if row["ttft_p95_s"] is not None
    ]
    return (
        f"{requests:,} requests: {found['hit_ratio']:.1%} with a hot adapter,"
        f" cold starts: {found['cold_starts']:,}; TTFT p95 " + ", ".join(waits)
    )


def _tiers(found: dict[str, Any]) -> list[tuple[object, ...]]:
    requests = int(found.get("requests") or 0)
    return [
        (
            tier,
            row["requests"],
            f"{row['requests'] / requests:.1%}" if requests else "-",
            _milliseconds(row["ttft_p50_s"]),
            _milliseconds(row["ttft_p95_s"]),
        )
        for tier, row in (found.get("tiers") or {}).items()
    ]


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.3g} ms"


def row_cells(row: dict[str, Any]) -> tuple[object, ...]:
    """A row of the table; a dash for what the server does not tell."""
    idle_s = row.get("last_used_s")
    return (
        row["id"],
        row.get("tier", "-"),
        row.get("rank") or "-",
        module_set(row.get("modules") or ()) or "-",
        format_size(int(row["bytes"])) if row.get("bytes") else "-",
        row.get("pages", 0),
        _kept(row),
        row.get("in_flight", 0),
        "-" if idle_s is None else f"{format_span(idle_s)} ago",
        row.get("hits", 0),
        row.get("loads", 0),
        str(row.get("digest") or "-").removeprefix("sha256:")[:12],
    )


def module_set(names: Iterable[object]) -> str:
    """Modules in a person's words: `attention`, `all`, or one by one without `_proj`."""
    modules = " ".join(str(name).removesuffix("_proj") for name in names)
    return _SETS.get(modules, modules)


def _kept(row: dict[str, Any]) -> str:
    """Where it is pinned, and how long it stays if nobody uses it: `hot, 58 min left`."""
    words = [str(row["pin"])] if row.get("pin") else []
    ttl_s, left_s = row.get("ttl_s"), row.get("expires_in_s")
    if left_s is not None:
        words.append(f"{format_span(left_s)} left")
    elif ttl_s is not None:
        words.append(f"ttl {format_span(ttl_s)}")
    return ", ".join(words) or "-"


def retry_words(row: dict[str, Any]) -> str:
    """When a failed adapter is tried again, or how it can be."""
    left_s = row.get("retry_in_s")
    if left_s is None:
        return f" (mlora warm {row['id']} tries it again)"
    return f" (attempt {int(row.get('attempts') or 0) + 1} in {format_span(float(left_s))})"

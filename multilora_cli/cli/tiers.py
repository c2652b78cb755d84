"""`mlora warm` and `mlora evict`: move adapters of a running server between tiers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption

if TYPE_CHECKING:
    from multilora_cli.cli.api import Api

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names, or globs: 'acme/*'.")]
Move = Callable[["Api", str], Awaitable[dict[str, Any]]]


def warm(
    names: Names,
    hot: Annotated[
        bool, typer.Option("--hot", help="To the device, not only host memory.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it there.")] = False,
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load adapters before anybody asks for them.

    Example: mlora warm 'acme/*' --hot
    """
    console = Console(as_json=as_json, quiet=quiet)
    move: Move = lambda api, name: api.warm(name, hot=hot, pin=pin)  # noqa: E731
    rows = asyncio.run(_move(console, names, (url, fleet, api_key), "warming", move))
    for row in rows:
        size = f"{row['pages']} pages" if row["tier"] == "hot" else "in host memory"
        pinned = ", pinned" if row["pinned"] else ""
        console.line(f"{row['id']}: {row['tier']}, {size}{pinned}")
    console.value(rows)


def evict(
    names: Names,
    cold: Annotated[bool, typer.Option("--cold", help="Out of host memory too.")] = False,
    unpin: Annotated[bool, typer.Option("--unpin", help="Also where it is pinned.")] = False,
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Free what adapters hold, once their requests have ended; they stay registered.

    Example: mlora evict acme/legal --cold
    """
    from multilora_cli.units import format_size

    console = Console(as_json=as_json, quiet=quiet)
    move: Move = lambda api, name: api.evict(name, cold=cold, unpin=unpin)  # noqa: E731
    rows = asyncio.run(_move(console, names, (url, fleet, api_key), "evicting", move))
    for row in rows:
        host = format_size(int(row["freed_host_bytes"]))
        console.line(f"{row['id']}: {row['tier']}, {row['freed_pages']} pages and {host} freed")
    console.value(rows)


async def _move(
    console: Console, patterns: Sequence[str], server: Any, title: str, move: Move
) -> list[dict[str, Any]]:
    """Move every adapter that a pattern names, one after another. Raises MloraError at the end.

    A failure leaves the others be: all are tried, then the failures are told together.
    """
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.errors import MloraError

    url, fleet, api_key = server
    rows, faults = [], []
    async with Api(server_url(url, fleet), api_key) as api:
        names = _matching(patterns, [str(row["id"]) for row in await api.adapters()])
        with console.progress(title) as phases:
            for done, name in enumerate(names):
                phases.update(title, done, len(names))
                try:
                    rows.append(await move(api, name))
                except MloraError as error:
                    faults.append(error)
            phases.update(title, len(names), len(names))
    if faults:
        raise type(faults[0])("\n".join(fault.message for fault in faults))
    return rows


def _matching(patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Known names that a pattern names, in the order given. Raises BadInput where one has none."""
    from multilora_cli.errors import BadInput

    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise BadInput(f"no adapter is called {pattern}", hint="mlora list shows the names")
        found.update(dict.fromkeys(matches))
    return list(found)

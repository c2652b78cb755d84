"""`mlora warm` and `mlora evict`: move adapters of a running server between tiers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption

if TYPE_CHECKING:
    from multilora_cli.cli.api import Api

Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names, folders (acme/) or globs ('acme/*')."),
]
_PARALLEL = 8


def warm(
    names: Names,
    hot: Annotated[
        bool, typer.Option("--hot", help="To the device, not only host memory.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it there.")] = False,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="1h", help="Unpin it and take it back to cold once it was unused that long."
        ),
    ] = None,
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load adapters before anybody asks for them.

    Example: mlora warm 'acme/*' --hot --pin --ttl 1h
    """
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.cli.options import parse_flag
    from multilora_cli.units import format_duration, parse_duration

    ttl_s = None if ttl is None else parse_flag("--ttl", ttl, parse_duration)

    def told(row: dict[str, Any]) -> str:
        size = f"{row['pages']} pages" if row["tier"] == "hot" else "in host memory"
        pinned = ", pinned" if row["pinned"] else ""
        kept_s = row.get("ttl_s")
        kept = f", until unused for {format_duration(kept_s)}" if kept_s else ""
        return f"{row['id']}: {row['tier']}, {size}{pinned}{kept}"

    move = _Move(
        phase="warming",
        ask=lambda api, name: api.warm(name, hot=hot, pin=pin, ttl=ttl_s),
        told=told,
    )
    api = Api(server_url(url, fleet), api_key)
    asyncio.run(_move_all(Console(as_json=as_json, quiet=quiet), api, names, move))


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
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.units import format_size

    def told(row: dict[str, Any]) -> str:
        host = format_size(int(row["freed_host_bytes"]))
        if row.get("kept_by"):
            same = f"the same content is pinned as {row['kept_by']}"
            return f"{row['id']}: unpinned, {row['tier']} all the same: {same}"
        return f"{row['id']}: {row['tier']}, {row['freed_pages']} pages and {host} freed"

    move = _Move(
        phase="evicting",
        ask=lambda api, name: api.evict(name, cold=cold, unpin=unpin),
        told=told,
        refused_hint="a pinned one goes with --unpin" if not unpin else None,
    )
    api = Api(server_url(url, fleet), api_key)
    asyncio.run(_move_all(Console(as_json=as_json, quiet=quiet), api, names, move))


@dataclass(frozen=True)
class _Move:
    """One way to move an adapter, and how its new place is told."""

    phase: str
    ask: Callable[["Api", str], Awaitable[dict[str, Any]]]
    told: Callable[[dict[str, Any]], str]  # of the row that the server answers
    refused_hint: str | None = None


async def _move_all(console: Console, api: "Api", patterns: Sequence[str], move: _Move) -> None:
    """Move every adapter that a pattern names, several at a time, and say where each is then.

    A failure leaves the others be: all are tried, then the failures are raised together.
    """
    from multilora_cli.errors import MloraError, Refused

    slots = asyncio.Semaphore(_PARALLEL)
    async with api:
        names = matching_names(patterns, await _known(api, patterns))
        done: list[str] = []

        async def one(name: str) -> dict[str, Any] | MloraError:
            async with slots:
                try:
                    return await move.ask(api, name)
                except MloraError as error:
                    error.message = with_name(name, error.message)
                    return error
                finally:
                    done.append(name)
                    report(move.phase, len(done), len(names))

        with console.progress() as report:
            results = await asyncio.gather(*map(one, names))
    rows = [result for result in results if not isinstance(result, MloraError)]
    for row in rows:
        console.line(move.told(row))
    console.value(rows)
    faults = [result for result in results if isinstance(result, MloraError)]
    if faults:
        hint = move.refused_hint if isinstance(faults[0], Refused) else faults[0].hint
        raise type(faults[0])("\n".join(fault.message for fault in faults), hint=hint)


def with_name(name: str, message: str) -> str:
    """`message`, with the name before it where it does not say it itself."""
    if f"`{name}`" in message or message.startswith((f"adapter {name} ", f"adapter {name}:")):
        return message
    return f"adapter {name}: {message}"


async def _known(api: "Api", patterns: Sequence[str]) -> list[str]:
    """Names that globs and folders may stand for; names as such need none."""
    if not any(map(_is_open, patterns)):
        return []
    return [str(row["id"]) for row in await api.adapters()]


def _is_open(pattern: str) -> bool:
    """Whether it stands for names instead of being one."""
    return pattern.endswith("/") or any(sign in pattern for sign in "*?[")


def matching_names(patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names in the order given, each once; one that is no glob or folder is left to the server.

    Raises BadInput where a glob or folder has none.
    """
    from multilora_cli.errors import BadInput

    found: dict[str, None] = {}
    for pattern in patterns:
        if not _is_open(pattern):
            found[pattern] = None
            continue
        glob = f"{pattern}*" if pattern.endswith("/") else pattern
        matches = [name for name in known if fnmatchcase(name, glob)]
        if not matches:
            raise BadInput(f"no adapter matches {pattern}", hint="mlora list shows the names")
        found.update(dict.fromkeys(matches))
    return list(found)

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

Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names, folders (acme/) or globs ('acme/*')."),
]
_PARALLEL = 8
Move = Callable[["Api", str], Awaitable[dict[str, Any]]]


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
    from multilora_cli.units import format_duration

    console = Console(as_json=as_json, quiet=quiet)
    seconds = _seconds(ttl)
    move: Move = lambda api, name: api.warm(name, hot=hot, pin=pin, ttl=seconds)  # noqa: E731

    def told(row: dict[str, Any]) -> str:
        size = f"{row['pages']} pages" if row["tier"] == "hot" else "in host memory"
        pinned = ", pinned" if row["pinned"] else ""
        ttl_s = row.get("ttl_s")
        kept = f", until unused for {format_duration(ttl_s)}" if ttl_s else ""
        return f"{row['id']}: {row['tier']}, {size}{pinned}{kept}"

    asyncio.run(_move(console, names, (url, fleet, api_key), "warming", (move, told)))


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

    def told(row: dict[str, Any]) -> str:
        host = format_size(int(row["freed_host_bytes"]))
        if row.get("kept_by"):
            same = f"the same content is pinned as {row['kept_by']}"
            return f"{row['id']}: unpinned, {row['tier']} all the same: {same}"
        return f"{row['id']}: {row['tier']}, {row['freed_pages']} pages and {host} freed"

    hint = "a pinned one goes with --unpin" if not unpin else None
    asyncio.run(_move(console, names, (url, fleet, api_key), "evicting", (move, told), hint))


async def _move(
    console: Console,
    patterns: Sequence[str],
    server: Any,
    title: str,
    how: tuple[Move, Callable[[dict[str, Any]], str]],
    refused_hint: str | None = None,
) -> None:
    """Move every adapter that a pattern names, several at a time, and say where each is then.

    A failure leaves the others be: all are tried, then the failures are raised together.
    """
    from multilora_cli.cli.api import Api, server_url
    from multilora_cli.errors import MloraError, Refused

    url, fleet, api_key = server
    move, told = how
    slots = asyncio.Semaphore(_PARALLEL)
    async with Api(server_url(url, fleet), api_key) as api:

        async def one(name: str) -> dict[str, Any] | MloraError:
            async with slots:
                try:
                    return await move(api, name)
                except MloraError as error:
                    error.message = _naming(name, error.message)
                    return error
                finally:
                    done.append(name)
                    phases.update(title, len(done), len(names))

        names = _matching(patterns, await _known(api, patterns))
        done: list[str] = []
        with console.progress(title) as phases:
            results = await asyncio.gather(*map(one, names))
    rows = [result for result in results if not isinstance(result, MloraError)]
    for row in rows:
        console.line(told(row))
    console.value(rows)
    faults = [result for result in results if isinstance(result, MloraError)]
    if faults:
        hint = refused_hint if isinstance(faults[0], Refused) else faults[0].hint
        raise type(faults[0])("\n".join(fault.message for fault in faults), hint=hint)


def _naming(name: str, message: str) -> str:
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


def _matching(patterns: Sequence[str], known: Sequence[str]) -> list[str]:
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


def _seconds(ttl: str | None) -> float | None:
    """Raises BadInput."""
    from multilora_cli.errors import BadInput
    from multilora_cli.units import parse_duration

    try:
        return None if ttl is None else parse_duration(ttl)
    except ValueError as error:
        raise BadInput(f"--ttl: {error}") from None

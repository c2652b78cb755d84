"""`mlora serve`: the fleet behind an OpenAI-compatible API."""

import logging
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, QuietOption, SetOption

if TYPE_CHECKING:
    from multilora_cli.cli.startup import Startup
    from multilora_cli.engine.messages import Progress, Ready
    from multilora_cli.fleet.load import LoadedFleet
    from multilora_cli.server.bodies import FleetBody
    from multilora_cli.server.launch import Hooks


_DEMO_TRY = (
    '"the PT was late on monday", to law-glossary and shipping-glossary\n'
    "(the demo knows simple sentences, not greetings or questions)"
)


class LogLevel(StrEnum):
    """From which level on events are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    fleet: FleetArgument = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="N", help="0 takes a free one.")
    ] = None,
    settings: SetOption = None,
    poison: Annotated[
        bool, typer.Option("--poison", help="Fill freed pages with NaN and audit every step.")
    ] = False,
    no_prefetch: Annotated[
        bool, typer.Option("--no-prefetch", help="Bring no popular adapters up ahead.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Append time, adapter and tokens of requests to a file.")
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            metavar="LEVEL",
            help="What is logged on stderr: debug, info (a line a request), warning or error.",
        ),
    ] = LogLevel.WARNING,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a fleet: one base, its adapters, an OpenAI-compatible API.

    SIGTERM or Ctrl-C finishes what was admitted; a second one stops at once. SIGHUP has the fleet
    file read again, as mlora apply does. With --json one JSON value says when the server is ready.

    Example: mlora serve fleet.yaml --port 8000
    """
    from multilora_cli.engine.process import spawn
    from multilora_cli.logs import log_to_stderr
    from multilora_cli.server.launch import Served, run_server

    log_to_stderr(getattr(logging, log_level.name))
    _outlive_reload()
    console = Console(as_json=as_json, quiet=quiet)
    overrides = list(settings or ())
    overrides += [f"server.host={host}"] if host is not None else []
    overrides += [f"server.port={port}"] if port is not None else []
    overrides += ["memory.prefetch=0"] if no_prefetch else []
    startup = _prepare(console, fleet, overrides, poison)
    with ExitStack() as bars:  # a start that fails, or is interrupted, takes them off the terminal
        served = Served(
            config=replace(startup.server, record=record),
            registry=startup.registry,
            spawn=lambda: spawn(startup.engine),
            changes=startup.changes,
            secrets=startup.secrets,
            reread=lambda: _reread(startup.loaded.path, overrides),
        )
        status = run_server(served, StartDisplay(console, startup, bars).hooks())
    raise typer.Exit(status)


def _prepare(console: Console, fleet: Path | None, overrides: list[str], poison: bool) -> "Startup":
    from multilora_cli.cli.listing import told_notes
    from multilora_cli.cli.startup import prepare

    with console.progress() as report:
        startup = prepare(fleet, overrides, report=report, debug=poison, check=_can_listen)
    said = told_notes((entry.name, entry.notes) for entry in startup.registry.entries())
    for note in (*startup.notes, *said):
        console.note(note)
    for name, error in startup.failures:
        console.error(f"adapter {name} is not served: {error.about(name)}", error.hint)
    return startup


def _outlive_reload() -> None:
    """A SIGHUP that comes while the file is being read anyway asks for nothing more."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL and not os.isatty(0):
        signal.signal(signal.SIGHUP, lambda *_: None)


def _reread(path: Path, overrides: list[str]) -> "FleetBody":
    """The fleet file as it is now, without the flags of the start, where it is whole without them.

    Raises FleetError.
    """
    import msgspec

    from multilora_cli.cli.fleet_diff import fleet_body
    from multilora_cli.errors import FleetError
    from multilora_cli.fleet.load import load_fleet
    from multilora_cli.server.bodies import FleetBody

    try:
        loaded = load_fleet(path)
    except FleetError:
        if not overrides:
            raise
        loaded = load_fleet(path, overrides)
    return msgspec.convert(fleet_body(loaded), FleetBody)


def _can_listen(loaded: "LoadedFleet") -> None:
    """Keys and address are there: a base may take an hour to fetch, and these a moment to mend.
    Raises FleetError, BadInput, AddressInUse."""
    from multilora_cli.cli.front import check_front
    from multilora_cli.server.launch import bind

    check_front(loaded)
    bind(loaded.fleet.server.host, loaded.fleet.server.port).close()


class StartDisplay:
    """What a person sees between the command and the first request; `bars` until it is ready."""

    def __init__(self, console: Console, startup: "Startup", bars: ExitStack) -> None:
        self._console = console
        self._startup = startup
        self._bars = bars
        self._report = bars.enter_context(console.progress())
        self._ready = False

    def hooks(self) -> "Hooks":
        """What the server calls."""
        from multilora_cli.server.launch import Hooks

        return Hooks(progress=self._on_progress, ready=self._on_ready, draining=self._on_draining)

    def _on_progress(self, progress: "Progress") -> None:
        if not self._ready:
            self._report(progress.phase, progress.done, progress.total)

    def _on_ready(self, ready: "Ready", url: str) -> None:
        if self._ready:
            self._console.note("the engine was restarted and serves again")
            return
        self._ready = True
        self._bars.close()
        show_ready(self._console, self._startup, ready, url)

    def _on_draining(self, in_flight: int) -> None:
        if in_flight == 0:
            self._console.note("stopping")
            return
        count = "one request" if in_flight == 1 else f"{in_flight} requests"
        self._console.note(f"stopping once {count} in flight ended; again stops at once")


def show_ready(console: Console, startup: "Startup", ready: "Ready", url: str) -> None:
    """The panel that says what is served and where; in JSON mode the same as one value."""
    from multilora_cli.cli.api import own_url
    from multilora_cli.demo import is_demo_base
    from multilora_cli.units import format_size

    parts = urlsplit(url)
    here = own_url(parts.hostname or "", parts.port or 80)
    good = startup.num_adapters - len(startup.failures)
    page = ready.page_bytes
    is_demo = is_demo_base(startup.server.base_path)
    console.panel(
        "mlora serves",
        {
            "base": f"{startup.server.base_name}  {ready.dtype} on {ready.device}",
            "adapters": f"{good} registered"
            + (f", {len(startup.failures)} refused" if startup.failures else "")
            + "".join(f", {p.pattern} on request" for p in startup.changes.fleet.patterns),
            "context": f"{ready.max_model_len:,} tokens",
            "memory": "\n".join(memory_lines(ready)),
            "pool": f"{ready.num_pages:,} pages of {format_size(page)} for KV and adapters",
            "address": f"{url}/v1",
            "docs": f"{here}/docs",
            "chat": f"mlora chat --url {here}",
            **({"try": _DEMO_TRY} if is_demo else {}),
            **({"notes": "\n".join(ready.notes)} if ready.notes else {}),
        },
    )
    console.value(
        {
            "url": url,
            "base": startup.server.base_name,
            "adapters": good,
            "refused": {name: error.message for name, error in startup.failures},
            "device": ready.device,
            "dtype": ready.dtype,
            "max_model_len": ready.max_model_len,
            "num_pages": ready.num_pages,
            "page_bytes": page,
            "planned": ready.planned,
            "allocated": ready.allocated,
        }
    )
    if console.quiet:
        console.line(url)


def memory_lines(ready: "Ready") -> list[str]:
    """Planned beside allocated; a difference above 2 % is said in words."""
    from multilora_cli.sizing.device import deviations
    from multilora_cli.units import format_size

    off, lines = deviations(ready.planned, ready.allocated), []
    for part, planned in ready.planned.items():
        line = f"{part} {format_size(planned)} planned"
        if part in ready.allocated:
            line += f", {format_size(ready.allocated[part])} allocated"
        elif part == "extras":
            line += ", taken when an adapter with DoRA or biases first needs it"
        if part in off:
            line += f" ({off[part]:+.1%}, more than 2 % off)"
        lines.append(line)
    for part in (name for name in ready.allocated if name not in ready.planned):
        lines.append(f"{part} {format_size(ready.allocated[part])} allocated, not planned")
    return lines

"""`mlora diff`: what a fleet file would change on a running server."""

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
    from multilora_cli.cli.fleet_diff import ask, differs, show

    console = Console(as_json=as_json, quiet=quiet)
    report = ask(fleet, list(settings or ()), url, api_key, dry_run=True)
    show(console, report)
    console.value(report)
    if differs(report):
        raise typer.Exit(1)
    if not quiet:
        console.line("nothing differs")

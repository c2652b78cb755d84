"""`mlora apply`: bring a running server to a changed fleet file."""

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import (
    FleetArgument,
    JsonOption,
    KeyOption,
    QuietOption,
    SetOption,
    UrlOption,
)


def apply(
    fleet: FleetArgument = None,
    url: UrlOption = None,
    settings: SetOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a changed fleet file without a restart, and without touching what did not change.

    Everything new is read and checked first; if anything is refused, nothing is changed. The base,
    memory, limits and the server's own settings need a restart.

    Exit code 0: served; 1: refused; 2: bad input; 3: no server.

    Example: mlora apply fleet.yaml
    """
    from multilora_cli.cli.fleet_diff import ask, show

    console = Console(as_json=as_json, quiet=quiet)
    report = ask(fleet, list(settings or ()), url, api_key, dry_run=False)
    show(console, report)
    console.value(report)
    if not quiet:
        count = len(report["changes"])
        console.line(f"applied, {count} changed" if count else "nothing differs")

"""`mlora verify`: whether adapters load, do something, and answer as they should."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import JsonOption, QuietOption, SetOption

if TYPE_CHECKING:
    from multilora_cli.cli.verify_run import VerifyReport
    from multilora_cli.fleet.load import LoadedFleet


def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FLEET|ADAPTER",
            help="A fleet file, or one adapter (a folder or a source) with --base.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="The base of one adapter.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, one a line.")
    ] = None,
    no_parity: Annotated[
        bool, typer.Option("--no-parity", help="Only what needs no base weights.")
    ] = False,
    drift: Annotated[
        bool, typer.Option("--drift", help="Compare with the 16-bit base instead.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The 16-bit model of a base that is stored quantised."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Just this adapter. Repeatable."),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check adapters as loading would, then compare served answers with a reference.

    Every adapter gets a verdict: exact, warning or refused (checked where answers were not
    compared). Exit code 0: none is refused; 1: one is; 2: bad input.

    Example: mlora verify ./my-adapter --base org/model
    """
    console = Console(as_json=as_json, quiet=quiet)
    loaded = _loaded(target, base, settings or ())
    with console.progress() as report:
        from multilora_cli.cli.verify_run import Verification

        run = Verification(loaded, report)
        run.examine(only or ())
        if drift:
            run.measure_drift(run.prompts(prompts, all_shipped=True), against)
        elif not no_parity:
            run.check_parity(run.prompts(prompts, all_shipped=False))
        run.settle()
    _show(console, run.result)
    if run.result.refused or run.result.drifts:
        raise typer.Exit(1)


def _loaded(target: str | None, base: str | None, settings: Sequence[str]) -> "LoadedFleet":
    """The fleet to verify: a file's, or one made of a single adapter."""
    from multilora_cli.errors import BadInput
    from multilora_cli.fleet.load import load_fleet, make_fleet
    from multilora_cli.fleet.pattern import is_folder

    path = None if target is None else Path(target).expanduser()
    if target is None or (path is not None and path.is_file()) or target.endswith(".yaml"):
        overrides = [*settings, *([f"base.model={base}"] if base is not None else [])]
        return load_fleet(path, overrides)
    if base is None:
        raise BadInput(
            f"{target}: one adapter needs --base MODEL to be checked against",
            hint="or name a fleet file, which says its base",
        )
    if is_folder(target) and path is not None and not path.is_dir():
        raise BadInput(f"{target}: no such folder or fleet file")  # before a base is fetched
    values = {
        "base": {"model": base, "name": "base"},
        "adapters": [{"name": _name_of(target), "source": target}],
    }
    return make_fleet(values, settings)


def _name_of(source: str) -> str:
    """A name for the report: the last part of a folder or source."""
    from multilora_cli.fleet.schema import is_adapter_name

    last = source.split("@")[0].rstrip("/").replace("=", "-").replace(",", "-")
    name = last.split("/")[-1].split(":")[-1]
    return name if is_adapter_name(name) and name != "base" else "adapter"


def _show(console: Console, result: "VerifyReport") -> None:
    from multilora_cli.cli.verify_tables import as_value, show_adapters, show_details, show_drift

    console.value(as_value(result))
    if console.quiet:
        for adapter in result.adapters:
            console.line(f"{adapter.name} {adapter.verdict}")
        return
    console.line(
        f"base {result.model}: {result.storage}, {result.dtype} on {result.device}, identity"
        f" {result.digest[:12]} (config and tensor shapes)"
    )
    if len(result.adapters) == 1:
        show_details(console, result.adapters[0])
    show_adapters(console, result)
    show_drift(console, result)
    for note in result.notes:
        console.line(f"note: {note}")

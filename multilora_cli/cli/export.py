"""`mlora export`: the fleet in the words of other servers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, QuietOption, SetOption
from multilora_cli.fleet.export import Target

if TYPE_CHECKING:
    from multilora_cli.fleet.export import ExportedAdapter
    from multilora_cli.fleet.load import LoadedFleet


def export(
    fleet: FleetArgument = None,
    to: Annotated[Target, typer.Option("--to", help="Whose configuration.")] = "vllm",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file. Default: standard output.")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a fleet as a configuration of vLLM, Ray Serve LLM or vLLM's production stack.

    Reads the headers of adapters for their ranks; weights are not needed. What the other server
    cannot do is said on standard error.

    Example: mlora export fleet.yaml --to kubernetes -o values.yaml
    """
    import yaml

    from multilora_cli.cli.base import local_base
    from multilora_cli.fleet.export import export as exported
    from multilora_cli.fleet.load import load_fleet

    console = Console(as_json=as_json, quiet=quiet)
    loaded = load_fleet(fleet, settings or ())
    folder = local_base(loaded)
    model = loaded.fleet.base.model if folder is None else str(folder.resolve())
    made = exported(loaded.fleet, model, _adapters(loaded), to)
    text = yaml.safe_dump(made.document, sort_keys=False, allow_unicode=True, width=1000)
    for note in made.notes:
        console.note(note)
    if output is not None:
        _write(output, text)
        console.value({"to": to, "path": str(output), "notes": made.notes})
        console.note(f"{output}: written for {to}")
    elif as_json:
        console.value({"to": to, "document": made.document, "notes": made.notes})
    else:
        console.raw(text)


def _adapters(loaded: "LoadedFleet") -> "list[ExportedAdapter]":
    """Every adapter that the file lists, read as far as it can be."""
    from multilora_cli.adapters.survey import Surveyor
    from multilora_cli.cli.base import fetch_config
    from multilora_cli.cli.fleet_adapters import read_fleet_adapters
    from multilora_cli.errors import MloraError
    from multilora_cli.fleet.export import ExportedAdapter
    from multilora_cli.sizing.geometry import read_geometry

    folder = fetch_config(loaded)
    geometry = read_geometry(folder)
    limit = loaded.fleet.limits.max_lora_rank
    surveyor = Surveyor(geometry, max_rank=limit, base_folder=folder)
    rows = []
    for declared, found in read_fleet_adapters(loaded, geometry, surveyor.survey):
        if isinstance(found, MloraError):
            rows.append(ExportedAdapter(declared))
            continue
        shape = found.shape
        has_more = bool(shape.vectors or shape.matrices)
        rows.append(ExportedAdapter(declared, found.folder, shape.max_rank, has_more))
    return rows


def _write(path: Path, text: str) -> None:
    """Raises MloraError."""
    from multilora_cli.errors import MloraError, reason_of

    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise MloraError(f"--output {path}: {reason_of(error)}") from None

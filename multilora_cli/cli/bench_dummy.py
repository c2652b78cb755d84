"""`mlora bench dummy`: a fleet of random weights to measure a server with."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import JsonOption, QuietOption


def dummy(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="A shape by name, or a folder with a config.json. Default: llama-3-8b; tiny where"
            " there is no card."
        ),
    ] = None,
    setting: Annotated[
        str,
        typer.Option(
            help="The adapters: base (none), one, distinct, mixed, pool, or S-LoRA's s1 to s6;"
            " several with commas."
        ),
    ] = "distinct",
    adapters: Annotated[
        int, typer.Option(help="How many, where they are distinct.", min=1, max=4096)
    ] = 64,
    quantization: Annotated[
        Literal["none", "fp8", "awq"], typer.Option(help="Of the base.")
    ] = "none",
    layers: Annotated[
        int | None,
        typer.Option(
            help="Layers with numbers in an adapter; zeros take no disk. Default: all.", min=1
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a fleet file whose base and adapters are random weights, made when it is served.

    The settings are those of mlora bench --offline, so that the same engine can be measured with
    HTTP and without.

    Example: mlora bench dummy /tmp/speed && mlora bench /tmp/speed/fleet.yaml
    """
    from multilora_cli.bench.dummy_fleet import write_fleet
    from multilora_cli.bench.neutral import make_settings
    from multilora_cli.cli.bench_offline import usual_model
    from multilora_cli.errors import BadInput

    console = Console(as_json=as_json, quiet=quiet)
    chosen = make_settings(setting.split(","), adapters, flag="--setting", layers=layers)
    model = model or usual_model(console, "auto", "written")
    try:
        path = write_fleet(folder, model, quantization, chosen)
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror or error}") from None
    if quiet:
        console.line(str(path))
    else:
        console.line(
            f"{model}, written: mlora serve {path} serves it, mlora bench {path} measures it"
        )
    console.value({"fleet": str(path)})

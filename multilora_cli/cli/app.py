"""The command `mlora`: its commands, and how an error becomes one line and an exit code.

Command modules import only typer and annotations; what is heavy is imported inside a command, so
that `mlora --help` answers in about 0.2 s and never reaches torch or the server.
"""

from typing import Annotated

import typer

from multilora_cli import __version__
from multilora_cli.cli import (
    bench,
    chat,
    export,
    fleet_diff,
    listing,
    lock,
    plan,
    quantize,
    schema,
    serve,
    tiers,
    verify,
)
from multilora_cli.cli.commands import Command, Group
from multilora_cli.cli.console import Console
from multilora_cli.cli.options import help_of

app = typer.Typer(
    cls=Group,
    name="mlora",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        Console().raw(f"mlora {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """One base model and thousands of LoRA adapters on one machine."""


BEFORE, RUN, OPERATE, MEASURE = "Before you start", "Run", "Operate", "Measure"
for _panel, _name, _command in (
    (BEFORE, "plan", plan.plan),
    (BEFORE, "verify", verify.verify),
    (BEFORE, "lock", lock.lock),
    (BEFORE, "quantize", quantize.quantize),
    (BEFORE, "schema", schema.schema),
    (BEFORE, "export", export.export),
    (RUN, "serve", serve.serve),
    (RUN, "chat", chat.chat),
    (OPERATE, "list", listing.list_adapters),
    (OPERATE, "diff", fleet_diff.diff),
    (OPERATE, "apply", fleet_diff.apply),
    (OPERATE, "warm", tiers.warm),
    (OPERATE, "evict", tiers.evict),
):
    app.command(_name, cls=Command, rich_help_panel=_panel, help=help_of(_command))(_command)
app.add_typer(bench.app, name="bench", rich_help_panel=MEASURE)


def main() -> None:
    """Entry point of the console script."""
    app()

"""Options that several commands share, spelled once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from multilora_cli.errors import BadInput

_T = TypeVar("_T")

FleetArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FLEET", help="The fleet file. Default: ./fleet.yaml, then ./fleet.example.yaml."
    ),
]
FleetOption = Annotated[
    Path | None, typer.Option("--fleet", metavar="FILE", help="A fleet file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file. Repeatable."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help="The server. Default: the fleet file's address, else http://127.0.0.1:8000."
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="MLORA_API_KEY", help="The key to send.", show_envvar=True),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the bare result only.")]


def help_of(command: Callable[..., Any]) -> str:
    """A command's docstring with a line for each paragraph, for the terminal to break.

    Typer keeps line ends in all but the first paragraph, which leaves half lines at 80 columns.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def parse_flag(flag: str, text: str, parse: Callable[[str], _T]) -> _T:
    """What `parse` makes of a flag's `text`; its ValueError becomes a BadInput about the flag."""
    try:
        return parse(text)
    except ValueError as error:
        raise BadInput(f"{flag}: {error}") from None

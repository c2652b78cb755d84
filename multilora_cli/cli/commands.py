"""How commands look: what flags take, how they are used, and a mistake on the command line."""

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from multilora_cli.cli.console import Console
from multilora_cli.errors import MloraError

INTERRUPTED = 130
_BRACES = str.maketrans("", "", "{}")
# Typer has its own copy of click or the real one, by its version: these are the errors of both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class Command(TyperCommand):
    """A command; its flags say what they take, and nothing where they take nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        """With the flags that Typer adds: --help."""
        return _bare(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`NAME...`, for what some versions of Typer spell `{NAME...}...`."""
        pieces = super().collect_usage_pieces(ctx)
        return [piece.translate(_BRACES).replace("." * 6, "...") for piece in pieces]


class Group(TyperGroup):
    """Commands; an error of theirs becomes one line on stderr and an exit code."""

    def get_params(self, ctx: Any) -> list[Any]:
        """With the flags that Typer adds: --help, --install-completion."""
        return _bare(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A fault of ours is one line, or a traceback with --debug."""
        try:
            return super().invoke(ctx)
        except MloraError as error:
            if ctx.params.get("debug"):
                raise
            Console().error(error.message, error.hint)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    def main(self, *args: Any, **settings: Any) -> Any:
        """As Typer's, but a flag that is not there is told as any other mistake is."""
        if not settings.get("standalone_mode", True):
            return super().main(*args, **settings)
        settings["standalone_mode"] = False
        try:
            status = super().main(*args, **settings)
        except _CLICK_ERROR as error:
            _tell(error)
        except typer.Abort:
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _bare(params: list[Any]) -> list[Any]:
    """Flags without a value say nothing of one: some versions of Typer write `--json <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _tell(error: Any) -> NoReturn:
    """One line about a flag, an argument or a command, and where to look. Ends the process."""
    where = error.ctx.command_path if getattr(error, "ctx", None) else "mlora"
    near = getattr(error, "possibilities", None)
    text = " ".join((error.message if near else error.format_message()).split())
    if not text:  # no arguments at all: the help stands there already
        sys.exit(error.exit_code)
    if near:
        text += f"; did you mean {' or '.join(near)}?"
    for theirs, ours in (
        ("Value error, ", ""), ("Input should be", "expected"), (". Did you", "; did you"),
    ):  # fmt: skip
        text = text.replace(theirs, ours)
    text = text.rstrip(".")
    Console().error(text[:1].lower() + text[1:], hint=f"see {where} --help")
    sys.exit(error.exit_code)

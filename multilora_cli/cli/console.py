"""The only place that prints: for people, as JSON, or hardly at all.

Nothing that came from outside (names, model output, error texts) reaches a terminal before `clean`
has made its control characters visible; rich is given Text objects only, never markup from outside.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Literal

from multilora_cli.errors import MloraError, reason_of
from multilora_cli.logs import clean
from multilora_cli.progress import Report, silent

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

# What a person reads for the phases that the packages below report.
_PHASES = {
    "base": "finding the base",
    "adapters": "reading adapters",
    "import": "starting PyTorch",
    "weights": "loading weights",
    "pool": "taking memory",
    "kernels": "compiling kernels",
    "steps": "running steps of every size",
    "graphs": "capturing decode steps",
    "reference": "computing the reference, layer by layer",
    "answers": "asking adapters",
    "model": "fetching the model",
    "layers": "quantising layers",
    "text": "measuring",
}


class Console:
    """Where commands put what they have to say.

    human: lines and tables on stdout, progress on stderr; json: one JSON value on stdout;
    quiet: only what was asked for, no progress and no decoration.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr

    @property
    def interactive(self) -> bool:
        """Whether a person at a terminal is reading stdout."""
        return not self.as_json and not self.quiet and self._stdout.isatty()

    def line(self, text: str = "") -> None:
        """One line for people; nothing in JSON mode."""
        if not self.as_json:
            self._write(self._stdout, _fitted(clean(text), self._stdout) + "\n")

    def text(self, text: str) -> None:
        """Text as it streams in, newlines and tabs kept, no line end added."""
        self._write(self._stdout, clean(text, keep="\n\t"))

    def note(self, text: str) -> None:
        """Something said beside the result, on stderr; nothing when quiet or in JSON mode."""
        if not self.quiet and not self.as_json:
            self._write(self._stderr, _fitted(clean(text), self._stderr) + "\n")

    def value(self, value: Any) -> None:
        """The result as JSON; only in JSON mode."""
        if self.as_json:
            self._write(self._stdout, json.dumps(value, indent=2, default=str) + "\n")

    def raw(self, text: str) -> None:
        """A document of our own making, in every mode."""
        self._write(self._stdout, text if text.endswith("\n") else text + "\n")

    def error(self, message: str, hint: str | None = None) -> None:
        """What went wrong, one line a fault, and what to do about it; on stderr."""
        lines = [f"error: {clean(line)}" for line in message.splitlines() or [""]]
        if hint:
            lines.append(f"hint: {clean(hint)}")
        fitted = (_fitted(line, self._stderr) for line in lines)
        self._write(self._stderr, "\n".join(fitted) + "\n")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str = "",
        spare: Sequence[str] = (),
    ) -> None:
        """A table: drawn for a terminal, tab-separated lines otherwise. Nothing in JSON mode.

        `spare` names columns, the least needed first, that a narrow terminal goes without.
        """
        if self.as_json:
            return
        if not self.interactive:
            for row in [columns, *rows] if not self.quiet else rows:
                self._write(self._stdout, "\t".join(clean(cell) for cell in row) + "\n")
            return
        from rich.table import Table
        from rich.text import Text

        columns, rows = _narrowed(columns, rows, spare)
        table = Table(title=Text(clean(title)) if title else None, title_justify="left")
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(_numeric(row[index]) for row in rows)
            # The first column names the row: the others give way, and nothing is cut off.
            justify: Literal["left", "right"] = "right" if numeric else "left"
            table.add_column(
                Text(clean(column)), justify=justify, no_wrap=index == 0, overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        self.render(table)

    def panel(self, title: str, rows: Mapping[str, str]) -> None:
        """Named facts in a box on a terminal, as `name: fact` lines otherwise."""
        if self.as_json or self.quiet:
            return
        if not self.interactive:
            for name, fact in rows.items():
                self.line(f"{name}: " + "; ".join(fact.splitlines()))
            return
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, fact in rows.items():
            grid.add_row(Text(clean(name), style="bold"), Text(clean(fact, keep="\n")))
        self.render(Panel(grid, title=Text(clean(title)), expand=False, border_style="green"))

    def render(self, renderable: "RenderableType") -> None:
        """Draw something of rich's on stdout."""
        self.rich().print(renderable)

    def rich(self, *, stderr: bool = False) -> "RichConsole":
        """rich's console over our stream, for progress and live displays."""
        from rich.console import Console as RichConsole

        stream = self._stderr if stderr else self._stdout
        if not _is_dumb():
            return RichConsole(file=stream, highlight=False)
        size = shutil.get_terminal_size()  # which rich takes for 80 columns, whatever it is
        return RichConsole(file=stream, highlight=False, width=size.columns, height=size.lines)

    @property
    def animates(self) -> bool:
        """Whether stderr is a terminal on which something may move, and somebody may look."""
        shown = not self.as_json and not self.quiet
        return shown and self._stderr.isatty() and not _is_dumb()

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """Progress of phases on stderr: bars on a terminal, a line per phase otherwise."""
        if self.quiet or self.as_json:
            yield silent
        elif not self.animates:
            yield _PhaseLines(self)
        else:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self.rich(stderr=True), transient=True) as bars:
                yield _PhaseBars(bars)

    def _write(self, stream: IO[str], text: str) -> None:
        """Raises MloraError where a result cannot be written: a full disk, for one."""
        try:
            stream.write(text)
            stream.flush()
        except UnicodeEncodeError:  # a ValueError, so it comes first
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (BrokenPipeError, ValueError):  # who read us is gone; the work itself goes on
            _abandon(stream)
        except OSError as error:
            _abandon(stream)
            if stream is self._stdout:
                raise MloraError(f"cannot write the result: {reason_of(error)}") from None
            # of standard error there is nobody left to tell


def _is_dumb() -> bool:
    """A terminal that cannot move its cursor: an editor's shell, a log that calls itself one."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def _abandon(stream: IO[str]) -> None:
    """What is buffered goes nowhere, so that the interpreter does not fail over it at its end."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _PhaseLines:
    """A line for every phase that begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: set[str] = set()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._begun:
            self._begun.add(phase)
            self._console.note(f"{_PHASES.get(phase, phase)} ...")


class _PhaseBars:
    """A bar for every phase; a total of 0 is one that nobody knows yet."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            name = clean(_PHASES.get(phase, phase))
            self._tasks[phase] = self._bars.add_task(name, total=total or None)
        self._bars.update(self._tasks[phase], completed=done, total=total or None)


def _fitted(text: str, stream: IO[str]) -> str:
    """`text` broken between words where a terminal would break inside one."""
    if stream.closed or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    if len(text) < width or width < 20:
        return text
    lines = textwrap.wrap(text, width - 1, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _narrowed(
    columns: Sequence[str], rows: Sequence[Sequence[object]], spare: Sequence[str]
) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """The table without as many of the `spare` columns as it takes to fit the terminal."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(clean(cell)) for cell in cells) for cells in zip(columns, *rows, strict=True)
    ]
    shown = list(range(len(columns)))
    room = shutil.get_terminal_size().columns - 1
    for name in spare:
        if sum(widths[i] + 3 for i in shown) > room:  # a border and two blanks each
            shown.remove(columns.index(name))
    return [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]


def _numeric(cell: object) -> bool:
    return isinstance(cell, int | float) or str(cell)[:1].isdigit() or cell == "-"

"""What a person sees of a bench: where it is while it runs, and the tables at its end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multilora_cli.cli.console import Console
from multilora_cli.logs import clean
from multilora_cli.units import format_duration

if TYPE_CHECKING:
    from multilora_cli.bench.campaign import Pass
    from multilora_cli.bench.load import Progress

_WIDE = 160  # columns of a terminal that hold the whole table
_MAX_GROUP_ROWS = 40  # more is for the report
_FIGURES = {
    "peak_in_flight": "streams at once",
    "tokens_per_s": "tokens/s",
    "tokens_per_cpu_s": "tokens per second of CPU",
    "lag_p99_s": "event loop late, p99",
    "duration_s": "duration",
    "front_cpu_s": "CPU time of the front",
    "front_system_s": "of it in the kernel",
    "front_share": "front's share of a core",
    "client_cpu_s": "CPU time of the clients",
}


class Live:
    """One line on a terminal that says where the load is; a line a pass otherwise."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Any = None

    def __enter__(self) -> "Live":
        if self._console.animates:
            self._status = self._console.rich(stderr=True).status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, label: str, progress: "Progress") -> None:
        """Show where a pass is."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(clean(describe(label, progress))))

    def ended(self, done: "Pass") -> None:
        """Say that a pass ended."""
        found = done.measures
        label = f"{done.side}: {done.arm}" if done.side else done.arm
        failed = sum(found.errors.values())
        text = f"{label}, round {done.round + 1}: {found.completed} answers in"
        text += f" {format_duration(found.duration_s)}, {found.output_tokens_per_s:.1f} tok/s"
        text += f", {failed} failed" if failed else ""
        if self._status is None:
            self._console.note(text)
            return
        from rich.text import Text

        self._status.console.print(Text(clean(text)))  # above the live line, not into it


def describe(label: str, progress: "Progress") -> str:
    """`skewed: 12 of 32 done, 8 in flight, 410 tok/s, TTFT 120 ms`."""
    text = f"{label}: {progress.done} of {progress.total} done, {progress.in_flight} in flight"
    text += f", {progress.tokens_per_s:.0f} tok/s"
    if progress.ttft_s is not None:
        text += f", TTFT {format_duration(progress.ttft_s)}"
    return text + (f", {progress.errors} failed" if progress.errors else "")


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """The tables of a report, and what must be said beside them."""
    from multilora_cli.bench.tables import (
        against_table,
        describe_generator,
        describe_lengths,
        error_table,
        group_table,
        main_table,
        narrow_tables,
    )

    servers = ", ".join(f"{s['base']} with {s['adapters']} adapters" for s in report["servers"])
    main = main_table(report)
    narrow = console.interactive and console.rich().width < _WIDE
    title = f"{report['preset']}: {servers}"
    for columns, rows in narrow_tables(main) if narrow else [main]:
        console.table(columns, rows, title=title)
        title = ""
    if console.quiet:
        return
    tables = [
        ("ratios to the other server", against_table(report)),
        ("errors", error_table(report)),
    ]
    if report["preset"] == "rank-mix":  # of the others the page and the JSON have it
        tables.insert(1, ("by rank", group_table(report, "per_rank", "rank")))
    if report["preset"] == "cold-start":  # elsewhere the warm-up has loaded what is used
        tables.insert(1, ("by tier before the pass", group_table(report, "per_tier", "tier")))
    for title, (columns, rows) in tables:
        if rows and len(rows) <= _MAX_GROUP_ROWS:
            console.line()
            console.table(columns, rows, title=title)
    console.line()
    console.line(describe_lengths(report))
    console.line(describe_generator(report))
    for note in report["notes"]:
        console.line(f"note: {note}")


def show_figures(console: Console, value: Mapping[str, float]) -> None:
    """One measurement, a figure a line; units as the names of its fields end."""
    console.table(
        ("figure", "value"),
        [(_FIGURES.get(name, name), _figure(name, number)) for name, number in value.items()],
    )


def _figure(name: str, number: float) -> str:
    if name.endswith("_share"):
        return f"{number:.1%}"
    if name.endswith("_s") and "_per_" not in name:
        return format_duration(number)
    return f"{number:,.0f}"

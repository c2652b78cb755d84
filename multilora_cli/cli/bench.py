"""`mlora bench`: heterogeneous loads anyone can repeat, on our server and on anybody's."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multilora_cli.cli import bench_flags as flags
from multilora_cli.cli.bench_dummy import dummy
from multilora_cli.cli.bench_front import front
from multilora_cli.cli.bench_offline import offline
from multilora_cli.cli.commands import USAGE_ERROR, Command, Group
from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, KeyOption, QuietOption, help_of

if TYPE_CHECKING:
    from multilora_cli.cli.bench_options import BenchOptions


class _RunContext(typer.Context):
    """`run` is not typed, and so not shown."""

    @property
    def command_path(self) -> str:
        return super().command_path.replace("bench run", "bench").replace("offline", "--offline")


class _Form(Command):
    """A form of `bench`, by what a person types for it."""

    context_class = _RunContext


class _DefaultRun(Group):
    """`mlora bench FLEET ...` is `mlora bench run FLEET ...`; --offline is `offline` where no
    FLEET is named, and a flag of `run` where one is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--offline" in args and not self._names_a_fleet(ctx, args):
            args = ["offline", *(arg for arg in args if arg != "--offline")]
        elif not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def _names_a_fleet(self, ctx: Any, args: list[str]) -> bool:
        """Whether these are flags of `run` with a fleet file, and none of `offline`."""
        try:
            found, _, _ = self.commands["run"].make_parser(ctx).parse_args(list(args))
        except USAGE_ERROR:
            return False
        return found.get("fleet") is not None


app = typer.Typer(cls=_DefaultRun, no_args_is_help=False)
app.command("offline", cls=_Form, help=help_of(offline))(offline)
app.command("dummy", cls=_Form, help=help_of(dummy))(dummy)
app.command("front", cls=_Form, help=help_of(front))(front)


@app.callback()
def bench() -> None:
    """Measure a server under heterogeneous loads: popularities, ranks, cold starts, churn."""


def run(
    fleet: FleetArgument = None,
    offline: flags.Offline = False,
    url: flags.Url = None,
    heterogeneous: flags.Heterogeneous = False,
    preset: flags.Preset = None,
    trace: flags.Trace = None,
    compare: flags.Compare = None,
    requests: flags.Requests = None,
    rate: flags.Rate = None,
    cv: flags.Cv = 1.0,
    concurrency: flags.Concurrency = None,
    lengths: flags.Lengths = None,
    limit: flags.Limit = None,
    rounds: flags.Rounds = None,
    seed: flags.Seed = 0,
    gpu: flags.Gpu = None,
    model: flags.Model = None,
    adapters_from: flags.AdaptersFrom = "models",
    prompts: flags.Prompts = "ids",
    no_ignore_eos: flags.NoIgnoreEos = False,
    slo: flags.Slo = None,
    timeout: flags.Timeout = 600.0,
    against: flags.Against = None,
    api_key: KeyOption = None,
    against_api_key: flags.AgainstApiKey = None,
    report: flags.Report = None,
    output: flags.Output = None,
    rows: flags.Rows = None,
    commit: flags.Commit = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a server under heterogeneous loads. Without --url it starts its own and stops it;
    with --offline it drives the engine of FLEET in this process, without HTTP and text.

    Loads take turns (A/B/A/B), so that a drifting machine does not decide; every load has prompts
    of its own, so that no prefix cache answers.

    Other forms, each with its own --help: mlora bench --offline (the engine's steps over random
    weights, no FLEET), compare A.json B.json, dummy FOLDER (a fleet of random weights), front (the
    front process alone), selftest.

    Example: mlora bench fleet.example.yaml --heterogeneous --report bench.html
    """
    given = dict(locals())  # not a context's params, which some versions of Typer leave as text
    from multilora_cli.cli.bench_options import BenchOptions, check_writable

    check_writable(report, "--report")
    check_writable(output, "--output")
    check_writable(rows, "--rows")
    given["ignore_eos"] = not no_ignore_eos
    options = BenchOptions.from_flags(given, sys.argv[1:])
    _run(Console(as_json=as_json, quiet=quiet), options, report, output)


def _run(console: Console, options: "BenchOptions", page: Path | None, output: Path | None) -> None:
    from multilora_cli.bench.page import write_page
    from multilora_cli.bench.report import write_json
    from multilora_cli.cli.bench_run import measure_all
    from multilora_cli.cli.bench_view import show_report

    # A server of our own must not outlive us: a polite kill ends like Ctrl-C, which stops it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    value = asyncio.run(measure_all(console, options))
    if output is not None:
        write_json(value, output)
    if page is not None:
        write_page(value, page)
        console.note(f"the report is in {page}")
    show_report(console, value)
    console.value(value)
    if not any(arm["measures"]["output_length"]["total"] for arm in value["arms"]):
        raise typer.Exit(1)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="The report to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The report in question.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Put two reports side by side: every figure of B over that of A.

    Example: mlora bench compare before.json after.json
    """
    from multilora_cli.bench.report import compare_reports, read_report
    from multilora_cli.bench.tables import compare_table

    console = Console(as_json=as_json, quiet=quiet)
    value = compare_reports(read_report(first), read_report(second))
    if value["differing"]:
        console.note(f"the reports differ in: {', '.join(value['differing'])}")
    console.table(*compare_table(value), title=f"A: {first}, B: {second}")
    console.value(value)


def selftest(
    streams: Annotated[int, typer.Option(help="Streams at once.", min=1, max=20_000)] = 2000,
    tokens: Annotated[int, typer.Option(help="Tokens of each.", min=1, max=100_000)] = 100,
    gap: Annotated[float, typer.Option(help="Seconds between the tokens of one.", min=0)] = 0.1,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the load generator itself, against a server that only pretends.

    Example: mlora bench selftest --streams 2000
    """
    from dataclasses import asdict

    from multilora_cli.bench.selftest import self_test
    from multilora_cli.cli.bench_view import show_figures

    console = Console(as_json=as_json, quiet=quiet)
    result = asyncio.run(self_test(streams, tokens, gap))
    value = asdict(result)
    show_figures(console, value)
    console.value(value)


for _name, _command in (("run", run), ("compare", compare), ("selftest", selftest)):
    app.command(_name, cls=_Form, help=help_of(_command))(_command)

"""`mlora bench`: heterogeneous loads anyone can repeat, on our server and on anybody's."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from multilora_cli.cli.bench_dummy import dummy
from multilora_cli.cli.bench_front import front
from multilora_cli.cli.bench_offline import offline
from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, KeyOption, QuietOption

if TYPE_CHECKING:
    from multilora_cli.cli.bench_run import BenchOptions


class _DefaultRun(TyperGroup):
    """`mlora bench FLEET ...` is `mlora bench run FLEET ...`, --offline is `offline`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--offline" in args:
            args = ["offline", *(arg for arg in args if arg != "--offline")]
        elif not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_DefaultRun, no_args_is_help=False)
app.command("offline")(offline)
app.command("dummy")(dummy)
app.command("front")(front)


@app.callback()
def bench() -> None:
    """Measure a server under heterogeneous loads: popularities, ranks, cold starts, churn."""


@app.command("run")
def run(
    fleet: FleetArgument = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A running server, of any make. Default: our own.")
    ] = None,
    heterogeneous: Annotated[
        bool, typer.Option("--heterogeneous", help="Base, identical, skewed, uniform, distinct.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(help="punica, s-lora-table3, rank-mix, cold-start, churn or smoke."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a recorded load: JSON lines, as of plan --trace.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Only these loads of the preset: base,distinct.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of each load.", min=1)] = None,
    rate: Annotated[
        str | None, typer.Option(help="Arrivals: requests/s (open loop), or inf for all at once.")
    ] = None,
    cv: Annotated[float, typer.Option(help="Burstiness of arrivals; 1: Poisson.", min=0.01)] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once (closed loop), or their cap.", min=1)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="IN:OUT tokens (16-64:32), or a law such as arena-like.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often all loads take turns.", min=1, max=100)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and prompts.", min=0)] = 0,
    gpu: Annotated[
        str | None,
        typer.Option(help="The server's card (h200), for shares of the bound. Needs FLEET."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The base's name, where a server lists several models.")
    ] = None,
    adapters_from: Annotated[
        str, typer.Option(help="models: the server's list; or a file with a name a line.")
    ] = "models",
    prompts: Annotated[
        str, typer.Option(help="ids (completions), text (completions) or chat.")
    ] = "ids",
    ignore_eos: Annotated[
        bool, typer.Option(help="Send ignore_eos, which fixes output lengths.")
    ] = True,
    slo: Annotated[str | None, typer.Option(help="For goodput: ttft=1s,itl=50ms,e2e=30s.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.", min=1)] = 600.0,
    against: Annotated[
        str | None, typer.Option(help="A second server, measured in turns with the first.")
    ] = None,
    api_key: KeyOption = None,
    against_api_key: Annotated[
        str | None,
        typer.Option(envvar="MLORA_AGAINST_API_KEY", help="The key of the second server."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write one HTML page with tables and plots.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a server under heterogeneous loads. Without --url it starts its own and stops it.

    Loads take turns (A/B/A/B), so that a drifting machine does not decide; every load has prompts
    of its own, so that no prefix cache answers. Other forms: mlora bench compare A.json B.json,
    mlora bench selftest.

    Example: mlora bench fleet.example.yaml --heterogeneous --report bench.html
    """
    from multilora_cli.cli.bench_run import BenchOptions, check_writable, parse_rate, pick_preset

    check_writable(report, "--report")
    check_writable(output, "--output")
    options = BenchOptions(
        fleet=fleet,
        url=url,
        preset=pick_preset(preset, heterogeneous, trace),
        trace=trace,
        compare=compare,
        requests=requests,
        rate=parse_rate(rate),
        cv=cv,
        concurrency=concurrency,
        lengths=lengths,
        rounds=rounds,
        seed=seed,
        gpu=gpu,
        model=model,
        adapters_from=adapters_from,
        prompts=prompts,
        ignore_eos=ignore_eos,
        slo=slo,
        timeout_s=timeout,
        against=against,
        api_key=api_key,
        against_api_key=against_api_key,
        arguments=tuple(sys.argv[1:]),
    )
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
    if not any(arm["measures"]["completed"] for arm in value["arms"]):
        raise typer.Exit(1)


@app.command("compare")
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


@app.command("selftest")
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

    console = Console(as_json=as_json, quiet=quiet)
    result = asyncio.run(self_test(streams, tokens, gap))
    value = asdict(result)
    console.table(("figure", "value"), [(name, f"{v:,.6g}") for name, v in value.items()])
    console.value(value)

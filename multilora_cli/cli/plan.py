"""`mlora plan`: what fits and what it will cost, before anything is bought or started."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, QuietOption, SetOption, parse_flag

if TYPE_CHECKING:
    from multilora_cli.sizing.hardware import Gpu
    from multilora_cli.sizing.report import FleetPlan, PlanRequest
    from multilora_cli.sizing.trace import Call, TraceForecast


@dataclass(frozen=True)
class _Question:
    """What is planned, whatever the settings; `elsewhere`: on a card that was named."""

    fleet: Path | None
    card: "Gpu | None"
    assume: str | None
    elsewhere: bool

    def request(self, settings: Sequence[str]) -> "PlanRequest":
        """The question under some settings. Raises MloraError."""
        from multilora_cli.cli.plan_request import plan_request

        return plan_request(self.fleet, settings, self.card, self.assume, elsewhere=self.elsewhere)


def plan(
    fleet: FleetArgument = None,
    gpu: Annotated[str | None, typer.Option(help="The card, such as rtx-4090 or h200.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Its memory, such as 24GiB.")] = None,
    assume: Annotated[
        str | None, typer.Option(help="Instead of adapters: rank=16,targets=attention,count=200.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay a recorded load (JSON lines).")] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what fits on a card and what a step costs at least. Needs no GPU and no weights.

    Several values in one --set (base.quantization=none,fp8,awq) make a table of what-ifs.

    Exit code 0: it fits; 1: it does not, and what would; 2: bad input.

    Example: mlora plan fleet.yaml --gpu rtx-4090 --set base.quantization=awq
    """
    console = Console(as_json=as_json, quiet=quiet)
    question = _Question(fleet, _card(gpu, gpu_memory), assume, elsewhere=gpu is not None)
    grid = [_values(setting) for setting in settings or ()]
    if any(len(values) > 1 for _, values in grid):
        if trace is not None:
            from multilora_cli.errors import BadInput

            raise BadInput("--trace: expected one value in each --set, found several")
        fits = _what_if(console, question, grid)
    else:
        fits = _one(console, question, settings or (), trace)
    if not fits:
        raise typer.Exit(1)


def _one(
    console: Console, question: _Question, settings: Sequence[str], trace: Path | None
) -> bool:
    from multilora_cli.cli.plan_tables import show_forecast, show_plan
    from multilora_cli.errors import Refused
    from multilora_cli.sizing.report import plan_fleet, what_would_fit
    from multilora_cli.sizing.trace import read_trace

    calls = None if trace is None else read_trace(trace)
    request = question.request(settings)
    try:
        result = plan_fleet(request)
    except Refused as error:
        raise Refused(error.message, hint=what_would_fit(request) or error.hint) from None
    value = result.as_json()
    forecast = None if calls is None else _forecast(calls, result)
    if not console.quiet:
        show_plan(console, result)
    else:
        console.line("fits" if result.fits else "does not fit")
    if forecast is not None:
        show_forecast(console, forecast)
        value["trace"] = forecast
    console.value(_plain(value))
    return result.fits


def _what_if(console: Console, question: _Question, grid: Sequence[tuple[str, list[str]]]) -> bool:
    from multilora_cli.cli.plan_tables import show_grid
    from multilora_cli.errors import ModelError, Refused
    from multilora_cli.sizing.report import plan_fleet

    keys = [key for key, _ in grid]
    rows: list[tuple[Sequence[str], FleetPlan | str]] = []
    for values in itertools.product(*(values for _, values in grid)):
        settings = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        try:
            rows.append((values, plan_fleet(question.request(settings))))
        except (ModelError, Refused) as error:
            rows.append((values, error.message))
    show_grid(console, keys, rows)
    console.value([{"set": _named(keys, v), "plan": _plan_value(p)} for v, p in rows])
    return any(not isinstance(p, str) and p.fits for _, p in rows)


def _named(keys: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    return dict(zip(keys, values, strict=True))


def _plan_value(plan: "FleetPlan | str") -> object:
    if isinstance(plan, str):
        return {"fits": False, "problems": [plan]}
    return _plain(plan.as_json())


def _values(setting: str) -> tuple[str, list[str]]:
    key, _, value = setting.partition("=")
    is_nested = value.strip()[:1] in ("[", "{")  # whose commas part no what-ifs
    return key, [value] if is_nested else value.split(",")


def _card(gpu: str | None, gpu_memory: str | None) -> "Gpu | None":
    from multilora_cli.errors import BadInput
    from multilora_cli.sizing.hardware import find_gpu, local_gpu
    from multilora_cli.units import parse_size

    card = find_gpu(gpu) if gpu else local_gpu()
    if gpu_memory is None:
        return card
    if card is None:
        raise BadInput("--gpu-memory needs --gpu: the card's rates are looked up by its name")
    return replace(card, memory_mib=parse_flag("--gpu-memory", gpu_memory, parse_size) // 2**20)


def _forecast(calls: "Sequence[Call]", result: "FleetPlan") -> "TraceForecast":
    from multilora_cli.sizing.trace import forecast

    pages = {adapter.name: adapter.cost.num_pages for adapter in result.adapters}
    warm = result.memory.page_bytes
    return forecast(
        calls,
        pages,
        hot_pages=result.adapter_pages,
        warm_pages=result.host_bytes // warm,
    )


def _plain(value: object) -> object:
    """Dataclasses and tuples as JSON's own types."""
    from dataclasses import asdict, is_dataclass

    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

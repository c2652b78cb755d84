"""`mlora plan`: what fits and what it will cost, before anything is bought or started."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, QuietOption, SetOption

if TYPE_CHECKING:
    from multilora_cli.fleet.load import LoadedFleet
    from multilora_cli.sizing.geometry import ModelGeometry
    from multilora_cli.sizing.hardware import Gpu
    from multilora_cli.sizing.quantization import Quantization
    from multilora_cli.sizing.report import AdapterShape, FleetPlan, PlanRequest

_CPU_POOL = 2 * 2**30  # what an engine on a CPU takes for its pool unless told otherwise


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
    card = _card(gpu, gpu_memory)
    grid = [_values(setting) for setting in settings or ()]
    if any(len(values) > 1 for _, values in grid):
        fits = _what_if(console, fleet, grid, card, assume)
    else:
        fits = _one(console, fleet, settings or (), card, assume, trace)
    if not fits:
        raise typer.Exit(1)


def _one(
    console: Console,
    fleet: Path | None,
    settings: Sequence[str],
    card: "Gpu | None",
    assume: str | None,
    trace: Path | None,
) -> bool:
    from multilora_cli.cli.plan_tables import show_forecast, show_plan
    from multilora_cli.errors import Refused
    from multilora_cli.sizing.report import plan_fleet, what_would_fit

    request = plan_request(fleet, settings, card, assume)
    try:
        result = plan_fleet(request)
    except Refused as error:
        raise Refused(error.message, hint=what_would_fit(request) or error.hint) from None
    value = result.as_json()
    if not console.quiet:
        show_plan(console, result)
    else:
        console.line("fits" if result.fits else "does not fit")
    if trace is not None:
        forecast = _forecast(trace, result)
        show_forecast(console, forecast)
        value["trace"] = forecast
    console.value(_plain(value))
    return result.fits


def _what_if(
    console: Console,
    fleet: Path | None,
    grid: Sequence[tuple[str, list[str]]],
    card: "Gpu | None",
    assume: str | None,
) -> bool:
    from multilora_cli.cli.plan_tables import show_grid
    from multilora_cli.errors import ModelError, Refused
    from multilora_cli.sizing.report import plan_fleet

    keys = [key for key, _ in grid]
    rows: list[tuple[Sequence[str], FleetPlan | str]] = []
    for values in itertools.product(*(values for _, values in grid)):
        settings = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        try:
            rows.append((values, plan_fleet(plan_request(fleet, settings, card, assume))))
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
    return key, value.split(",")


def _card(gpu: str | None, gpu_memory: str | None) -> "Gpu | None":
    from multilora_cli.errors import BadInput
    from multilora_cli.sizing.hardware import find_gpu, local_gpu
    from multilora_cli.units import parse_size

    card = find_gpu(gpu) if gpu else local_gpu()
    if gpu_memory is None:
        return card
    if card is None:
        raise BadInput("--gpu-memory needs --gpu: the card's rates are looked up by its name")
    try:
        return replace(card, memory_mib=parse_size(gpu_memory) // 2**20)
    except ValueError as error:
        raise BadInput(f"--gpu-memory: {error}") from None


def plan_request(
    path: Path | None, settings: Sequence[str], card: "Gpu | None", assume: str | None
) -> "PlanRequest":
    from multilora_cli.cli.base import compute_itemsize, fetch_config
    from multilora_cli.fleet.load import load_fleet
    from multilora_cli.sizing.geometry import read_geometry
    from multilora_cli.sizing.report import PlanRequest

    loaded = load_fleet(path, settings)
    folder = fetch_config(loaded)
    geometry = read_geometry(folder)
    shapes = _assumed(assume, geometry) if assume else _adapters(loaded, geometry, folder)
    itemsize = compute_itemsize(loaded, has_card=card is not None)
    quantization, notes = _quantization(loaded, geometry)
    has_fp8 = card is not None and card.fp8_tflops is not None
    quantization = quantization.on(gpu=card is not None, has_fp8=has_fp8, itemsize=itemsize)
    return PlanRequest(
        fleet=loaded.fleet,
        geometry=geometry,
        quantization=quantization,
        itemsize=itemsize,
        available_bytes=_available(loaded, card, geometry, quantization, itemsize),
        gpu=card,
        adapters=tuple(shapes),
        notes=notes if assume else (*notes, *_uncounted(loaded)),
    )


def _uncounted(loaded: "LoadedFleet") -> "Iterator[str]":
    """What the file allows without naming it: nobody knows how many there will be."""
    from multilora_cli.fleet.declared import declared_patterns

    for pattern in declared_patterns(loaded):
        yield (
            f"pattern {pattern.pattern}: its adapters are not known before they are asked for, and"
            " not counted; --assume rank=16,targets=attention,count=200 plans for some"
        )


def _quantization(
    loaded: "LoadedFleet", geometry: "ModelGeometry"
) -> "tuple[Quantization, tuple[str, ...]]":
    """What serving makes of the checkpoint; AWQ of a 16-bit one is a what-if, which a note says."""
    from multilora_cli.sizing.quantization import AWQ, choose_quantization
    from multilora_cli.sizing.quantization_config import read_quantization

    wanted, model = loaded.fleet.base.quantization, loaded.fleet.base.model
    stored = read_quantization(geometry.quantization, model)
    if wanted == "awq" and stored.method == "none":
        return AWQ, (
            f"{model} is a 16-bit checkpoint: to serve it as AWQ, make one with"
            f" `mlora quantize {model} --to awq` and name that as base.model",
        )
    return choose_quantization(wanted, stored, model), ()


def _available(
    loaded: "LoadedFleet", card: "Gpu | None", geometry: "ModelGeometry",
    quantization: "Quantization", itemsize: int,
) -> int:  # fmt: skip
    """Bytes the fleet may use: what the file says, else the card's share, else the CPU's pool."""
    from multilora_cli.sizing.budget import base_bytes

    memory = loaded.fleet.memory
    if memory.device_bytes is not None:
        return memory.device_bytes
    if card is not None:
        return int(card.memory_bytes * memory.device_fraction)
    return base_bytes(geometry, itemsize, quantization).total + _CPU_POOL


def _adapters(
    loaded: "LoadedFleet", geometry: "ModelGeometry", base_folder: Path
) -> "list[AdapterShape]":
    """Shapes from the headers; every bad adapter of the fleet is told in one run."""
    from multilora_cli.adapters.survey import Surveyor
    from multilora_cli.cli.fleet_adapters import read_fleet_adapters
    from multilora_cli.errors import AdapterError, MloraError
    from multilora_cli.sizing.report import AdapterShape

    limit = loaded.fleet.limits.max_lora_rank
    surveyor = Surveyor(geometry, max_rank=limit, base_folder=base_folder)
    shapes, faults = [], []
    for adapter, found in read_fleet_adapters(loaded, geometry, surveyor.survey):
        if isinstance(found, MloraError):
            faults.append(f"{adapter.name}: {found.message}")
            continue
        base = found.shape.base_model_name or ""
        shapes.append(AdapterShape(adapter.name, found.shape.ranks, base, adapter.pin == "hot"))
    if faults:
        raise AdapterError("\n".join(faults))
    return shapes


def _assumed(text: str, geometry: "ModelGeometry") -> "Iterator[AdapterShape]":
    """`count` adapters of one rank on one target set, without any file."""
    from multilora_cli.errors import BadInput
    from multilora_cli.sizing.pages import TARGETS, uniform_ranks
    from multilora_cli.sizing.report import AdapterShape

    fields = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = set(fields) - {"rank", "targets", "count"}
    try:
        rank, count = int(fields.get("rank", "16")), int(fields.get("count", "1"))
        targets = fields.get("targets", "attention")
        modules = TARGETS.get(targets) or tuple(targets.split("+"))
        if unknown or not 1 <= rank <= 512 or not 1 <= count <= 50_000:
            raise ValueError
    except ValueError:
        raise BadInput(
            f"--assume {text}: expected rank=1..512, targets=attention|all|q_proj+v_proj and"
            " count=1..50000, joined by commas"
        ) from None
    ranks = uniform_ranks(geometry, rank, modules)
    return (AdapterShape(f"assumed-{index}", ranks) for index in range(count))


def _forecast(path: Path, result: "FleetPlan"):  # type: ignore[no-untyped-def]
    from multilora_cli.sizing.trace import forecast, read_trace

    pages = {adapter.name: adapter.cost.num_pages for adapter in result.adapters}
    warm = result.memory.page_bytes
    return forecast(
        read_trace(path),
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

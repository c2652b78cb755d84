"""What `mlora bench` does between its flags and its report: servers, adapters, passes."""

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_cli.cli.bench_options import BenchOptions
from multilora_cli.cli.console import Console

if TYPE_CHECKING:
    from multilora_cli.bench.arms import Program, Workload
    from multilora_cli.bench.campaign import Pass, Side
    from multilora_cli.bench.target import Adapter, Fleet

_SAME_LOADS = ("heterogeneous", "punica", "cold-start", "churn", "smoke")  # on every server


async def measure_all(console: Console, options: BenchOptions) -> dict[str, Any]:
    """Start what must be started, measure, stop it; gives the report. Raises MloraError."""
    from multilora_cli.bench.campaign import Settings, run_program
    from multilora_cli.bench.measure import parse_slo
    from multilora_cli.bench.prompts import PromptMaker
    from multilora_cli.bench.report import build_report
    from multilora_cli.bench.rows import append, row
    from multilora_cli.bench.target import raise_file_limit
    from multilora_cli.cli.bench_fleet import FleetFile
    from multilora_cli.cli.bench_view import Live

    slo = parse_slo(options.slo) if options.slo else None
    # A server that runs already may have seen the prompts of the same command, run before.
    draw = 0 if options.url is None else secrets.randbits(32)
    prompts = PromptMaker(options.prompts, options.seed, draw, options.ignore_eos)
    _check_early(options)
    raise_file_limit()
    async with AsyncExitStack() as stack:
        sides = await _sides(console, options, stack)
        file = FleetFile(options)
        ranks = sides[0].fleet.ranks or ({} if options.fleet is None else file.ranks)
        program = _program(options, sides, ranks)
        costs = file.costs(sides[0].adapters)
        facts = _facts(options, sides, program, file.quantization()) | {"prompt_draw": draw}
        live = stack.enter_context(Live(console))

        def ended(done: "Pass") -> None:
            live.ended(done)
            if options.rows is not None:
                append(options.rows, row(done, facts), "--rows")

        settings = Settings(
            prompts=prompts,
            slo=slo,
            ranks=ranks,
            tell=live.tell,
            ended=ended,
            costs=costs,
            limit_s=options.limit,
        )
        passes, notes = await run_program(sides, program, settings)
    return build_report(passes, facts, notes, slo)


def _check_early(options: BenchOptions) -> None:
    """Refuse what is wrong on every server before minutes go into starting one. Raises BadInput."""
    from multilora_cli.bench.arms import Room, make_program, only
    from multilora_cli.sizing.hardware import find_gpu
    from multilora_cli.sizing.trace import read_trace

    if options.gpu is not None:
        find_gpu(options.gpu)
    if options.trace is not None:
        read_trace(options.trace)
    elif options.preset in _SAME_LOADS:
        program = make_program(options.preset, _workload(options), Room(num_adapters=2))
        if options.compare is not None:
            only(program, options.compare.split(","))


async def _sides(
    console: Console, options: BenchOptions, stack: AsyncExitStack
) -> "tuple[Side, ...]":
    from urllib.parse import urlsplit

    from multilora_cli.bench.campaign import Side
    from multilora_cli.bench.target import Target
    from multilora_cli.cli.api import clean_url
    from multilora_cli.cli.background_server import background_server
    from multilora_cli.cli.bench_own_engine import own_engine

    if options.offline:
        engine = stack.enter_context(own_engine(console, options.fleet))
        fleet = await engine.fleet(options.model)
        return (Side("", engine, fleet, _chosen(fleet, options.adapters_from)),)
    places = []
    if options.against is not None:  # checked before a server of our own is started
        url = clean_url(options.against, "--against")
        places.append((urlsplit(url).netloc.rpartition("@")[2], url, options.against_api_key))
    if options.url is not None:
        url = clean_url(options.url)
        name = urlsplit(url).netloc.rpartition("@")[2]
    else:
        server = background_server(options.fleet, console)
        url, name = await stack.enter_async_context(server), "mlora"
    places.insert(0, (name, url, options.api_key))
    sides: list[Side] = []
    for label, address, key in places:
        target = await stack.enter_async_context(Target(address, key, timeout_s=options.timeout))
        fleet = await target.fleet(None if sides else options.model)
        if sides and options.adapters_from == "models":
            adapters = _twins(sides[0], fleet)
        else:
            adapters = _chosen(fleet, options.adapters_from)
        sides.append(Side(label if len(places) > 1 else "", target, fleet, adapters))
    return tuple(sides)


def _chosen(fleet: "Fleet", adapters_from: str) -> "tuple[Adapter, ...]":
    """The adapters to use, in order of popularity. Raises BadInput for one that is not served.

    A server that lists none may have some all the same: the warm-up asks for each.
    """
    from multilora_cli.bench.target import Adapter
    from multilora_cli.errors import BadInput

    if adapters_from == "models":
        return fleet.adapters
    path = Path(adapters_from)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"--adapters-from {path}: {reason}", hint="a file with one name a line, or: models"
        ) from None
    names = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not fleet.adapters:
        return tuple(Adapter(name) for name in names)
    known = {adapter.name: adapter for adapter in fleet.adapters}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInput(
            f"--adapters-from {path}: the server has no adapter {', '.join(unknown[:5])}",
            hint=f"it lists {len(known)}: {', '.join(list(known)[:5])} ...",
        )
    return tuple(known[name] for name in names)


def _twins(first: "Side", fleet: "Fleet") -> "tuple[Adapter, ...]":
    """The second server's adapters: the same names where it has them all, else its own list."""
    from multilora_cli.errors import BadInput

    known = {adapter.name: adapter for adapter in fleet.adapters}
    wanted = [adapter.name for adapter in first.adapters]
    if all(name in known for name in wanted):
        return tuple(known[name] for name in wanted)
    if len(known) < len(wanted):
        missing = [name for name in wanted if name not in known]
        raise BadInput(
            f"--against: {len(missing)} adapters of the first server are not on the second one:"
            f" {', '.join(missing[:5])}",
            hint="name those that both have: --adapters-from FILE",
        )
    return fleet.adapters[: len(wanted)]


def _program(
    options: BenchOptions, sides: "tuple[Side, ...]", ranks: Mapping[str, int]
) -> "Program":
    from multilora_cli.bench.arms import only

    program = _whole_program(options, sides, ranks)
    return program if options.compare is None else only(program, options.compare.split(","))


def _workload(options: BenchOptions) -> "Workload":
    from multilora_cli.bench.arms import Workload

    return Workload(
        requests=options.requests,
        rate=options.rate,
        concurrency=options.concurrency,
        lengths=options.lengths,
        cv=options.cv,
        rounds=options.rounds,
        seed=options.seed,
    )


def _whole_program(
    options: BenchOptions, sides: "tuple[Side, ...]", ranks: Mapping[str, int]
) -> "Program":
    from dataclasses import replace

    from multilora_cli.bench.arms import Room, fit, make_program, trace_program
    from multilora_cli.sizing.trace import read_trace

    lengths = [s.fleet.max_model_len for s in sides if s.fleet.max_model_len is not None]
    room = Room(
        num_adapters=min(len(side.adapters) for side in sides),
        ranks=tuple(ranks.get(adapter.name) for adapter in sides[0].adapters),
        max_model_len=min(lengths, default=None),
    )
    workload = _workload(options)
    if options.trace is None:
        return make_program(options.preset, workload, room)
    names = [adapter.name for adapter in sides[0].adapters]
    program = trace_program(read_trace(options.trace), names, workload)
    return replace(program, arms=tuple(fit(arm, room) for arm in program.arms))


def _facts(
    options: BenchOptions,
    sides: "tuple[Side, ...]",
    program: "Program",
    quantization: str | None,
) -> dict[str, Any]:
    from multilora_cli.bench.environment import command_line, commit, environment
    from multilora_cli.bench.target import public_url

    return {
        "command": command_line(options.arguments),
        "commit": options.commit or commit(),
        "seed": options.seed,
        "preset": options.preset,
        "rounds": program.rounds,
        "machine": environment(),
        "servers": [
            {
                "label": side.label,
                "url": public_url(side.target.url),
                "base": side.fleet.base,
                "adapters": len(side.adapters),
                "max_model_len": side.fleet.max_model_len,
                "own": options.url is None and index == 0,
            }
            for index, side in enumerate(sides)
        ],
        "settings": {
            "requests": options.requests,
            "rate": None if options.rate is None else str(options.rate),
            "cv": options.cv,
            "concurrency": options.concurrency,
            "lengths": options.lengths,
            "for_s": options.limit,
            "adapters_from": options.adapters_from,
            "quantization": quantization,
            "offline": options.offline,
            "prompts": options.prompts,
            "ignore_eos": options.ignore_eos,
            "slo": options.slo,
        },
    }

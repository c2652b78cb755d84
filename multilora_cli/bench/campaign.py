"""Runs the arms of a program in turns (A, B, A, B), on one server or on two.

Turns, because a machine drifts: what is compared has run under the same drift. Every pass has
prompts of its own, so that no prefix cache answers for the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from multilora_cli.bench.arms import Arm, Program
from multilora_cli.bench.bound import Bound, Costs, arrival_bound, workload_bound
from multilora_cli.bench.churn import Mark, churning, evict, reload
from multilora_cli.bench.load import Load, LoadResult, PlannedRequest, Progress
from multilora_cli.bench.measure import Known, Measures, Slo, measure
from multilora_cli.bench.prompts import PromptMaker
from multilora_cli.bench.target import Adapter, Fleet, Served
from multilora_cli.errors import BadInput, MloraError, Unreachable

WARM_UP_TOKENS = 4
WARM_UP_AT_ONCE = 8
WARM_UP_BEGINNING = 32  # requests


@dataclass(frozen=True)
class Side:
    """One of the servers compared; `adapters` are those used, in order of popularity."""

    label: str
    target: Served
    fleet: Fleet
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True)
class Pass:
    """One arm, once, on one side."""

    side: str
    arm: str
    round: int
    result: LoadResult
    measures: Measures
    known: Known
    marks: tuple[Mark, ...] = ()
    mean_output: float = 0.0  # tokens that a request of the load asks for
    bound: Bound | None = None  # of what was done, where the card is known


@dataclass(frozen=True)
class Settings:
    """How every pass is sent and judged."""

    prompts: PromptMaker = field(default_factory=PromptMaker)
    slo: Slo | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)  # from the fleet file
    tell: Callable[[str, Progress], None] | None = None
    ended: Callable[[Pass], None] | None = None
    costs: Costs | None = None  # of the first side's fleet on its card
    limit_s: float | None = None  # of every load


async def run_program(
    sides: Sequence[Side], program: Program, settings: Settings
) -> tuple[list[Pass], list[str]]:
    """Every pass in the order it ran, and what must be said about them. Raises MloraError."""
    passes: list[Pass] = []
    notes = list(program.notes)
    for side in sides:
        await _warm_up(side, program, settings)
    for turn, side, arm in _turns(sides, program):
        try:
            await _prepare(side, arm)
        except BadInput as error:
            notes.append(f"{arm.label} is left out: {error.message}")
            continue
        done = await _one_pass(side, arm, turn, settings)
        if settings.costs is not None and side is sides[0]:
            done = replace(done, bound=_bound(done, arm, settings.costs))
        passes.append(done)
        if settings.ended is not None:
            settings.ended(done)
    return passes, notes


@dataclass(frozen=True)
class _Turn:
    """The salt makes prompts differ between rounds and arms, but not between sides."""

    round: int
    salt: int


def _turns(sides: Sequence[Side], program: Program) -> Iterator[tuple[_Turn, Side, Arm]]:
    for number in range(program.rounds):
        ordered = sides if number % 2 == 0 else sides[::-1]
        for index, arm in enumerate(program.arms):
            for side in ordered:
                yield _Turn(number, 1 + number * len(program.arms) + index), side, arm


async def _prepare(side: Side, arm: Arm) -> None:
    """Bring the arm's adapters where it wants them. BadInput where the server has no way to."""
    if arm.action == "reload":
        await reload(side.target, _used(side, arm))
    elif arm.action in ("to warm", "to cold"):
        await evict(side.target, _used(side, arm), cold=arm.action == "to cold")


def planned(side: Side, arm: Arm) -> list[PlannedRequest]:
    """The arm's requests with the names that this side has."""
    rows = []
    for request in arm.requests:
        adapter = None if request.adapter is None else side.adapters[request.adapter].name
        rows.append(
            PlannedRequest(
                model=adapter or side.fleet.base,
                adapter=adapter,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                arrival_s=request.arrival_s,
            )
        )
    return rows


async def _one_pass(side: Side, arm: Arm, turn: _Turn, settings: Settings) -> Pass:
    before = await side.target.fleet(side.fleet.base)
    tell = settings.tell
    label = f"{side.label}: {arm.label}" if side.label else arm.label
    load = Load(
        prompts=settings.prompts,
        concurrency=arm.concurrency,
        open_loop=arm.open_loop,
        salt=turn.salt,
        limit_s=settings.limit_s,
        tell=None if tell is None else lambda progress: tell(label, progress),
    )
    used = _used(side, arm)
    others = [adapter for adapter in side.adapters if adapter not in used]
    requests = planned(side, arm)
    marks: list[Mark] = []
    if arm.action == "churn":
        async with churning(side.target, used, others) as marks:
            result = await side.target.drive(requests, load)
    else:
        result = await side.target.drive(requests, load)
    _stop_if_dead(side, result)
    after = await side.target.fleet(side.fleet.base)
    tiers = {a.name: a.tier for a in before.adapters if a.tier is not None}
    known = Known({**settings.ranks, **before.ranks}, tiers)
    measures = measure(
        result.records,
        result.duration_s,
        known=known,
        slo=settings.slo,
        open_loop=arm.open_loop,
    )
    measures = _with_server(measures, before, after)
    asked = fmean(request.output_tokens for request in arm.requests)
    return Pass(side.label, arm.label, turn.round, result, measures, known, tuple(marks), asked)


def _bound(done: Pass, arm: Arm, costs: Costs) -> Bound | None:
    """The bound of what a load really did: all of it, or what came before it was cut."""
    if arm.open_loop:
        is_cut = done.measures.cut > 0
        limit_s = done.result.duration_s if is_cut else None
        return arrival_bound(arm.requests, arm.concurrency, costs, limit_s)
    came = [
        replace(arm.requests[record.index], output_tokens=record.output_tokens)
        for record in done.result.records
        if record.error is None and record.output_tokens
    ]
    return workload_bound(came, arm.concurrency, costs) if came else None


def _used(side: Side, arm: Arm) -> list[Adapter]:
    indices = {request.adapter for request in arm.requests} - {None}
    return [side.adapters[index] for index in sorted(i for i in indices if i is not None)]


async def _warm_up(side: Side, program: Program, settings: Settings) -> None:
    """The base, and every adapter of the program unless first use is what is measured; then the
    beginning of the arm with the most adapters there, cut short: some servers compile what a step
    with such prompts needs when the first one comes. Raises MloraError where a request fails."""
    names: list[str | None] = [None]
    if program.warm_up:
        used = {r.adapter for arm in program.arms for r in arm.requests if r.adapter is not None}
        names += [side.adapters[index].name for index in sorted(used)]
    requests = [PlannedRequest(n or side.fleet.base, n, 16, WARM_UP_TOKENS) for n in names]
    tell = settings.tell
    label = f"{side.label}: warm-up" if side.label else "warm-up"
    load = Load(
        settings.prompts,
        concurrency=WARM_UP_AT_ONCE,
        tell=None if tell is None else lambda progress: tell(label, progress),
    )
    _check_warm_up(await side.target.drive(requests, load), settings)
    if program.warm_up:
        beginnings = [planned(side, arm)[:WARM_UP_BEGINNING] for arm in program.arms]
        widest = max(beginnings, key=lambda rows: len({row.adapter for row in rows}))
        short = [
            replace(row, output_tokens=min(row.output_tokens, WARM_UP_TOKENS)) for row in widest
        ]
        _check_warm_up(await side.target.drive(short, replace(load, concurrency=None)), settings)


def _check_warm_up(result: LoadResult, settings: Settings) -> None:
    for record in result.records:
        if record.error is not None:
            hint = "nothing was measured, since not even one short request succeeds"
            if settings.prompts.style == "ids" and record.error in ("http_400", "http_422"):
                hint += "; where a server takes no token ids: --prompts text, or chat"
            if settings.prompts.ignore_eos and "ignore_eos" in record.detail:
                hint = "this server does not know ignore_eos; leave it out: --no-ignore-eos"
            raise MloraError(f"warm-up: {record.model}: {record.error}: {record.detail}", hint=hint)


def _stop_if_dead(side: Side, result: LoadResult) -> None:
    """A server that is gone ends the run; anything less is a figure."""
    if result.records and all(r.error == "unreachable" for r in result.records):
        raise Unreachable(f"{side.target.url}: the server went away: {result.records[0].detail}")


def _with_server(measures: Measures, before: Fleet, after: Fleet) -> Measures:
    """Add what the server's own counters say of a pass."""
    hits = _growth(before, after, lambda adapter: adapter.hits)
    loads = _growth(before, after, lambda adapter: adapter.loads)
    told = _growth(before, after, lambda adapter: adapter.requests)
    if hits is None or loads is None:
        return measures
    total_hits, total_loads = sum(hits.values()), sum(loads.values())
    asked = {g.name: g.requests for g in measures.per_adapter}
    agrees = None
    if told is not None and not measures.errors:
        agrees = all(told[name] == asked.get(name, 0) for name in told)
    return replace(
        measures,
        # Our server counts a hit at every start of a sequence, whether it had to wait for a load
        # or not, and a load whenever the bytes came from their source.
        hit_ratio=max(1 - total_loads / total_hits, 0.0) if total_hits else None,
        loads=total_loads,
        server_agrees=agrees,
    )


def _growth(
    before: Fleet, after: Fleet, count: Callable[[Adapter], int | None]
) -> dict[str, int] | None:
    """Growth of a counter by adapter; None where the server does not count."""
    old = {adapter.name: count(adapter) for adapter in before.adapters}
    grown: dict[str, int] = {}
    for adapter in after.adapters:
        new = count(adapter)
        if new is None:
            return None
        # A counter that fell belongs to an adapter that was loaded anew.
        grown[adapter.name] = max(new - (old.get(adapter.name) or 0), 0)
    return grown or None

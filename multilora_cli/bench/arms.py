"""What a preset runs: arms of one load each, made to be compared.

All arms of a comparison have the same lengths and arrivals and differ only in who is asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from multilora_cli.bench.workload import (
    LENGTHS,
    BenchRequest,
    SLora,
    arrivals,
    punica_trace,
    slora_trace,
)
from multilora_cli.errors import BadInput
from multilora_cli.sizing.trace import Call
from multilora_kernels.popularity import make_slots

Preset = Literal[
    "heterogeneous", "punica", "s-lora-table3", "rank-mix", "cold-start", "churn", "smoke", "trace"
]
PRESETS: tuple[Preset, ...] = tuple(name for name in get_args(Preset) if name != "trace")
POPULARITIES = ("identical", "skewed", "uniform", "distinct")
TABLE3_ADAPTERS = (1, 5, 100, 1000, 2000)
Action = Literal["none", "churn", "reload", "to warm", "to cold"]


@dataclass(frozen=True)
class Workload:
    """What the user asked for; None takes the preset's own."""

    requests: int | None = None
    rate: float | None = None  # requests/s; inf: all at once
    concurrency: int | None = None
    lengths: str | None = None
    cv: float = 1.0
    rounds: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Arm:
    """One load. `action`: what happens to its adapters, before it or (churn) during it."""

    label: str
    requests: tuple[BenchRequest, ...]
    concurrency: int | None
    open_loop: bool = False
    action: Action = "none"


@dataclass(frozen=True)
class Program:
    """All arms of a run, how often they take turns, and what to say about them."""

    preset: Preset
    arms: tuple[Arm, ...]
    rounds: int
    warm_up: bool = True  # whether adapters may be used before the first arm
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Room:
    """What the server has: adapters (names are dealt in order), their ranks, its context."""

    num_adapters: int
    ranks: tuple[int | None, ...] = ()
    max_model_len: int | None = None


def make_program(preset: Preset, workload: Workload, room: Room) -> Program:
    """The arms of a preset. Raises BadInput."""
    if workload.requests is not None and workload.requests < 1:
        raise BadInput("--requests: expected at least 1")
    if preset != "smoke" and room.num_adapters == 0:
        raise BadInput(
            "the server lists no adapters, so there is nothing to compare the base with",
            hint="name some with --adapters-from, or use --preset smoke",
        )
    program = _MAKERS[preset](workload, room)
    return replace(program, arms=tuple(fit(arm, room) for arm in program.arms))


def only(program: Program, labels: Sequence[str]) -> Program:
    """The program with the arms of these labels, in their order. Raises BadInput.

    Notes that begin with the label of another arm are about that arm, and left out.
    """
    known = {arm.label: arm for arm in program.arms}
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise BadInput(f"--compare {','.join(unknown)}: expected some of {', '.join(known)}")
    others = tuple(f"{label} " for label in known if label not in labels)
    return replace(
        program,
        arms=tuple(known[label] for label in dict.fromkeys(labels)),
        notes=tuple(note for note in program.notes if not note.startswith(others)),
    )


def trace_program(calls: Sequence[Call], names: Sequence[str], workload: Workload) -> Program:
    """A recorded load again, at its own times and lengths, and the same on the base alone.

    Times count from the first call. Raises BadInput for an adapter that the server lacks.
    """
    _refuse_lengths(workload, "trace")
    index = {name: place for place, name in enumerate(names)}
    missing = sorted({c.adapter for c in calls if c.adapter is not None} - set(index))
    if missing:
        raise BadInput(f"--trace: the server has no adapter {', '.join(missing[:5])}")
    kept = calls[: workload.requests]
    start = kept[0].time_s
    requests = tuple(
        BenchRequest(
            None if call.adapter is None else index[call.adapter],
            max(call.input_tokens, 1),
            max(call.output_tokens, 1),
            call.time_s - start,
        )
        for call in kept
    )
    at_once = workload.rate == float("inf")
    base = tuple(replace(request, adapter=None) for request in requests)
    arms = tuple(
        Arm(label, rows, workload.concurrency, open_loop=not at_once)
        for label, rows in (("base", base), ("trace", requests))
    )
    return Program("trace", arms, workload.rounds or 1)


def parse_lengths(text: str, count: int, seed: int) -> tuple[list[int], list[int]]:
    """Input and output lengths: a law's name, or `IN:OUT`, each N or LOW-HIGH (inclusive)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    if text in LENGTHS:
        law = LENGTHS[text]
        return law.input.draw(rng, count).tolist(), law.output.draw(rng, count).tolist()
    try:
        inputs, outputs = (_range(part) for part in text.split(":"))
    except ValueError:
        raise BadInput(
            f"--lengths {text}: expected IN:OUT (16-64:32) or one of {', '.join(LENGTHS)}"
        ) from None
    draws = (rng.integers(low, high + 1, size=count).tolist() for low, high in (inputs, outputs))
    first, second = draws
    return first, second


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    pair = int(low), int(high if dash else low)
    if not 1 <= pair[0] <= pair[1] <= 1_000_000:
        raise ValueError
    return pair


def _same_lengths(workload: Workload, count: int, lengths: str) -> list[BenchRequest]:
    """Requests to the base with the lengths and arrivals that all arms share."""
    inputs, outputs = parse_lengths(workload.lengths or lengths, count, workload.seed)
    rng = np.random.Generator(np.random.PCG64([workload.seed, 1]))
    times = arrivals(rng, count, _finite(workload.rate), workload.cv)
    rows = zip(inputs, outputs, times, strict=True)
    return [BenchRequest(None, i, o, float(t)) for i, o, t in rows]


def _finite(rate: float | None) -> float | None:
    return None if rate is None or rate == float("inf") else rate


def _asking(requests: Sequence[BenchRequest], adapters: Sequence[int]) -> tuple[BenchRequest, ...]:
    pairs = zip(requests, adapters, strict=True)
    return tuple(replace(request, adapter=int(adapter)) for request, adapter in pairs)


def _arm(label: str, requests: Sequence[BenchRequest], workload: Workload, concurrency: int) -> Arm:
    """Open loop where a finite rate is given, else closed or all at once."""
    if _finite(workload.rate) is not None:
        return Arm(label, tuple(requests), workload.concurrency, open_loop=True)
    at_once = None if workload.rate is not None else concurrency
    return Arm(label, tuple(requests), workload.concurrency or at_once)


def _popularities(workload: Workload, room: Room, count: int, lengths: str) -> list[Arm]:
    requests = _same_lengths(workload, count, lengths)
    arms = [_arm("base", requests, workload, 16)]
    for law in POPULARITIES:
        slots = make_slots(law, count, first_slot=0)
        arms.append(_arm(law, _asking(requests, slots.tolist()), workload, 16))
    return arms


def _heterogeneous(workload: Workload, room: Room) -> Program:
    count = workload.requests or 32
    arms = _popularities(workload, room, count, "16-64:16-48")
    notes = []
    if room.num_adapters < count:
        notes.append(
            f"distinct asks {count} adapters of the law, dealt in turn to the"
            f" {room.num_adapters} that the server has"
        )
    return Program("heterogeneous", tuple(arms), workload.rounds or 2, notes=tuple(notes))


def _smoke(workload: Workload, room: Room) -> Program:
    requests = _same_lengths(workload, workload.requests or 8, "8-16:4-8")
    arms = [_arm("base", requests, workload, 4)]
    if room.num_adapters:
        slots = make_slots("skewed", len(requests), first_slot=0)
        arms.append(_arm("skewed", _asking(requests, slots.tolist()), workload, 4))
    return Program("smoke", tuple(arms), workload.rounds or 1)


def _punica(workload: Workload, room: Room) -> Program:
    """Punica's text generation: 32 at a time, first come first served."""
    _refuse_lengths(workload, "punica")
    count, length = workload.requests or 1024, min(room.max_model_len or 2048, 2048)
    traces = {law: punica_trace(law, count, length) for law in POPULARITIES}
    base = [replace(request, adapter=None) for request in traces["distinct"]]
    arms = [_arm("base", base, workload, 32)]
    arms += [_arm(law, traces[law], workload, 32) for law in POPULARITIES]
    notes = [] if length == 2048 else [f"lengths are drawn for a context of {length}, not of 2048"]
    return Program("punica", tuple(arms), workload.rounds or 1, notes=tuple(notes))


def _table3(workload: Workload, room: Room) -> Program:
    """S-LoRA's Table 3: R = 10, T = 120 s, as many adapters as the server has of each row's."""
    _refuse_lengths(workload, "s-lora-table3")
    rate = _finite(workload.rate) or 10.0
    counts = [count for count in TABLE3_ADAPTERS if count <= room.num_adapters]
    if room.num_adapters not in counts:
        counts.append(room.num_adapters)
    arms = []
    for count in (0, *counts):
        trace = slora_trace(SLora(max(count, 1), rate=rate, cv=workload.cv, duration_s=120.0))
        trace = trace[: workload.requests]
        if count == 0:
            trace = [replace(request, adapter=None) for request in trace]
        saturated = workload.rate == float("inf")
        arms.append(Arm(f"n={count}", tuple(trace), workload.concurrency, open_loop=not saturated))
    rows = ", ".join(str(count) for count in TABLE3_ADAPTERS if count > room.num_adapters)
    notes = [f"rows of {rows} adapters are left out: the server has fewer"] if rows else []
    return Program("s-lora-table3", tuple(arms), workload.rounds or 1, notes=tuple(notes))


def _rank_mix(workload: Workload, room: Room) -> Program:
    """Each rank alone, then all together with an equal share of requests for each rank."""
    ranks = sorted({rank for rank in room.ranks if rank is not None})
    if not ranks:
        raise BadInput(
            "the server does not tell the ranks of its adapters, which rank-mix groups by",
            hint="name the fleet file, so that they are read from it",
        )
    requests = _same_lengths(workload, workload.requests or 40, "16-64:16-48")
    members = {rank: [i for i, r in enumerate(room.ranks) if r == rank] for rank in ranks}
    rng = np.random.Generator(np.random.PCG64([workload.seed, 2]))
    arms = [_arm("base", requests, workload, 16)]
    mixed: list[int] = []
    for index in range(len(requests)):
        group = members[ranks[index % len(ranks)]]
        mixed.append(group[_power_law(rng, len(group))])
    for rank in (ranks[0], *ranks[-1:]) if len(ranks) > 1 else ranks:
        group = members[rank]
        alone = [group[_power_law(rng, len(group))] for _ in requests]
        arms.append(_arm(f"rank {rank} alone", _asking(requests, alone), workload, 16))
    arms.append(_arm("all ranks", _asking(requests, mixed), workload, 16))
    return Program("rank-mix", tuple(arms), workload.rounds or 2)


def _power_law(rng: np.random.Generator, count: int) -> int:
    """An index with shares 1/1, 1/2, 1/3 ...: inside a rank some adapters are favourites."""
    shares = 1 / np.arange(1, count + 1)
    return int(rng.choice(count, p=shares / shares.sum()))


def _cold_start(workload: Workload, room: Room) -> Program:
    """One request an adapter, one after the other, from every place an adapter can be in."""
    count = min(workload.requests or room.num_adapters, room.num_adapters)
    requests = _same_lengths(replace(workload, rate=None), count, "32:8")
    asked = _asking(requests, range(count))
    one = workload.concurrency or 1
    arms = (
        Arm("first use", asked, one),
        Arm("resident", asked, one),
        Arm("from host memory", asked, one, action="to warm"),
        Arm("from disk", asked, one, action="to cold"),
        Arm("after reload", asked, one, action="reload"),
        Arm("base", tuple(requests), one),
    )
    notes = [
        "the first use is a cold start only on a server that has served nothing yet",
        "from disk means from its files, which the system may still have in memory",
    ]
    return Program("cold-start", arms, 1, warm_up=False, notes=tuple(notes))


def _churn(workload: Workload, room: Room) -> Program:
    """The same load without and with adapters being replaced, unloaded and loaded meanwhile."""
    if room.num_adapters < 2:
        raise BadInput("churn needs two adapters: one that is asked, one that comes and goes")
    requests = _same_lengths(workload, workload.requests or 48, "16-64:16-48")
    asked = max(room.num_adapters // 2, 1)  # the others come and go
    slots = [index % asked for index in range(len(requests))]
    calm = _arm("calm", _asking(requests, slots), workload, 16)
    notes = (
        f"the first {asked} adapters are asked and replaced in place, the other"
        f" {room.num_adapters - asked} are unloaded and loaded: a right server shows no errors",
    )
    return Program(
        "churn", (calm, replace(calm, label="churn", action="churn")), workload.rounds or 2,
        notes=notes,
    )  # fmt: skip


def _refuse_lengths(workload: Workload, preset: str) -> None:
    if workload.lengths is not None:
        raise BadInput(f"--lengths: the preset {preset} has the published lengths")


_MAKERS: dict[Preset, Callable[[Workload, Room], Program]] = {
    "heterogeneous": _heterogeneous,
    "punica": _punica,
    "s-lora-table3": _table3,
    "rank-mix": _rank_mix,
    "cold-start": _cold_start,
    "churn": _churn,
    "smoke": _smoke,
}


def fit(arm: Arm, room: Room) -> Arm:
    """Deal adapters to those there are, and refuse what the context cannot hold."""
    for request in arm.requests:
        total = request.input_tokens + request.output_tokens
        if room.max_model_len is not None and total > room.max_model_len:
            raise BadInput(
                f"{arm.label}: a request of {request.input_tokens} + {request.output_tokens} tokens"
                f" does not fit the server's context of {room.max_model_len}",
                hint="choose shorter ones: --lengths IN:OUT",
            )
    many = max(room.num_adapters, 1)
    requests = tuple(
        request if request.adapter is None else replace(request, adapter=request.adapter % many)
        for request in arm.requests
    )
    return replace(arm, requests=requests)

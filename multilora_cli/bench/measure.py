"""From records to figures: rates, latencies, objectives, fairness. Seconds, tokens, requests."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import numpy as np

from multilora_cli.bench.load import RequestRecord
from multilora_cli.errors import BadInput
from multilora_cli.units import parse_duration

BASE = "(base)"  # how the base is named in groups
SLO_TTFT_S = 6.0  # the published objective: first token within it, aborts count as misses
STRIP = (0.1, 0.9)  # the middle of a load, without ramp and drain


@dataclass(frozen=True)
class Spread:
    """A distribution: mean and percentiles by linear interpolation."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Moments:
    """Realised lengths, in tokens."""

    mean: float
    sd: float
    min: int
    max: int
    total: int


@dataclass(frozen=True)
class Group:
    """The requests of one adapter, one rank or one tier."""

    name: str
    requests: int
    completed: int
    input_tokens: int
    output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None
    tokens_per_s: float | None  # mean speed of one answer


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good; None asks for nothing. Seconds."""

    ttft_s: float | None = None
    itl_s: float | None = None  # the answer's own mean
    e2e_s: float | None = None

    def kept(self, record: RequestRecord) -> bool:
        """Whether one request kept it."""
        if record.error is not None or record.is_cut:
            return False
        pairs = (
            (self.ttft_s, record.ttft_s),
            (self.itl_s, record.itl_s),
            (self.e2e_s, record.e2e_s),
        )
        return all(most is None or found is None or found <= most for most, found in pairs)


@dataclass(frozen=True)
class Measures:
    """One pass of a load."""

    requests: int  # that were sent
    completed: int
    errors: Mapping[str, int]  # by kind
    duration_s: float  # with drain
    offered_rate: float | None  # None: all at once or closed loop
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    strip_tokens_per_s: float  # output, the middle of the load
    ttft: Spread | None
    itl: Spread | None  # every gap between tokens
    request_itl: Spread | None  # mean of each answer
    e2e: Spread | None
    slo_attainment: float
    satisfaction: float
    goodput_per_s: float | None
    jain: float | None  # over the mean speed that each adapter's answers had
    worst_adapter: str | None
    input_length: Moments
    output_length: Moments
    cached_tokens: int
    usage_counted: bool  # by the server; otherwise pieces of text stand for tokens
    pieces: int  # of text; fewer than output tokens where a piece holds several
    adapters: int  # different ones that were asked
    cut: int  # in flight when the load ended
    per_adapter: tuple[Group, ...]
    per_rank: tuple[Group, ...] = ()
    per_tier: tuple[Group, ...] = ()
    hit_ratio: float | None = None  # starts that no load from the adapter's source preceded
    loads: int | None = None  # of adapters, during the pass
    server_agrees: bool | None = None  # its counts of requests per adapter are ours
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Known:
    """What the server tells about adapters: ranks, and tiers before the pass."""

    ranks: Mapping[str, int | str] = field(default_factory=dict)
    tiers: Mapping[str, int | str] = field(default_factory=dict)


def measure(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    known: Known | None = None,
    slo: Slo | None = None,
    open_loop: bool = False,
) -> Measures:
    """Every figure of one pass.

    An answer that the end of the load has cut counts with the tokens that came; it is neither
    completed nor an error, and tells no time to its end.
    """
    good = [record for record in records if record.error is None]
    whole = [record for record in good if not record.is_cut]
    known = known or Known()
    per_adapter = _groups(records, lambda record: record.adapter or BASE)
    wall = max(duration_s, 1e-9)
    last_due = max((record.scheduled_s for record in records), default=0.0)
    jain, worst = fairness(per_adapter)
    return Measures(
        requests=len(records),
        completed=len(whole),
        cut=len(good) - len(whole),
        errors=dict(sorted(Counter(r.error for r in records if r.error is not None).items())),
        duration_s=duration_s,
        offered_rate=len(records) / last_due if open_loop and last_due > 0 else None,
        requests_per_s=len(whole) / wall,
        input_tokens_per_s=sum(record.input_tokens for record in good) / wall,
        output_tokens_per_s=sum(record.output_tokens for record in good) / wall,
        strip_tokens_per_s=strip_rate(good),
        ttft=spread(r.ttft_s for r in good),
        itl=spread(_gaps(good)),
        request_itl=spread(r.itl_s for r in good),
        e2e=spread(r.e2e_s for r in whole),
        slo_attainment=attainment(records),
        satisfaction=satisfaction(records),
        goodput_per_s=None if slo is None else sum(map(slo.kept, records)) / wall,
        jain=jain,
        worst_adapter=worst,
        input_length=moments([record.input_tokens for record in records]),
        output_length=moments([record.output_tokens for record in good]),
        cached_tokens=sum(record.cached_tokens for record in good),
        usage_counted=all(record.counted for record in whole),
        pieces=sum(len(record.times_s) for record in good),
        adapters=len({record.adapter for record in records} - {None}),
        per_adapter=per_adapter,
        per_rank=_by(records, known.ranks),
        per_tier=_by(records, known.tiers),
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and percentiles of what is there; None of nothing."""
    found = np.fromiter((value for value in values if value is not None), dtype=np.float64)
    if not len(found):
        return None
    p50, p90, p95, p99 = (float(p) for p in np.percentile(found, (50, 90, 95, 99)))
    return Spread(len(found), float(found.mean()), p50, p90, p95, p99, float(found.max()))


def moments(lengths: Sequence[int]) -> Moments:
    """Realised mean, deviation and limits of some lengths."""
    if not lengths:
        return Moments(0.0, 0.0, 0, 0, 0)
    return Moments(fmean(lengths), pstdev(lengths), min(lengths), max(lengths), sum(lengths))


def attainment(records: Sequence[RequestRecord], ttft_s: float = SLO_TTFT_S) -> float:
    """Share of all requests whose first token came in time; failed ones are misses."""
    records = _told(records, ttft_s)
    met = sum(r.error is None and r.ttft_s is not None and r.ttft_s < ttft_s for r in records)
    return met / len(records) if records else 0.0


def satisfaction(records: Sequence[RequestRecord], ttft_s: float = SLO_TTFT_S) -> float:
    """Mean of 1 - (t / 6 s)^2 over all requests, 0 from 6 s on and for failed ones."""
    records = _told(records, ttft_s)
    scores = [
        max(1 - (record.ttft_s / ttft_s) ** 2, 0.0)
        if record.error is None and record.ttft_s is not None
        else 0.0
        for record in records
    ]
    return fmean(scores) if scores else 0.0


def _told(records: Sequence[RequestRecord], ttft_s: float) -> list[RequestRecord]:
    """Without those that were cut while their first token could still have come in time."""
    return [
        record
        for record in records
        if not (record.is_cut and record.first_s is None and record.e2e_s < ttft_s)
    ]


def strip_rate(records: Sequence[RequestRecord]) -> float:
    """Output tokens/s between a tenth and nine tenths of the time from first to last token."""
    times = np.concatenate([np.asarray(r.times_s) for r in records] or [np.empty(0)])
    if len(times) < 2 or times.max() <= times.min():
        return 0.0
    # A piece of text may hold several tokens: each piece carries its share of its answer.
    weights = np.concatenate(
        [np.full(len(r.times_s), r.output_tokens / max(len(r.times_s), 1)) for r in records]
    )
    first, span = times.min(), times.max() - times.min()
    low, high = first + STRIP[0] * span, first + STRIP[1] * span
    inside = (times >= low) & (times < high)
    return float(weights[inside].sum() / (high - low))


def jain_index(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n sum x^2): 1 where all are equal, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def fairness(groups: Sequence[Group]) -> tuple[float | None, str | None]:
    """Jain's index over the speed of each adapter's answers, and the slowest adapter."""
    speeds = {group.name: group.tokens_per_s for group in groups}
    known = {name: speed for name, speed in speeds.items() if speed is not None}
    if not known:
        return None, None
    return jain_index(list(known.values())), min(known, key=lambda name: known[name])


def parse_slo(text: str) -> Slo:
    """`ttft=1s,itl=50ms,e2e=30s`, any of them. Raises BadInput."""
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in ("ttft", "itl", "e2e"):
            raise BadInput(f"--slo {text}: {key!r} is none of ttft, itl, e2e")
        try:
            found[f"{key}_s"] = parse_duration(value)
        except ValueError as error:
            raise BadInput(f"--slo {text}: {error}") from None
    return Slo(**found)


def _gaps(records: Sequence[RequestRecord]) -> Iterable[float]:
    for record in records:
        yield from np.diff(np.asarray(record.times_s)).tolist()


def _groups(
    records: Iterable[RequestRecord], key: Callable[[RequestRecord], str | None]
) -> tuple[Group, ...]:
    """Groups by a key, the largest first; records whose key is None are in none."""
    found: dict[str, list[RequestRecord]] = {}
    for record in records:
        if (name := key(record)) is not None:
            found.setdefault(name, []).append(record)
    rows = [_group(name, members) for name, members in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.requests, row.name)))


def _group(name: str, records: Sequence[RequestRecord]) -> Group:
    good = [record for record in records if record.error is None]
    whole = [record for record in good if not record.is_cut]
    speeds = [r.output_tokens / r.e2e_s for r in good if r.e2e_s > 0]
    return Group(
        name=name,
        requests=len(records),
        completed=len(whole),
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        ttft=spread(record.ttft_s for record in good),
        itl=spread(record.itl_s for record in good),
        e2e=spread(record.e2e_s for record in whole),
        tokens_per_s=fmean(speeds) if speeds else None,
    )


def _by(records: Sequence[RequestRecord], labels: Mapping[str, int | str]) -> tuple[Group, ...]:
    """Groups by what is known of each adapter; numbers in their order."""

    def key(record: RequestRecord) -> str | None:
        label = labels.get(record.adapter) if record.adapter is not None else None
        return None if label is None else str(label)

    return tuple(sorted(_groups(records, key), key=lambda row: (len(row.name), row.name)))

"""A load: what is asked, what became of every request, and what the asking cost.

All times are seconds on the performance counter, counted from the start of the load. A request's
clock starts when it was due (open loop) or sent (closed loop), so that a client that cannot keep
up shows in the latency instead of hiding it; how late it was is reported as its own overhead.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multilora_cli.bench.prompts import PromptMaker
from multilora_cli.bench.quantile import nearest_rank


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request with the model it names; `adapter` None is the base."""

    model: str
    adapter: str | None
    input_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; `error` is a kind, `detail` the server's own words."""

    index: int
    model: str
    adapter: str | None
    scheduled_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    times_s: "array[float]"  # arrival of every piece of text
    last_s: float | None  # of the last token
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    counted: bool  # the server told its usage; otherwise pieces of text stand for tokens
    error: str | None = None
    detail: str = ""
    is_cut: bool = False  # the load ended before its answer did; not an error

    @property
    def ttft_s(self) -> float | None:
        """Due to first token."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Due to the end of the answer."""
        return self.end_s - self.scheduled_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between the tokens of this answer."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Overhead:
    """What the load generator itself cost and how late it ran."""

    cpu_s: float
    cpu_share: float  # of one core
    events: int
    us_per_event: float
    lag_p50_s: float  # of its event loop
    lag_p99_s: float
    late_p99_s: float  # sending after the scheduled time, open loop only
    peak_in_flight: int


@dataclass(frozen=True)
class LoadResult:
    """A record of every request that was sent, in their order, and the generator's own cost."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    overhead: Overhead


@dataclass(frozen=True)
class Progress:
    """Where a load is."""

    done: int
    total: int
    in_flight: int
    errors: int
    tokens_per_s: float
    ttft_s: float | None  # mean so far


@dataclass(frozen=True)
class Load:
    """How requests are sent. `concurrency` None: as many at once as are due."""

    prompts: PromptMaker
    concurrency: int | None = None
    open_loop: bool = False  # at their arrival times
    salt: int = 0  # of the prompts of this pass
    limit_s: float | None = None  # the load ends then, and what is in flight is cut
    tell: Callable[[Progress], None] | None = None


@dataclass
class Tally:
    """What is known of a load while it runs."""

    requests: Sequence[PlannedRequest]
    load: Load
    records: dict[int, RequestRecord] = field(default_factory=dict)
    in_flight: int = 0
    peak: int = 0  # in flight at once
    events: int = 0  # pieces of text, or tokens, that came
    errors: int = 0
    _ttft_sum_s: float = 0.0
    _ttft_count: int = 0

    def begin(self) -> None:
        """A request is sent."""
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)

    def first(self, ttft_s: float) -> None:
        """An answer has begun."""
        self._ttft_sum_s += ttft_s
        self._ttft_count += 1

    def end(self, record: RequestRecord) -> None:
        """A request has become what its record says."""
        self.in_flight -= 1
        self.records[record.index] = record
        self.errors += record.error is not None

    def tell(self, tokens_per_s: float) -> None:
        """Tell the progress to whoever wants it."""
        if self.load.tell is None:
            return
        ttft_s = self._ttft_sum_s / self._ttft_count if self._ttft_count else None
        done, total = len(self.records), len(self.requests)
        self.load.tell(Progress(done, total, self.in_flight, self.errors, tokens_per_s, ttft_s))

    def result(self, now_s: float, cpu_s: float, lags_s: Sequence[float] = ()) -> LoadResult:
        """What the load has come to, `now_s` after its start. `cpu_s` is what the generator took,
        `lags_s` are samples of its event loop's."""
        records = tuple(self.records[index] for index in sorted(self.records))
        duration_s = self._duration_s(now_s)
        late = [record.sent_s - record.scheduled_s for record in records]
        overhead = Overhead(
            cpu_s=cpu_s,
            cpu_share=cpu_s / max(duration_s, 1e-9),
            events=self.events,
            us_per_event=1e6 * cpu_s / max(self.events, 1),
            lag_p50_s=nearest_rank(lags_s, 0.5),
            lag_p99_s=nearest_rank(lags_s, 0.99),
            late_p99_s=nearest_rank(late, 0.99) if self.load.open_loop else 0.0,
            peak_in_flight=self.peak,
        )
        return LoadResult(records, duration_s, overhead)

    def _duration_s(self, now_s: float) -> float:
        """How long the load took: hanging up on what was cut is not in it."""
        if self.load.limit_s is None:
            return now_s
        ends = [record.end_s for record in self.records.values()]
        return min(max([self.load.limit_s, *ends]), now_s)

"""Metrics in Prometheus' text form: vLLM's names where routers read them, `mlora_` for the rest.

Series per adapter are bounded: the busiest have their own, all others share `other`. An adapter
that becomes busier takes the place of the least busy one, whose counts go on in `other`, so every
series only grows.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from multilora_cli.engine.messages import AdapterStatus, Snapshot
from multilora_cli.server.buckets import Buckets
from multilora_cli.server.tier_traffic import TierTraffic

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_E2E_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class AdapterCounts:
    """What one series of adapter metrics has counted."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: Buckets = field(default_factory=lambda: Buckets(_TTFT_S))

    def merge(self, other: "AdapterCounts") -> None:
        """Add what another series has counted."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.ttft_s.merge(other.ttft_s)


class AdapterTable:
    """Counts by adapter name, at most `limit` of them by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.traffic: dict[str, int] = {}
        self.named: dict[str, AdapterCounts] = {}
        self.other = AdapterCounts()

    def counts(self, name: str) -> AdapterCounts:
        """Where a request of this adapter counts. Only registered names come here."""
        self.traffic[name] = self.traffic.get(name, 0) + 1
        if name in self.named:
            return self.named[name]
        if len(self.named) >= self._limit:
            least = min(self.named, key=self.traffic.__getitem__, default=None)
            if least is None or self.traffic[least] >= self.traffic[name]:
                return self.other
            self.other.merge(self.named.pop(least))
        return self.named.setdefault(name, AdapterCounts())

    def forget(self, name: str) -> None:
        """An adapter was unloaded: its counts go on in `other`."""
        self.traffic.pop(name, None)
        if name in self.named:
            self.other.merge(self.named.pop(name))


class RequestMeter:
    """Times and counts one request."""

    def __init__(self, metrics: "Metrics", adapter: str | None, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._adapter = adapter
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._came_s = time.time()
        self._counts = metrics.adapters.counts(adapter) if adapter is not None else None
        self._started_s = time.monotonic()
        self._tier: str | None = None
        self._last_s: float | None = None
        metrics.prompt_tokens.inc(prompt_tokens)
        if self._counts is not None:
            self._counts.requests += 1
            self._counts.prompt_tokens += prompt_tokens

    def admitted(self, tier: str) -> None:
        """The engine has it; its adapter is in `tier` now."""
        self._tier = tier
        self._metrics.tiers.admitted(tier)

    def tokens(self, count: int) -> None:
        """Some tokens arrived now."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._first(now_s - self._started_s)
        else:
            self._metrics.itl.observe((now_s - self._last_s) / count)
        self._last_s = now_s
        self._output_tokens += count
        self._metrics.generation_tokens += count
        if self._counts is not None:
            self._counts.output_tokens += count

    def finished(self, reason: str) -> None:
        """The request ended; `reason` is a finish reason, abort or error."""
        self._metrics.ended(reason)
        self._metrics.e2e.observe(time.monotonic() - self._started_s)
        for tell in self._metrics.on_ended:
            tell(self._came_s, self._adapter, self._prompt_tokens, self._output_tokens)

    def _first(self, ttft_s: float) -> None:
        self._metrics.ttft.observe(ttft_s)
        if self._counts is not None:
            self._counts.ttft_s.observe(ttft_s)
        if self._tier is not None:
            self._metrics.tiers.answered(self._tier, ttft_s)


class Metrics:
    """All series of one server."""

    def __init__(self, base_name: str, named_adapters: int) -> None:
        # Without it every counter has a second series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.adapters = AdapterTable(named_adapters)
        self.tiers = TierTraffic()
        labels = _labels(base_name)
        names = tuple(labels)
        self.ttft, self.itl, self.e2e = Buckets(_TTFT_S), Buckets(_ITL_S), Buckets(_E2E_S)
        self.generation_tokens = 0
        # When a request came (seconds since the epoch), its adapter, its tokens in and out.
        self.on_ended: list[Callable[[float, str | None, int, int], None]] = []
        tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", names, registry=self.registry)
        self.prompt_tokens = tokens.labels(**labels)
        self._labels = labels
        self.requests = Counter(
            "vllm:request_success",
            "Ended requests by reason.",
            (*names, "finished_reason"),
            registry=self.registry,
        )
        self.replies = Counter(
            "mlora_http_replies", "HTTP replies by status.", ("status",), registry=self.registry
        )
        self.reloads = Counter(
            "mlora_fleet_reloads",
            "Times the fleet file was read again by SIGHUP.",
            ("outcome",),
            registry=self.registry,
        )

    def ended(self, reason: str) -> None:
        """A request ended; `reason` is a finish reason, abort or error."""
        self.requests.labels(**self._labels, finished_reason=reason).inc()

    def meter(self, adapter: str | None, prompt_tokens: int) -> RequestMeter:
        """Begin to count a request; `adapter` is a registered name or None for the base."""
        return RequestMeter(self, adapter, prompt_tokens)

    def render(self, state: "EngineView") -> bytes:
        """Everything, as Prometheus scrapes it."""
        registry = CollectorRegistry()
        registry.register(_Scrape(self, state))
        return generate_latest(self.registry) + generate_latest(registry)


@dataclass(frozen=True)
class EngineView:
    """What a scrape shows of the engine."""

    base_name: str
    max_loras: int
    snapshot: Snapshot | None
    names: Mapping[str, str]  # digest -> adapter name
    statuses: Mapping[str, AdapterStatus]
    up: bool
    restarts: int


class _Scrape(Collector):
    """Series that are computed when they are read."""

    def __init__(self, metrics: Metrics, view: EngineView) -> None:
        self._metrics = metrics
        self._adapters = metrics.adapters
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """prometheus_client: the families of this scrape."""
        yield _gauge("mlora_engine_up", "1 while the engine serves.", float(self._view.up))
        restarts = self._view.restarts
        yield CounterMetricFamily("mlora_engine_restarts", "Restarts of the engine.", restarts)
        yield from self._tokens()
        yield from self._engine()
        yield from self._traffic()
        yield from self._metrics.tiers.collect()
        yield from self._residency()

    def _tokens(self) -> Iterator[Metric]:
        """What every token counts in."""
        labels = _labels(self._view.base_name)
        for name, text, buckets in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", self._metrics.ttft),
            ("vllm:inter_token_latency_seconds", "Between tokens.", self._metrics.itl),
            ("vllm:e2e_request_latency_seconds", "Arrival to end.", self._metrics.e2e),
        ):
            family = HistogramMetricFamily(name, text, labels=tuple(labels))
            buckets.add_to(family, tuple(labels.values()))
            yield family
        generated = self._metrics.generation_tokens
        yield _counter("vllm:generation_tokens", generated, labels, "Generated tokens.")

    def _engine(self) -> Iterator[Metric]:
        snapshot = self._view.snapshot
        if snapshot is None:
            return
        yield self._lora_info(snapshot)
        yield from self._waits(snapshot)
        labels = _labels(self._view.base_name)
        used = 1 - snapshot.pages_free / max(snapshot.pages_total, 1)
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the batch.", snapshot.running),
            ("vllm:num_requests_waiting", "Sequences that wait.", snapshot.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the pool in use.", used),
        ):
            yield _gauge(name, text, value, labels)
        for name, pages in (
            ("total", snapshot.pages_total),
            ("free", snapshot.pages_free),
            ("kv", snapshot.pages_kv),
            ("cached", snapshot.pages_cached),
            ("adapters", snapshot.pages_adapters),
        ):
            yield _gauge(f"mlora_pages_{name}", "Pages of the pool.", pages)
        for name, value in sorted(snapshot.counters.items()):
            if name.endswith("_s"):
                yield _gauge(f"mlora_engine_{name}econds", "Of the engine.", value)
            else:
                own = f"mlora_engine_{name}"
                yield _counter(_VLLM.get(name, own), value, labels if name in _VLLM else None)

    def _waits(self, snapshot: Snapshot) -> Iterator[Metric]:
        """What sequences wait for, and how long they have in all."""
        waiting = GaugeMetricFamily(
            "mlora_waiting_sequences", "Sequences by what they wait for.", labels=("reason",)
        )
        seconds = CounterMetricFamily(
            "mlora_wait_seconds", "Seconds waited, by what for.", labels=("reason",)
        )
        for reason, waited_s in snapshot.wait_seconds.items():
            waiting.add_metric((reason,), snapshot.waits.get(reason, 0))
            seconds.add_metric((reason,), waited_s)
        yield waiting
        yield seconds

    def _lora_info(self, snapshot: Snapshot) -> Metric:
        """vLLM's one LoRA metric, letter for letter: routers parse its labels."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        names = self._view.names
        family.add_metric(
            (
                str(self._view.max_loras),
                ",".join(names.get(d, d[:12]) for d in sorted(snapshot.waiting_adapters)),
                ",".join(names.get(d, d[:12]) for d in sorted(snapshot.running_adapters)),
            ),
            time.time(),
        )
        return family

    def _traffic(self) -> Iterator[Metric]:
        rows = {**self._adapters.named, OTHER: self._adapters.other}
        for name, text in (
            ("requests", "Requests by adapter."),
            ("prompt_tokens", "Prompt tokens by adapter."),
            ("output_tokens", "Generated tokens by adapter."),
        ):
            family = CounterMetricFamily(f"mlora_adapter_{name}", text, labels=("adapter",))
            for adapter, counts in rows.items():
                family.add_metric((adapter,), getattr(counts, name))
            yield family
        histogram = HistogramMetricFamily(
            "mlora_adapter_ttft_seconds", "Arrival to first token.", labels=("adapter",)
        )
        for adapter, counts in rows.items():
            counts.ttft_s.add_to(histogram, (adapter,))
        yield histogram

    def _residency(self) -> Iterator[Metric]:
        tiers: dict[str, int] = {}
        rows: dict[str, AdapterStatus] = {}
        for digest, status in self._view.statuses.items():
            tiers[status.tier] = tiers.get(status.tier, 0) + 1
            name = self._view.names.get(digest)
            if name in self._adapters.named and name is not None:
                rows[name] = status
        family = GaugeMetricFamily("mlora_adapters", "Adapters by tier.", labels=("tier",))
        for tier, count in sorted(tiers.items()):
            family.add_metric((tier,), count)
        yield family
        for name, text in (
            ("pages", "Pages on the device."),
            ("host_bytes", "Bytes of the warm image."),
            ("references", "Sequences that use it."),
        ):
            family = GaugeMetricFamily(f"mlora_adapter_{name}", text, labels=("adapter",))
            for adapter, status in rows.items():
                family.add_metric((adapter,), getattr(status, name))
            yield family
        loads = CounterMetricFamily(
            "mlora_adapter_loads", "Times it was loaded.", labels=("adapter",)
        )
        for adapter, status in rows.items():
            loads.add_metric((adapter,), status.loads)
        yield loads


_VLLM = {
    "preemptions": "vllm:num_preemptions",
    "cached_tokens": "vllm:prefix_cache_hits",  # vLLM counts both in tokens
    "prompt_tokens": "vllm:prefix_cache_queries",
}


def _labels(base_name: str) -> dict[str, str]:
    """Those of vLLM's series."""
    return {"model_name": base_name, "engine": "0"}


def _counter(
    name: str, value: float, labels: Mapping[str, str] | None, text: str = "Of the engine."
) -> Metric:
    family = CounterMetricFamily(name, text, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family

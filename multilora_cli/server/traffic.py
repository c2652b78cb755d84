"""What requests cost: counts and times of all of them, and of each adapter's.

Series per adapter are bounded: the busiest have their own, all others share `other`. An adapter
that becomes busier takes the place of the least busy one, whose counts go on in `other`, so every
series only grows.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from multilora_cli.server.buckets import Buckets
from multilora_cli.server.families import counters, histogram
from multilora_cli.server.tier_traffic import TierTraffic

OTHER = "other"
_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
# vLLM's names: field of RequestTimes -> what is measured.
_VLLM = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Between tokens.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_queue_time_seconds": "Until its prompt was taken up; an adapter's load counts.",
    "request_prefill_time_seconds": "From there to the first token.",
    "request_decode_time_seconds": "First to last token.",
    "request_inference_time_seconds": "Taken up to last token.",
    "request_time_per_output_token_seconds": "Mean between tokens, by request.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
}


@dataclass
class AdapterCounts:
    """What one series of adapter metrics has counted."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cold_starts: int = 0
    queue_s: float = 0.0
    ttft_s: Buckets = field(default_factory=lambda: Buckets(_TTFT_S))
    itl_s: Buckets = field(default_factory=lambda: Buckets(_ITL_S))

    def merge(self, other: "AdapterCounts") -> None:
        """Add what another series has counted."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.cold_starts += other.cold_starts
        self.queue_s += other.queue_s
        self.ttft_s.merge(other.ttft_s)
        self.itl_s.merge(other.itl_s)


class AdapterTable:
    """Counts by adapter name, at most `limit` of them by name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.traffic: dict[str, int] = {}
        self.named: dict[str, AdapterCounts] = {}
        self.other = AdapterCounts()

    def counts(self, name: str) -> AdapterCounts:
        """Where a request of this adapter counts. Only registered names come here."""
        self.traffic[name] = self.traffic.get(name, 0) + 1
        if name in self.named:
            return self.named[name]
        if len(self.named) >= self.limit:
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

    def collect(self) -> Iterator[str]:
        """The families of a scrape."""
        rows = {**self.named, OTHER: self.other}
        for name, text, attribute in (
            ("requests", "Requests by adapter.", "requests"),
            ("prompt_tokens", "Prompt tokens by adapter.", "prompt_tokens"),
            ("output_tokens", "Generated tokens by adapter.", "output_tokens"),
            ("cold_starts", "Requests that had to have it read.", "cold_starts"),
            ("queue_seconds", "Seconds until prompts were taken up.", "queue_s"),
        ):
            values = {adapter: getattr(counts, attribute) for adapter, counts in rows.items()}
            yield counters(f"mlora_adapter_{name}", text, "adapter", values)
        for name, text, attribute in (
            ("ttft", "Arrival to first token.", "ttft_s"),
            ("itl", "Between tokens.", "itl_s"),
        ):
            times = [
                ({"adapter": adapter}, getattr(counts, attribute))
                for adapter, counts in rows.items()
            ]
            yield histogram(f"mlora_adapter_{name}_seconds", text, times)


class RequestTimes:
    """Histograms over all requests, under vLLM's names."""

    def __init__(self) -> None:
        bounds = {
            "time_to_first_token_seconds": _TTFT_S,
            "inter_token_latency_seconds": _ITL_S,
            "request_time_per_output_token_seconds": _ITL_S,
            "request_prompt_tokens": _TOKENS,
            "request_generation_tokens": _TOKENS,
        }
        self.by_name = {name: Buckets(bounds.get(name, _LONG_S)) for name in _VLLM}
        self.itl = self.by_name["inter_token_latency_seconds"]  # looked up for every token

    def observe(self, name: str, value: float) -> None:
        """Count one value."""
        self.by_name[name].observe(value)

    def collect(self, labels: dict[str, str]) -> Iterator[str]:
        """The families of a scrape."""
        for name, text in _VLLM.items():
            yield histogram(f"vllm:{name}", text, [(labels, self.by_name[name])])


class Traffic:
    """Everything that requests are counted in."""

    def __init__(self, named_adapters: int) -> None:
        self.adapters = AdapterTable(named_adapters)
        self.tiers = TierTraffic()
        self.times = RequestTimes()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        # When a request came (seconds since the epoch), its adapter, its tokens in and out.
        self.on_ended: list[Callable[[float, str | None, int, int], None]] = []


class RequestMeter:
    """Times and counts one request."""

    def __init__(self, traffic: Traffic, adapter: str | None, prompt_tokens: int) -> None:
        """`adapter` is a registered name or None for the base."""
        self._traffic = traffic
        self._adapter = adapter
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._came_s = time.time()
        self._counts = traffic.adapters.counts(adapter) if adapter is not None else None
        self._started_s = time.monotonic()
        self._queued_s = 0.0
        self._tier: str | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        traffic.prompt_tokens += prompt_tokens
        if self._counts is not None:
            self._counts.requests += 1
            self._counts.prompt_tokens += prompt_tokens

    def admitted(self, tier: str) -> None:
        """The engine has it; its adapter is in `tier` now."""
        self._tier = tier
        self._traffic.tiers.admitted(tier)
        if self._counts is not None and tier == "stored":
            self._counts.cold_starts += 1

    def queued(self, seconds: float) -> None:
        """The engine took it up after so long; of several prompts the last one counts."""
        self._queued_s = max(self._queued_s, seconds)

    def tokens(self, count: int) -> None:
        """Some tokens arrived now."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._first(now_s - self._started_s)
        else:
            gap_s = (now_s - self._last_s) / count
            self._traffic.times.itl.observe(gap_s)
            if self._counts is not None:
                self._counts.itl_s.observe(gap_s)
        self._last_s = now_s
        self._output_tokens += count
        self._traffic.generation_tokens += count
        if self._counts is not None:
            self._counts.output_tokens += count

    def ended(self) -> None:
        """The request is over, however it ended."""
        observe = self._traffic.times.observe
        observe("e2e_request_latency_seconds", time.monotonic() - self._started_s)
        observe("request_prompt_tokens", self._prompt_tokens)
        observe("request_generation_tokens", self._output_tokens)
        if self._first_s is not None:
            prefill_s = max(self._first_s - self._started_s - self._queued_s, 0.0)
            decode_s = self._last_s - self._first_s
            observe("request_queue_time_seconds", self._queued_s)
            observe("request_prefill_time_seconds", prefill_s)
            observe("request_decode_time_seconds", decode_s)
            observe("request_inference_time_seconds", prefill_s + decode_s)
            if self._output_tokens > 1:
                each_s = decode_s / (self._output_tokens - 1)
                observe("request_time_per_output_token_seconds", each_s)
            if self._counts is not None:
                self._counts.queue_s += self._queued_s
        for tell in self._traffic.on_ended:
            tell(self._came_s, self._adapter, self._prompt_tokens, self._output_tokens)

    def _first(self, ttft_s: float) -> None:
        self._traffic.times.observe("time_to_first_token_seconds", ttft_s)
        if self._counts is not None:
            self._counts.ttft_s.observe(ttft_s)
        if self._tier is not None:
            self._traffic.tiers.answered(self._tier, ttft_s)

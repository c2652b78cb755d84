"""What requests found: the tier of their adapter when they were admitted, and what it cost them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from multilora_cli.engine.messages import AdapterStatus
from multilora_cli.server.buckets import Buckets
from multilora_cli.server.families import counter, counters, gauge, histogram

# Fine where a hot adapter and a load differ: 5 ms apart on a GPU.
_TTFT_S = (
    0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6,
    1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 60.0,
)  # fmt: skip
TIERS = ("hot", "warm", "stored")


def found_tier(statuses: Mapping[str, AdapterStatus], digest: str) -> str:
    """Where the adapter is for a request that is admitted now; a failed one is read again."""
    status = statuses.get(digest)
    return status.tier if status is not None and status.tier in TIERS else "stored"


@dataclass
class _Found:
    """Requests of one tier."""

    requests: int = 0
    ttft_s: Buckets = field(default_factory=lambda: Buckets(_TTFT_S))


class TierTraffic:
    """Requests with an adapter, by the tier it was in; requests of the base are not counted."""

    def __init__(self) -> None:
        self._found = {tier: _Found() for tier in TIERS}

    def admitted(self, tier: str) -> None:
        """A request was admitted."""
        self._found[tier].requests += 1

    def answered(self, tier: str, ttft_s: float) -> None:
        """Its first token came, so many seconds after it arrived."""
        self._found[tier].ttft_s.observe(ttft_s)

    @property
    def requests(self) -> int:
        """Requests of all tiers."""
        return sum(found.requests for found in self._found.values())

    @property
    def hit_ratio(self) -> float | None:
        """The share of requests that found their adapter on the device; None: no requests."""
        return self._found["hot"].requests / self.requests if self.requests else None

    @property
    def cold_starts(self) -> int:
        """Requests that waited for their adapter's files to be read."""
        return self._found["stored"].requests

    def summary(self) -> dict[str, Any]:
        """As the listing of adapters shows it."""
        return {
            "requests": self.requests,
            "hit_ratio": self.hit_ratio,
            "cold_starts": self.cold_starts,
            "tiers": {
                tier: {
                    "requests": found.requests,
                    "ttft_p50_s": found.ttft_s.quantile(0.5),
                    "ttft_p95_s": found.ttft_s.quantile(0.95),
                }
                for tier, found in self._found.items()
            },
        }

    def collect(self) -> Iterator[str]:
        """The families of a scrape."""
        yield counters(
            "mlora_tier_requests",
            "Requests by the tier of their adapter.",
            "tier",
            {tier: found.requests for tier, found in self._found.items()},
        )
        ttft = [({"tier": tier}, found.ttft_s) for tier, found in self._found.items()]
        yield histogram("mlora_tier_ttft_seconds", "Arrival to first token, by tier.", ttft)
        yield counter(
            "mlora_cold_starts", "Requests whose adapter had to be read.", self.cold_starts
        )
        if self.hit_ratio is not None:
            yield gauge("mlora_adapter_hit_ratio", "Requests with a hot adapter.", self.hit_ratio)

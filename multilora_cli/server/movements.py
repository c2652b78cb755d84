"""How long adapters take from tier to tier, and why they leave."""

from collections.abc import Iterator
from typing import Literal, get_args

from multilora_cli.engine.messages import AdapterStatus, Reply, Tier
from multilora_cli.server.buckets import Buckets
from multilora_cli.server.families import counters, histogram

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_HOPS = ("source_stored", "stored_warm", "warm_hot")
Reason = Literal["operator", "ttl", "retired"]


class Movements:
    """Fed by the engine's events, and by whoever sends adapters away."""

    def __init__(self) -> None:
        self._hops = {hop: Buckets(_SECONDS) for hop in _HOPS}
        self._left = dict.fromkeys(get_args(Reason), 0)
        self._tiers: dict[str, Tier] = {}  # by digest, as last told

    def fetched(self, seconds: float) -> None:
        """A remote adapter is on this machine's disk now, verified."""
        self._hops["source_stored"].observe(seconds)

    def told(self, status: AdapterStatus) -> None:
        """The engine says that an adapter changed its tier."""
        before = self._tiers.get(status.digest)
        self._tiers[status.digest] = status.tier
        if status.tier == "hot":
            self._hops["warm_hot"].observe(status.copy_s)
        elif status.tier == "warm" and before == "stored":
            self._hops["stored_warm"].observe(status.load_s)

    def sent_away(self, reason: Reason, reply: Reply) -> None:
        """Somebody had the engine free what an adapter held; counted where it held anything."""
        if reply.freed_pages or reply.freed_host_bytes:
            self._left[reason] += 1

    def forget(self, digest: str) -> None:
        """No name stands for it any more."""
        self._tiers.pop(digest, None)

    def collect(self, evicted_for_room: float) -> Iterator[str]:
        """The families of a scrape."""
        hops = [({"hop": hop}, buckets) for hop, buckets in self._hops.items()]
        yield histogram("mlora_adapter_load_seconds", "From one tier to the next.", hops)
        text, buckets = "From disk to host memory.", self._hops["stored_warm"]
        yield histogram("vllm:lora_adapter_load_seconds", text, [({}, buckets)])
        yield counters(
            "mlora_adapter_evictions",
            "Adapters that left a tier: for room on the device, by an operator, unused, unloaded.",
            "reason",
            self._left | {"room": evicted_for_room},
        )

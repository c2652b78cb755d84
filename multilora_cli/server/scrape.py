"""The series that are computed when they are read: the engine's state, and what requests cost."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from multilora_cli.adapters.registry import Registry
from multilora_cli.engine.messages import AdapterStatus, Snapshot
from multilora_cli.server.families import counter, counters, gauge, gauges, labelled
from multilora_cli.server.movements import Movements
from multilora_cli.server.quota import Quotas
from multilora_cli.server.statuses import Statuses
from multilora_cli.server.traffic import Traffic


@dataclass(frozen=True)
class EngineView:
    """What a scrape shows of the engine."""

    base_name: str
    max_loras: int
    snapshot: Snapshot | None
    registry: Registry
    statuses: Statuses
    movements: Movements
    quotas: Quotas
    up: bool
    restarts: int


class Scrape:
    """Series that are computed when they are read. What they cost does not depend on how many
    adapters there are: it looks at those with series of their own, and at pinned ones."""

    def __init__(self, traffic: Traffic, view: EngineView) -> None:
        self._traffic = traffic
        self._view = view
        self._labels = {"model_name": view.base_name, "engine": "0"}

    def collect(self) -> Iterator[str]:
        """The families of this scrape, a text each."""
        yield gauge("mlora_engine_up", "1 while the engine serves.", float(self._view.up))
        yield counter("mlora_engine_restarts", "Restarts of the engine.", self._view.restarts)
        traffic, labels = self._traffic, self._labels
        yield from traffic.times.collect(labels)
        yield counter("vllm:prompt_tokens", "Prompt tokens.", traffic.prompt_tokens, labels)
        yield counter(
            "vllm:generation_tokens", "Generated tokens.", traffic.generation_tokens, labels
        )
        yield from self._engine()
        yield from traffic.adapters.collect()
        yield from traffic.tiers.collect()
        yield from self._view.quotas.collect()
        yield from self._residency()
        yield from self._loaded()
        snapshot = self._view.snapshot
        evictions = snapshot.counters.get("adapter_evictions", 0) if snapshot is not None else 0
        yield from self._view.movements.collect(evictions)

    def _engine(self) -> Iterator[str]:
        snapshot = self._view.snapshot
        if snapshot is None:
            return
        yield self._lora_info(snapshot)
        yield from self._waits(snapshot)
        labels = self._labels
        used = 1 - snapshot.pages_free / max(snapshot.pages_total, 1)
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the batch.", snapshot.running),
            ("vllm:num_requests_waiting", "Sequences that wait.", snapshot.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the pool in use.", used),
        ):
            yield gauge(name, text, value, labels)
        for name, pages in (
            ("total", snapshot.pages_total),
            ("free", snapshot.pages_free),
            ("kv", snapshot.pages_kv),
            ("cached", snapshot.pages_cached),
            ("adapters", snapshot.pages_adapters),
        ):
            yield gauge(f"mlora_pages_{name}", "Pages of the pool.", pages)
        for name, value in sorted(snapshot.counters.items()):
            if name.endswith("_s"):
                yield gauge(f"mlora_engine_{name}econds", "Of the engine.", value)
            elif name in _VLLM:
                yield counter(_VLLM[name], "Of the engine.", value, labels)
            else:
                yield counter(f"mlora_engine_{name}", "Of the engine.", value)

    def _waits(self, snapshot: Snapshot) -> Iterator[str]:
        """What sequences wait for, and how long they have in all."""
        waiting = {reason: snapshot.waits.get(reason, 0) for reason in snapshot.wait_seconds}
        yield gauges(
            "mlora_waiting_sequences", "Sequences by what they wait for.", "reason", waiting
        )
        yield counters(
            "mlora_wait_seconds", "Seconds waited, by what for.", "reason", snapshot.wait_seconds
        )

    def _lora_info(self, snapshot: Snapshot) -> str:
        """vLLM's one LoRA metric, letter for letter: routers parse its labels."""
        labels = {
            "max_lora": str(self._view.max_loras),
            "waiting_lora_adapters": self._names(snapshot.waiting_adapters),
            "running_lora_adapters": self._names(snapshot.running_adapters),
        }
        text = "Running stats on lora requests."
        return gauge("vllm:lora_requests_info", text, time.time(), labels)

    def _names(self, digests: Iterable[str]) -> str:
        """Names joined by commas; of a version that is served no more, the digest's beginning."""
        return ",".join(self._name(digest) or digest[:12] for digest in sorted(digests))

    def _name(self, digest: str) -> str | None:
        """Who stands for it; of several names the latest."""
        entries = self._view.registry.of_digest(digest)
        return entries[-1].name if entries else None

    def _named(self) -> dict[str, AdapterStatus]:
        """Status by name, of those with series of their own."""
        view, rows = self._view, {}
        for name in self._traffic.adapters.named:
            entry = view.registry.get(name)
            status = view.statuses.get(entry.digest or "") if entry is not None else None
            if status is not None:
                rows[name] = status
        return rows

    def _residency(self) -> Iterator[str]:
        """How many adapters are where, and what each of the busiest holds."""
        tiers, rows = self._view.statuses.tiers, self._named()
        counts = {tier: tiers[tier] for tier in sorted({*+tiers, *_RANKED})}
        yield gauges("mlora_adapters", "Adapters by tier.", "tier", counts)
        ranks = {
            adapter: _RANKED.index(status.tier)
            for adapter, status in rows.items()
            if status.tier in _RANKED
        }
        text = "0: on disk, 1: in host memory, 2: hot."
        yield gauges("mlora_adapter_tier", text, "adapter", ranks)
        for name, text in (
            ("pages", "Pages on the device."),
            ("host_bytes", "Bytes of the warm image."),
            ("references", "Sequences that use it."),
        ):
            values = {adapter: getattr(status, name) for adapter, status in rows.items()}
            yield gauges(f"mlora_adapter_{name}", text, "adapter", values)
        loads = {adapter: status.loads for adapter, status in rows.items()}
        yield counters("mlora_adapter_loads", "Times it was loaded.", "adapter", loads)

    def _loaded(self) -> Iterator[str]:
        """The names that are proposed for vLLM: pull requests 45411, 51433, 54830."""
        view, table = self._view, self._traffic.adapters
        loaded = self._named()
        room = table.limit - len(table.named)  # for pinned ones that nobody asked for yet
        for status in view.statuses.pinned:
            name = self._name(status.digest) if status.tier in _LEVELS else None
            if room > 0 and name is not None and name not in loaded:
                loaded[name] = status
                room -= 1
        rows = [
            (
                {
                    "adapter_name": name,
                    "level": _LEVELS[status.tier],
                    "pinned": str(status.pinned).lower(),
                    "rank": str(entry.rank),
                },
                1,
            )
            for name, status in loaded.items()
            if status.tier in _LEVELS and (entry := view.registry.get(name)) is not None
        ]
        text = "1 for each loaded adapter, of the busiest and of pinned ones."
        yield labelled("vllm:lora_adapter_loaded", "gauge", text, rows)
        tiers = view.statuses.tiers
        for name, text, value in (
            ("num_gpu_loaded_lora_adapters", "Adapters on the device.", tiers["hot"]),
            ("num_cpu_loaded_lora_adapters", "Adapters in host memory only.", tiers["warm"]),
            ("max_gpu_lora_adapters", "Adapters that fit in one step.", view.max_loras),
        ):
            yield gauge(f"vllm:{name}", text, value, self._labels)


_RANKED = ("stored", "warm", "hot")
_LEVELS = {"hot": "gpu", "warm": "cpu"}
_VLLM = {
    "preemptions": "vllm:num_preemptions",
    "cached_tokens": "vllm:prefix_cache_hits",  # vLLM counts both in tokens
    "prompt_tokens": "vllm:prefix_cache_queries",
}

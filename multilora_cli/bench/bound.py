"""How long a load must take at least on a card: what any engine has to read and multiply.

A decode step of B rows reads the weights once, every row's KV, and each distinct adapter once.
Adapters of a step are those of B requests drawn without replacement, as when shuffled requests
are served first come first served. Prefill multiplies at the share of the matrix rate that whole
layers reach. Arrivals are not counted, so the bound is one for saturated loads.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multilora_cli.bench.workload import BenchRequest
from multilora_cli.sizing.bound import prefill_seconds, read_bytes
from multilora_cli.sizing.budget import BaseBytes
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.hardware import Gpu


@dataclass(frozen=True)
class Costs:
    """What a load costs on one card; bytes of adapters are those of their index."""

    gpu: Gpu
    geometry: ModelGeometry
    base: BaseBytes
    kv_itemsize: int
    max_num_seqs: int
    fp8: bool = False  # whether the base multiplies in FP8
    adapter_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """Least seconds of a whole load, and the output tokens/s that they mean."""

    decode_s: float
    prefill_s: float
    batch: int  # rows assumed in a decode step
    output_tokens_per_s: float

    @property
    def seconds(self) -> float:
        """Decode and prefill one after the other."""
        return self.decode_s + self.prefill_s


def workload_bound(
    requests: Sequence[BenchRequest], concurrency: int | None, costs: Costs
) -> Bound:
    """The bound of one arm, `concurrency` requests at a time (None: as many as are served)."""
    batch = min(concurrency or costs.max_num_seqs, costs.max_num_seqs, len(requests))
    tokens = sum(request.output_tokens for request in requests)
    per_token = costs.geometry.kv_bytes_per_token(costs.kv_itemsize)
    kv = per_token * sum(_contexts(request) for request in requests)
    step = read_bytes(costs.base) + distinct_bytes(requests, batch, costs.adapter_bytes)
    decode_s = (tokens / batch * step + kv) / costs.gpu.read_bytes_s
    prefill_s = sum(
        prefill_seconds(costs.geometry, length, costs.gpu, fp8=costs.fp8) * count
        for length, count in Counter(request.input_tokens for request in requests).items()
    )
    return Bound(decode_s, prefill_s, batch, tokens / (decode_s + prefill_s))


def distinct_bytes(
    requests: Sequence[BenchRequest], batch: int, adapter_bytes: Mapping[int, int]
) -> float:
    """Expected bytes of the distinct adapters among `batch` of the requests."""
    counts = Counter(r.adapter for r in requests if r.adapter is not None)
    return sum(
        adapter_bytes.get(adapter, 0) * _present(count, batch, len(requests))
        for adapter, count in counts.items()
    )


def _present(count: int, batch: int, total: int) -> float:
    """Chance that one of `count` among `total` is in a draw of `batch` without replacement."""
    absent = 1.0
    for taken in range(batch):
        absent *= max(total - count - taken, 0) / (total - taken)
    return 1.0 - absent


def _contexts(request: BenchRequest) -> int:
    """Tokens of KV that all decode steps of a request read together."""
    steps = request.output_tokens
    return steps * request.input_tokens + steps * (steps - 1) // 2

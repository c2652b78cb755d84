"""How long a load must take at least on a card: what any engine has to read and multiply.

A decode step of B rows reads the weights once, every row's KV, and each distinct adapter once.
Which rows a step has is that of requests served first come first served. Prefill multiplies at the
share of the matrix rate that whole layers reach. A load that is sent at once is summed up; one
whose requests come at their times is stepped through, since mostly the arrivals decide.
"""

import heapq
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
    steps, adapters = step_reads(requests, batch, costs.adapter_bytes)
    decode_s = (steps * read_bytes(costs.base) + adapters + kv) / costs.gpu.read_bytes_s
    prefill_s = sum(
        prefill_seconds(costs.geometry, length, costs.gpu, fp8=costs.fp8) * count
        for length, count in Counter(request.input_tokens for request in requests).items()
    )
    return Bound(decode_s, prefill_s, batch, tokens / (decode_s + prefill_s))


def arrival_bound(
    requests: Sequence[BenchRequest],
    concurrency: int | None,
    costs: Costs,
    limit_s: float | None = None,
) -> Bound:
    """The bound of a load whose requests come at their times; with `limit_s` of what can be
    answered by then.

    An engine without any overhead is stepped through it: a request that has come and has a place
    is prefilled, then every running answer gets a token.
    """
    most = min(concurrency or costs.max_num_seqs, costs.max_num_seqs)
    due = (request for request in requests if limit_s is None or request.arrival_s < limit_s)
    waiting = sorted(due, key=lambda request: request.arrival_s)[::-1]  # the next one last
    rows = _Rows(costs)
    now = decode_s = prefill_s = 0.0
    tokens = batch = 0
    while (waiting or rows.count) and (limit_s is None or now < limit_s):
        if not rows.count:
            now = max(now, waiting[-1].arrival_s)
        while waiting and waiting[-1].arrival_s <= now and rows.count < most:
            request = waiting.pop()
            seconds = prefill_seconds(
                costs.geometry, request.input_tokens, costs.gpu, fp8=costs.fp8
            )
            prefill_s, now = prefill_s + seconds, now + seconds
            rows.add(request)
        batch = max(batch, rows.count)
        tokens += rows.count
        seconds = rows.step()
        decode_s, now = decode_s + seconds, now + seconds
    return Bound(decode_s, prefill_s, batch, tokens / (limit_s or now) if tokens else 0.0)


class _Rows:
    """The answers that run, and what a step of them reads."""

    def __init__(self, costs: Costs) -> None:
        self.count = 0
        self._costs = costs
        self._step = self._added = 0
        self._context = self._adapters = 0  # tokens of KV, bytes of distinct adapters
        self._ends: list[tuple[int, int, BenchRequest]] = []  # step, a number of its own, answer
        self._of: Counter[int] = Counter()  # rows by adapter

    def add(self, request: BenchRequest) -> None:
        """One more answer, its prompt read."""
        adapter = request.adapter
        if adapter is not None:
            if not self._of[adapter]:
                self._adapters += self._costs.adapter_bytes.get(adapter, 0)
            self._of[adapter] += 1
        self.count += 1
        self._context += request.input_tokens
        self._added += 1
        heapq.heappush(self._ends, (self._step + request.output_tokens, self._added, request))

    def step(self) -> float:
        """A token for each; the seconds it takes at least."""
        costs = self._costs
        kv = costs.geometry.kv_bytes_per_token(costs.kv_itemsize) * self._context
        seconds = (read_bytes(costs.base) + self._adapters + kv) / costs.gpu.read_bytes_s
        self._step += 1
        self._context += self.count
        while self._ends and self._ends[0][0] <= self._step:
            self._end(heapq.heappop(self._ends)[2])
        return seconds

    def _end(self, request: BenchRequest) -> None:
        self.count -= 1
        self._context -= request.input_tokens + request.output_tokens
        if (adapter := request.adapter) is not None:
            self._of[adapter] -= 1
            if not self._of[adapter]:
                self._adapters -= self._costs.adapter_bytes.get(adapter, 0)


def step_reads(
    requests: Sequence[BenchRequest], batch: int, adapter_bytes: Mapping[int, int]
) -> tuple[int, int]:
    """Decode steps of a whole load, and bytes of adapters that they read together.

    At most `batch` answers run at once, first come first served, and each has a token in every
    step: towards the end fewer and fewer run, and a step reads the weights for them all the same.
    """
    free = [0] * batch  # a heap: the step from which each place is free
    covered: dict[int, int] = {}  # the step up to which an adapter's reads are counted
    read = 0
    for request in requests:
        begins = free[0]  # never before the request in front of it
        ends = begins + request.output_tokens
        heapq.heapreplace(free, ends)
        adapter = request.adapter
        if adapter is not None and ends > (since := max(begins, covered.get(adapter, 0))):
            read += (ends - since) * adapter_bytes.get(adapter, 0)
            covered[adapter] = ends
    return max(free), read


def _contexts(request: BenchRequest) -> int:
    """Tokens of KV that all decode steps of a request read together."""
    steps = request.output_tokens
    return steps * request.input_tokens + steps * (steps - 1) // 2

"""Shrinks beside multiplies: which work is ordered after which, on streams that only keep a record.

`torch.cuda`'s streams and events are replaced by ones that pass on what happened before what, and
every kernel by an entry of what it reads and writes. Two entries that touch the same buffer, one of
them writing, must be ordered: by the stream they share, or by events.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from multilora_cli.layers import linear
from multilora_cli.layers.context import StepContext
from multilora_cli.layers.linear import LoraLinear
from multilora_kernels import add_lora, lora_choice, side_stream, work_lists
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.layout import GROUPS
from multilora_kernels.lora_choice import GroupShape
from multilora_kernels.rows import Rows
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from tests.kernels.lora_cases import SHAPES, small_fleet

LAYERS = 2
Clock = dict[int, int]  # by stream: how many of its entries happened before


@dataclass(frozen=True)
class Work:
    """One launch: the stream it is on, its number there, and all that happened before."""

    name: str
    stream: int
    number: int
    before: Mapping[int, int]
    reads: frozenset[str]
    writes: frozenset[str]

    def follows(self, other: "Work") -> bool:
        """Whether `other` has ended when this begins."""
        return self.before.get(other.stream, 0) >= other.number

    def conflicts(self, other: "Work") -> bool:
        """Whether it matters which one comes first."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass
class Stream:
    """What was launched on a stream, and what must have ended before the next launch."""

    number: int
    device: torch.device
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Clock:
        """All that was launched here so far, and all that it followed."""
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        """What is launched here from now on follows the event."""
        for stream, number in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)

    def wait_stream(self, other: "Stream") -> None:
        """What is launched here from now on follows what was launched there."""
        self.wait_event(other.clock)


class Record:
    """The launches of a step, and torch's notion of the current stream."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.streams = [Stream(0, self.device)]
        self.current = self.streams[0]
        self.priorities: list[int] = []
        self.work: list[Work] = []

    def new_stream(self, device: torch.device, priority: int = 0) -> Stream:
        """As torch.cuda.Stream; lower numbers go first."""
        self.priorities.append(priority)
        self.streams.append(Stream(len(self.streams), device))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, name: str, reads: set[str], writes: set[str]) -> None:
        """One kernel on the current stream."""
        clock, stream = self.current.clock, self.current.number
        before = dict(clock)
        clock[stream] = clock.get(stream, 0) + 1
        entry = Work(name, stream, clock[stream], before, frozenset(reads), frozenset(writes))
        self.work.append(entry)

    def races(self) -> list[tuple[str, str]]:
        """Pairs that touch the same buffer in an order that nothing settles."""
        return [
            (first.name, second.name)
            for i, second in enumerate(self.work)
            for first in self.work[:i]
            if second.conflicts(first) and not second.follows(first)
        ]


class NamedWeight:
    """Reads the rows, writes a new y."""

    scaling = None
    nbytes = 0

    def __init__(self, record: Record, group: str, size_out: int) -> None:
        self.record, self.group, self.size_out = record, group, size_out

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Of the right shape, and nothing in it."""
        self.record.launch(f"multiply {self.group}", {"x"}, {"y", f"counters {self.group}"})
        return torch.zeros(len(rows.x), self.size_out)

    def dequantise(self) -> torch.Tensor:
        """Never asked for."""
        raise NotImplementedError


class NoKernel:
    """Launched, it does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **options: None


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    made = Record()
    monkeypatch.setattr(side_stream.torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(side_stream.torch.cuda, "stream", made.on)
    monkeypatch.setattr(side_stream.torch.cuda, "current_stream", lambda device: made.current)

    def shrink(*_: Any) -> torch.Tensor:
        made.launch("shrink", {"x"}, {"planes"})
        return torch.zeros(0)

    def expand(*_: Any) -> None:
        made.launch("expand", {"planes", "y"}, {"y"})

    monkeypatch.setattr(work_lists, "write_lists_kernel", NoKernel())
    monkeypatch.setattr(add_lora, "on_host", lambda device: False)
    monkeypatch.setattr(add_lora, "sgmv_shrink", shrink)
    monkeypatch.setattr(add_lora, "sgmv_expand", expand)
    monkeypatch.setattr(linear, "scale_shift", lambda *_: None)
    return made


def run_step(record: Record, chip: Chip, side: SideStream | None, rows: int = 4) -> None:
    """All groups of two layers, each reading what the kernel before it made of the last one's y."""
    fleet = small_fleet(torch.float32, seed=1, ranks=(8, 16))
    segments = Segments(
        rows, "cpu", choose=lambda shape, tokens, _: lora_choice.choose(shape, tokens, chip)
    )
    segments.prepare_capture(fleet.table, rows, 16, np.arange(rows) % 3)
    nothing = torch.zeros(0, dtype=torch.int32)
    attention = AttentionBatch(nothing, nothing, nothing, rows, 1, 16)
    context = StepContext(fleet.pool, nothing, attention, fleet.table, segments, side=side)
    for layer in range(LAYERS):
        for group, modules in GROUPS.items():
            size_out = sum(SHAPES[module][1] for module in modules)
            x = torch.zeros(rows, SHAPES[modules[0]][0])
            record.launch("between", {"y"}, {"x"})
            projection = LoraLinear(NamedWeight(record, group, size_out), layer, group)
            projection(Rows(x), context)


@pytest.mark.parametrize(("rows", "priority"), [(1, -1), (16, 0)])
def test_a_shrink_runs_beside_the_multiply_and_races_with_nothing(
    record: Record, rows: int, priority: int
) -> None:
    run_step(record, H200, SideStream(record.device), rows)
    assert record.races() == []
    names = [work.name.split()[0] for work in record.work]
    # The multiply first: behind a shrink a library's multiply waits for whole multiprocessors.
    assert names == ["between", "multiply", "shrink", "expand"] * (LAYERS * len(GROUPS))
    for before, multiply, shrink, expand in zip(*[iter(record.work)] * 4, strict=True):
        assert not shrink.follows(multiply) and not multiply.follows(shrink)
        assert shrink.follows(before) and expand.follows(shrink) and expand.follows(multiply)
    assert record.priorities == [priority]


def test_side_work_that_fails_is_joined_all_the_same(record: Record) -> None:
    """A capture cannot be ended while a stream that was forked off is not joined, and torch's
    allocator then takes it to go on for ever."""

    def fails() -> None:
        record.launch("shrink", {"x"}, {"planes"})
        raise torch.OutOfMemoryError("CUDA out of memory")

    main = record.current
    with pytest.raises(torch.OutOfMemoryError):
        SideStream(record.device).beside(lambda: None, fails, 0)
    record.launch("what comes next", {"planes"}, set())
    shrink, last = record.work
    assert record.current is main and last.follows(shrink)


@pytest.mark.parametrize("lost", ["wait_event", "wait_stream"])
def test_a_missing_fork_or_join_would_be_found(
    record: Record, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = SideStream(record.device)
    monkeypatch.setattr(Stream, lost, lambda *_: None)
    run_step(record, H200, side)
    assert record.races()


@pytest.mark.parametrize(("chip", "captured"), [(RTX_4090, True), (H200, False)])
def test_elsewhere_and_in_eager_steps_all_is_on_one_stream(
    record: Record, chip: Chip, captured: bool
) -> None:
    run_step(record, chip, SideStream(record.device) if captured else None)
    assert {work.stream for work in record.work} == {0} and record.races() == []
    assert len(record.work) == 4 * LAYERS * len(GROUPS)


def test_prefill_never_forks() -> None:
    shape = GroupShape("o", 4096, (4096,), 2, 8192)
    rows = (1, 4, 64, lora_choice.DECODE_TOKENS, lora_choice.DECODE_TOKENS + 1, 8192)
    chosen = [lora_choice.choose(shape, count, H200).side_priority for count in rows]
    assert chosen == [-1, -1, 0, 0, None, None]

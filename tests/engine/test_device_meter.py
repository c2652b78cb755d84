"""The books of a start, on a device that is made up."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch

from multilora_cli.engine.decode_graphs import Captured, GraphMemory
from multilora_cli.engine.device_meter import DeviceMeter, settled_bytes

CARD = torch.device("cuda", 0)


class Device:
    """A card of 1000 bytes; somebody else has 50 of them, and this process' context takes 100.

    torch keeps what it was asked for in tens, until its cache is emptied.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak = self.peak_reserved = self.outside = 0
        self.has_context = False
        self.emptied = 0
        replaced = {
            "synchronize": lambda _: setattr(self, "has_context", True),
            "empty_cache": self.empty_cache,
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.reserved,
            "max_memory_reserved": lambda _: self.peak_reserved,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: self.reset(),
            "mem_get_info": lambda _: (1000 - self.used, 1000),
            "device_memory_used": lambda _: self.used,
            "graph_pool_handle": lambda: (0, 1),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function, raising=False)

    @property
    def used(self) -> int:
        return 50 + self.reserved + (100 + self.outside if self.has_context else 0)

    def reset(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = -(-self.allocated // 10) * 10

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, -(-self.allocated // 10) * 10)
        self.peak = max(self.peak, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def test_every_part_is_counted_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    meter = DeviceMeter(CARD)
    with meter.part("weights"):
        device.allocate(300)
    with meter.part("pool"):
        device.allocate(201)
    with meter.peak("workspace"):
        device.allocate(65)
        device.allocate(-65)
        device.allocate(40)
        device.allocate(-40)
    assert meter.parts == {"weights": 300, "pool": 201, "workspace": 65}
    assert meter.kept == 570, "501 and 65, in tens"
    device.outside = 7
    assert meter.outside() == 107, "what others have is theirs"


def test_a_second_engine_of_a_process_does_not_say_what_the_context_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one's memory is given back at some time: minus 35 GB were recorded so."""
    device = Device(monkeypatch)
    DeviceMeter(CARD)
    device.has_context = True
    device.allocate(300)
    second = DeviceMeter(CARD)
    device.allocate(-300)
    device.empty_cache()
    with second.part("pool"):
        device.allocate(201)
    assert second.parts == {"pool": 201} and second.outside() is None


def test_a_captured_step_is_counted_by_torch_and_by_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ran before a step leaves a reserve that is not the graphs', and stays where it is: to
    empty the cache for each of 57 captures took half of their time."""
    device = Device(monkeypatch)
    device.allocate(90)
    device.allocate(-90)
    memory = GraphMemory(CARD)
    assert device.reserved == 0, "the reserve of the start makes room for graphs"
    captured: list[Callable[[], None]] = []

    def capture(work: Callable[[], None]) -> Captured:
        captured.append(work)
        device.allocated += 20  # from a pool of its own
        device.reserved += 20
        device.outside += 3
        return captured  # type: ignore[return-value]

    monkeypatch.setattr(memory, "_capture", capture)
    for _ in range(2):
        device.allocate(30)
        device.allocate(-30)
        memory.record(lambda: None)
    assert (memory.pool_bytes, memory.driver_bytes, len(captured)) == (40, 6, 2)
    assert device.emptied == 1
    assert settled_bytes(CARD) == (40, 50 + 100 + 6)


class Graph:
    """As torch.cuda.CUDAGraph: says what is done with it."""

    said: ClassVar[list[str]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.said.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.said.append("end")


def test_a_capture_that_fails_is_ended_on_the_stream_it_was_begun_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(Graph, "said", said := [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "side")

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        said.append(name)
        try:
            yield
        finally:
            said.append(f"leave {name}")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    memory = GraphMemory(CARD)
    assert isinstance(memory.record(lambda: said.append("work")), Graph)
    whole = ["side", "begin (0, 1) thread_local", "work", "end", "leave side"]
    assert said == whole

    def fails() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        memory.record(fails)
    assert said[len(whole) :] == [part for part in whole if part != "work"]
    assert device.emptied == 1


def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of an engine that was let go of lie in cycles, and to destroy one is a call that
    spoils a capture. They go before the first one, and what is left then waits."""
    Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "side")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(Graph, "said", said := [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    class Old:
        """Of an engine before: a cycle."""

        def __init__(self) -> None:
            self.me = self
            weakref.finalize(self, said.append, "destroyed")

    Old()
    memory = GraphMemory(CARD)
    assert said == ["destroyed"]
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        memory.record(lambda: [Old() for _ in range(9)].clear())
    finally:
        gc.set_threshold(*thresholds)
    assert said[1:3] == ["begin (0, 1) thread_local", "end"] and gc.isenabled()
    gc.collect()
    assert said.count("destroyed") == 10


def test_without_nvml_what_lies_outside_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)

    def silent(_: object) -> int:
        raise RuntimeError("no NVML here")

    monkeypatch.setattr(torch.cuda, "device_memory_used", silent)
    assert DeviceMeter(CARD).outside() is None


def test_a_cpu_is_not_measured() -> None:
    meter = DeviceMeter(torch.device("cpu"))
    with meter.part("weights"), meter.peak("workspace"):
        torch.zeros(10)
    assert meter.parts == {} and meter.outside() is None

"""The meter's arithmetic, on a device that is made up."""

import pytest
import torch

from tests.device_meter import DeviceMeter


class Device:
    """A card of 1000 bytes whose context takes 100."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak = self.outside = 0
        replaced = {
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.reserved,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: setattr(self, "peak", self.allocated),
            "mem_get_info": lambda _: (1000 - 100 - self.reserved - self.outside, 1000),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)


def test_parts_by_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    meter = DeviceMeter(torch.device("cuda", 0))
    device.allocate(300)
    meter.note("weights")
    device.allocate(200)
    meter.note("pool")
    device.outside = 40  # a graph is the driver's
    meter.note_driver("graphs")
    with meter.peak("workspace"):
        device.allocate(70)
        device.allocate(-70)
    with meter.peak("workspace"):
        device.allocate(50)
        device.allocate(-50)
    assert meter.parts == {"weights": 300, "pool": 200, "graphs": 40, "workspace": 70}
    device.outside = 0
    meter.note_context()
    assert meter.parts["context"] == 100


def test_a_cpu_is_not_measured() -> None:
    meter = DeviceMeter(torch.device("cpu"))
    meter.note("weights")
    meter.note_driver("graphs")
    meter.note_context()
    with meter.peak("workspace"):
        torch.zeros(10)
    assert meter.parts == {}

"""The chip that launches are chosen for, and small sums that every launch needs."""

from functools import lru_cache
from typing import TYPE_CHECKING

import triton

from multilora_kernels.chip import H200, RTX_4090, Chip, tuned_table

if TYPE_CHECKING:
    import torch

__all__ = [
    "H200",
    "RTX_4090",
    "Chip",
    "cdiv",
    "chip_for",
    "chip_of",
    "force_chip",
    "next_power_of_2",
    "on_host",
    "tuned_table",
]

_forced: list[Chip] = []


def force_chip(chip: Chip | None) -> None:
    """Make every launch choice for `chip` instead of the device's own; None undoes it.

    Exists for tests and benchmarks that run one card's choices on another.
    """
    _forced.clear()
    chip_of.cache_clear()
    if chip is not None:
        _forced.append(chip)


@lru_cache(maxsize=16)
def chip_of(device_index: int) -> Chip:
    """The chip of CUDA device `device_index` (or the forced one)."""
    if _forced:
        return _forced[0]
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    return Chip(
        properties.name, properties.major * 10 + properties.minor, properties.multi_processor_count
    )


def chip_for(device: "torch.device") -> Chip:
    """The chip launches on `device` are chosen for; a small one for the interpreter's CPU."""
    return Chip("", 80, 4) if device.type == "cpu" else chip_of(device.index or 0)


def on_host(device: "torch.device") -> bool:
    """Whether tensors on `device` take a kernel's torch path: a CPU without the interpreter."""
    return device.type == "cpu" and not triton.knobs.runtime.interpret


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes 4 us a call on the host, once or twice a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, a positive integer."""
    return 1 << (n - 1).bit_length()

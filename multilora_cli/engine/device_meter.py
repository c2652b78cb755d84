"""What the engine takes of a device, part by part: torch's books, and the driver's beside them.

    meter = DeviceMeter(device)       # before this process has a context there
    with meter.part("weights"):       # what stays allocated
        ...
    with meter.peak("workspace"):     # what there is at once in between
        ...
    meter.parts, meter.kept, meter.outside()

On a CPU nothing is measured: the parts stay empty.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pynvml
import torch


class DeviceMeter:
    """Bytes of one device by part. One per start, on one thread."""

    def __init__(self, device: torch.device) -> None:
        self.parts: dict[str, int] = {}
        self.kept = 0  # the most that torch kept during `peak`, reserves included
        self._device = device if device.type == "cuda" else None
        # A second engine's meter cannot tell the process's context from what others use.
        self._others = None if self._read(torch.cuda.max_memory_reserved) else _used(device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What tensors hold after the block beyond what they held before it."""
        before = self._read(torch.cuda.memory_allocated)
        yield
        self._note(name, self._read(torch.cuda.memory_allocated) - before)

    @contextmanager
    def peak(self, name: str) -> Iterator[None]:
        """The most that tensors hold at once within the block beyond what they held before it."""
        if self._device is None:
            yield
            return
        settled_bytes(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        self._note(name, torch.cuda.max_memory_allocated(self._device) - before)
        self.kept = max(self.kept, torch.cuda.max_memory_reserved(self._device))

    def outside(self) -> int | None:
        """What the driver counts for this process beside torch's books: context, kernels, graphs.

        By NVML's count of the whole card, from before this process came to it: wrong by what
        others took or gave back meanwhile. None where NVML does not tell, and in a process that had
        an engine before.
        """
        if self._device is None or self._others is None:
            return None
        torch.cuda.synchronize(self._device)
        used = _used(self._device)
        if used is None:
            return None
        return used - self._others - torch.cuda.memory_reserved(self._device)

    def _note(self, name: str, size: int) -> None:
        if self._device is not None:
            self.parts[name] = self.parts.get(name, 0) + size

    def _read(self, book: Callable[[torch.device], int]) -> int:
        return 0 if self._device is None else book(self._device)


def settled_bytes(device: torch.device) -> tuple[int, int]:
    """What torch keeps of a CUDA device once nothing runs and no reserve is left; and what else is
    in use there, whoever uses it."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return kept_bytes(device)


def kept_bytes(device: torch.device) -> tuple[int, int]:
    """The same as it is now, reserves included."""
    kept = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return kept, total - free - kept


def _used(device: torch.device) -> int | None:
    """Bytes in use on the card, by NVML, which needs no context; None where it does not tell."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.device_memory_used(device)
    except (RuntimeError, pynvml.NVMLError):  # as in some containers, and with MIG
        return None

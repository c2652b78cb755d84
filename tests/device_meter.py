"""What a start really took of the device: torch's own books and the driver's, part by part.

    meter = DeviceMeter(device)          # before anything is allocated
    decoder = load_decoder(...)
    meter.note("weights")
    ...
    with meter.peak("workspace"):        # a step at the configured limits
        runner.run(...)
    allocated = meter.parts              # beside plan.parts(), for sizing.device.deviations

On a CPU nothing is measured: the parts stay empty.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceMeter:
    """Bytes of one device by part, in the order of the calls. One per start, on one thread."""

    def __init__(self, device: torch.device) -> None:
        self.parts: dict[str, int] = {}
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.synchronize(self._device)  # makes the context, if there is none yet
        self._before = self._allocated()
        self._free_before = self._free()

    def note(self, part: str) -> None:
        """What torch allocated and kept since the last call belongs to `part`."""
        if self._device is None:
            return
        after = self._allocated()
        self._add(part, after - self._before)
        self._before, self._free_before = after, self._free()

    def note_driver(self, part: str) -> None:
        """The same by the driver's count, for what torch's books leave out: captured graphs."""
        if self._device is None:
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = self._free()
        self._add(part, self._free_before - free)
        self._before, self._free_before = self._allocated(), free

    @contextmanager
    def peak(self, part: str) -> Iterator[None]:
        """The most that was allocated within the block beyond what was there before it."""
        if self._device is None:
            yield
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self._allocated()
        yield
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        self.parts[part] = max(self.parts.get(part, 0), peak)

    def note_context(self, part: str = "context") -> None:
        """What this process takes beside torch's books: CUDA context, kernels, libraries.

        Counted as all that is in use on the device, so right only where nobody else is there.
        """
        if self._device is None:
            return
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        self.parts[part] = total - free - torch.cuda.memory_reserved(self._device)

    def _add(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size

    def _allocated(self) -> int:
        return 0 if self._device is None else torch.cuda.memory_allocated(self._device)

    def _free(self) -> int:
        return 0 if self._device is None else torch.cuda.mem_get_info(self._device)[0]

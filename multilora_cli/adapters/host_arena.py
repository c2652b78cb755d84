"""Host memory for adapter images: page-locked slabs on a GPU machine, plain blocks on a CPU.

Pinning is slow (84 MiB take 48 ms) and blocks the device, so slabs are pinned in large pieces, at
start where asked, and kept; images take runs of bytes in them. Slabs have the sizes that torch
page-locks, powers of two: one of 336 MB would take 512 MiB, and the budget would not know. Without
pinning every image has a block of its own, which goes back to the system with it.
"""

from bisect import insort
from dataclasses import dataclass, field

import torch

from multilora_cli.sizing.host_slabs import ALIGNMENT, SLAB_BYTES, aligned, slab_for, whole_slab


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in one slab."""

    slab: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Slab:
    memory: torch.Tensor  # uint8 [size]
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, nbytes), sorted, merged

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.memory.numel())]


class HostArena:
    """Gives out contiguous blocks within `budget_bytes`. Not thread-safe: its owner locks."""

    def __init__(self, budget_bytes: int, pin: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._pin = pin
        self._slab_bytes = slab_bytes
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        self._has_dropped = False  # pinned slabs, which torch keeps until it is told

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the system, given out or not."""
        return sum(slab.memory.numel() for slab in self._slabs.values())

    @property
    def free_bytes(self) -> int:
        """Bytes in slabs that are not given out."""
        return sum(size for slab in self._slabs.values() for _, size in slab.free)

    def prepare(self, num_bytes: int) -> None:
        """Pin slabs ahead of use until `num_bytes` (at most the budget) are held, but for a rest of
        less than an eighth, which would lie in slivers."""
        wanted = min(num_bytes, self.budget_bytes)
        while self._pin and self.reserved_bytes < wanted:
            size = whole_slab(self.budget_bytes - self.reserved_bytes, self._slab_bytes)
            if size < max(ALIGNMENT, wanted // 8):
                return
            self.add(self.make(size))

    def allocate(self, num_bytes: int) -> Extent | None:
        """A run of at least `num_bytes`, in a new slab if need be; None when there is no room."""
        extent = self.take(num_bytes)
        if extent is None and (size := self.room_for(num_bytes)) is not None:
            self.add(self.make(size))
            extent = self.take(num_bytes)
        return extent

    def take(self, num_bytes: int) -> Extent | None:
        """A run of at least `num_bytes` in the slabs there are; None when none is long enough."""
        size = aligned(num_bytes)
        fit = min(
            (
                (run, index, offset)
                for index, slab in self._slabs.items()
                for offset, run in slab.free
                if run >= size
            ),
            default=None,
        )
        if fit is None:
            return None
        run, index, offset = fit
        slab = self._slabs[index]
        slab.free.remove((offset, run))
        if run > size:
            insort(slab.free, (offset + size, run - size))
        return Extent(index, offset, size)

    def room_for(self, num_bytes: int) -> int | None:
        """Bytes of a new slab that holds `num_bytes`, for which unused ones make room; None: the
        budget has none."""
        room, wanted = self.budget_bytes - self.reserved_bytes, aligned(num_bytes)
        if self._pin:
            wanted = slab_for(num_bytes, room, self.budget_bytes, self._slab_bytes)
        unused = [index for index, slab in self._slabs.items() if slab.is_unused]
        if room + sum(self._slabs[index].memory.numel() for index in unused) < wanted:
            return None  # they would be dropped, and pinned again, for nothing
        for index in unused:
            if room >= wanted:
                break
            room += self._slabs.pop(index).memory.numel()
            self._has_dropped = self._pin
        return wanted

    def make(self, num_bytes: int) -> torch.Tensor:
        """Memory for a slab, which is not part of the arena yet. Takes 0.15 s for 256 MiB that are
        pinned, and touches no slab here: one caller at a time, which needs no other lock."""
        if self._has_dropped:
            self._has_dropped = False
            _give_back_locked()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin)

    def add(self, memory: torch.Tensor) -> None:
        """Make a slab of `memory`."""
        index, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[index] = _Slab(memory, [(0, memory.numel())])

    def view(self, extent: Extent) -> torch.Tensor:
        """The bytes of `extent`: uint8 [extent.nbytes]."""
        return self._slabs[extent.slab].memory[extent.offset : extent.offset + extent.nbytes]

    def release(self, extent: Extent) -> None:
        """Give a run back; an unused block that is not pinned returns to the system."""
        slab = self._slabs[extent.slab]
        start, end = extent.offset, extent.offset + extent.nbytes
        for offset, run in list(slab.free):
            if offset + run == start:
                slab.free.remove((offset, run))
                start = offset
            elif offset == end:
                slab.free.remove((offset, run))
                end = offset + run
        insort(slab.free, (start, end - start))
        if not self._pin and slab.is_unused:
            del self._slabs[extent.slab]

    def check_integrity(self, extents: list[Extent]) -> None:
        """The given extents and the free runs cover every slab exactly. Raises ValueError."""
        for index, slab in self._slabs.items():
            used = [(e.offset, e.nbytes) for e in extents if e.slab == index]
            position = 0
            for offset, run in sorted(used + slab.free):
                if offset != position:
                    raise ValueError(f"slab {index}: byte {position} is held twice or by nobody")
                position = offset + run
            if position != slab.memory.numel():
                raise ValueError(f"slab {index}: {position} of {slab.memory.numel()} bytes known")
        if any(extent.slab not in self._slabs for extent in extents):
            raise ValueError("an extent lies in a slab that is gone")


def _give_back_locked() -> None:
    """Let torch return to the system what it keeps page-locked and nobody uses."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # torch 2.11, which calls it itself before every capture
        torch._C._host_emptyCache()

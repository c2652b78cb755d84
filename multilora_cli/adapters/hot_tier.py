"""Where hot adapters lie: their slot in the table, their pages in the pool, copies on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from multilora_cli.memory.eviction import EvictionSource, Evictor
from multilora_cli.memory.fences import FenceQueue, StepClock
from multilora_cli.memory.page_pool import IntegrityError, PagePool, PageUse
from multilora_kernels.layout import ImagePlan

if TYPE_CHECKING:
    import torch


class Table(Protocol):
    """slot -> blocks on the device (multilora_kernels.table.AdapterTable)."""

    def can_hold(self, plan: ImagePlan) -> bool: ...
    def set(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None: ...
    def clear(self, slot: int) -> None: ...
    def flush(self) -> None: ...


class Image(Protocol):
    """A warm adapter: its bytes in kernel layout in host memory."""

    @property
    def plan(self) -> ImagePlan: ...
    @property
    def pages(self) -> "torch.Tensor": ...


# A step may begin behind copies of so many bytes: 64 MiB take 1.2 ms over PCIe 5, and run beside
# the step before it where the loop is one step ahead. More would be felt between tokens.
_AHEAD_BYTES = 64 * 2**20


class Copy(Protocol):
    """A copy to the device that was started."""

    def done(self) -> bool: ...
    def order(self) -> bool:
        """Let the steps launched from now on come after it; False: it has not begun."""
        ...


class Copier(Protocol):
    """Starts copies of images into pages, off the step stream."""

    def start(self, image: Image, pages: Sequence[int]) -> Copy: ...


@dataclass(slots=True)
class Placement:
    """One adapter's place on the device."""

    slot: int
    pages: list[int]
    plan: ImagePlan
    copy: Copy


class HotTier:
    """Takes and gives back slots and pages together. Slot 0 is the base and never given out."""

    def __init__(
        self, pool: PagePool, evictor: Evictor, table: Table, copier: Copier, num_slots: int
    ) -> None:
        self._pool = pool
        self._evictor = evictor
        self._table = table
        self._copier = copier
        self.num_slots = num_slots - 1
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._fenced_slots: FenceQueue[int] = FenceQueue(pool.clock)
        self._changed = False
        self._under_way: list[Placement] = []  # copies that were not done when last seen

    @property
    def page_limit(self) -> int:
        """Pages that all adapters together may take."""
        return self._evictor.adapter_limit

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot can be taken now."""
        return bool(self._free_slots)

    def make_room(self, plan: ImagePlan, order: int, idle: EvictionSource) -> bool:
        """Evict until `plan` has a slot and pages; False: not now, and nothing left in vain.

        What was given back while a step runs counts: `start` waits until that step has ended.
        """
        if not self._slot_for(plan) and idle.cheapest(order) is None:
            return False
        self._evictor.make_room(plan.num_pages, PageUse.ADAPTER, order)
        if self.pages_short(plan):
            return False
        while not self._slot_for(plan) and idle.cheapest(order) is not None:
            idle.evict_cheapest(order)
        return self._slot_for(plan)

    def pages_short(self, plan: ImagePlan) -> int:
        """Pages that would have to be given back for `plan`."""
        free = self._pool.available(PageUse.KV)
        over = self._pool.count(PageUse.ADAPTER) + plan.num_pages - self.page_limit
        return max(plan.num_pages - free, over, 0)

    def has_room(self, plan: ImagePlan) -> bool:
        """Whether `plan` has a slot and pages."""
        return self._slot_for(plan) and not self.pages_short(plan)

    def fits_table(self, plan: ImagePlan) -> bool:
        """Whether the table has entries left for `plan`."""
        return self._table.can_hold(plan)

    def start(self, image: Image) -> Placement:
        """Take what `make_room` found and start the copy, now or once the steps under way, which
        may still read what was there, have ended. Taken at once, or growing sequences would take
        it first, step after step."""
        self._free_slots += self._fenced_slots.take_past()
        count = image.plan.num_pages
        is_free = bool(self._free_slots) and self._pool.available(PageUse.ADAPTER) >= count
        slot = self._free_slots.pop() if self._free_slots else self._fenced_slots.take_oldest(1)[0]
        pages = self._pool.allocate(count, PageUse.ADAPTER, fenced=True)
        begin = partial(self._copier.start, image, pages)
        copy = begin() if is_free else _LateCopy(self._pool.clock, begin)
        placement = Placement(slot, pages, image.plan, copy)
        self._under_way.append(placement)
        return placement

    def enter(self, placement: Placement) -> bool:
        """Let the slot stand for the adapter from the next step on; False: not yet.

        The copy is done, or the step will wait for it on the device. The image must stay until it
        is done either way.
        """
        if not placement.copy.done() and not (self._is_soon() and placement.copy.order()):
            return False
        self._table.set(placement.slot, placement.plan, placement.pages)
        self._changed = True
        return True

    def drop(self, placement: Placement) -> None:
        """Give slot and pages back, behind the steps that may still read them."""
        self._table.clear(placement.slot)
        self._changed = True
        self._pool.free(placement.pages)
        self._fenced_slots.put([placement.slot])

    def flush(self) -> None:
        """Bring the table to the device; between steps only."""
        if self._changed:
            self._table.flush()
            self._changed = False

    def check_integrity(self, placements: Sequence[Placement]) -> None:
        """Slots and pages of `placements` and the free ones are disjoint and complete."""
        slots = [p.slot for p in placements] + self._free_slots + list(self._fenced_slots)
        if sorted(slots) != list(range(1, self.num_slots + 1)):
            raise IntegrityError(f"slots are {sorted(slots)}, expected 1..{self.num_slots} once")
        pages = [page for placement in placements for page in placement.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pool.count(PageUse.ADAPTER):
            raise IntegrityError(f"adapters hold {len(pages)} pages, the pool counts otherwise")
        if any(self._pool.use(page) is not PageUse.ADAPTER for page in pages):
            raise IntegrityError("an adapter holds a page that is not its own")

    def _is_soon(self) -> bool:
        """Whether the copies under way, which follow one another, are few."""
        self._under_way = [p for p in self._under_way if not p.copy.done()]
        pages = sum(len(placement.pages) for placement in self._under_way)
        return pages * self._pool.page_bytes <= _AHEAD_BYTES

    def _slot_for(self, plan: ImagePlan) -> bool:
        """Whether a slot, fenced or not, and entries of the table are free for `plan`."""
        slots = len(self._free_slots) + len(self._fenced_slots)
        return slots > 0 and self._table.can_hold(plan)


class _LateCopy:
    """A copy that begins when the steps launched before it have ended."""

    def __init__(self, clock: StepClock, begin: Callable[[], Copy]) -> None:
        self._clock = clock
        self._behind = clock.launched
        self._begin = begin
        self._copy: Copy | None = None

    def done(self) -> bool:
        """Whether it has ended; begins it when it can."""
        if self._copy is None and self._clock.completed >= self._behind:
            self._copy = self._begin()
        return self._copy is not None and self._copy.done()

    def order(self) -> bool:
        """Once it has begun."""
        return self._copy is not None and self._copy.order()

"""The warm tier: adapter images in host memory, by digest, within a byte budget.

An image is built once, however many threads ask. Held and pinned images stay; of the others the
least recently used leaves first when room is needed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from multilora_cli.adapters.host_arena import Extent, HostArena
from multilora_cli.adapters.lease import Version
from multilora_cli.adapters.residency_entry import NoHostRoom
from multilora_cli.errors import AdapterError
from multilora_cli.units import format_size
from multilora_kernels.layout import ImagePlan

Fill = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class HostImage:
    """A warm adapter: its plan, and its pages as uint8 [num_pages, page_bytes]."""

    digest: str
    plan: ImagePlan
    pages: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return self.pages.numel()


@dataclass(slots=True)
class _Entry:
    extent: Extent | None = None  # None: headers are still being read
    image: HostImage | None = None  # None: still being built
    holds: int = 1
    pinned: bool = False
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class HostCache:
    """Images by digest; every method may be called from any thread.

    Args:
        budget_bytes: what all images together may take.
        open_version: reads a version's headers; gives its plan and a function that fills pages.
        pin: page-lock the memory, for copies to a CUDA device.
    """

    def __init__(
        self,
        budget_bytes: int,
        open_version: Callable[[Version], tuple[ImagePlan, Fill]],
        *,
        pin: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._open = open_version
        self._arena = HostArena(budget_bytes, pin)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # taken before the other one, by one load at a time
        self._left: dict[str, None] = {}
        self.builds = 0
        self.evictions = 0

    def prepare(self, num_bytes: int) -> None:
        """Pin memory ahead of use: at start, where it disturbs nobody."""
        with self._lock:
            self._arena.prepare(num_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all images, those being built included."""
        with self._lock:
            return self._arena.reserved_bytes - self._arena.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no image takes; not all of them need lie together."""
        return self.budget_bytes - self.used_bytes

    def load(self, version: Version) -> HostImage:
        """The image of `version`, built if need be, and held once more.

        Raises NoHostRoom while everything else is in use, AdapterError when it cannot be built.
        """
        with self._lock:
            entry = self._entries.get(version.digest)
            is_first = entry is None
            if entry is None:
                entry = self._entries[version.digest] = _Entry()
            else:
                entry.holds += 1  # also keeps an image that is being built
                self._entries.move_to_end(version.digest)
        if is_first:
            self._build(version, entry)
        entry.ready.wait()
        if entry.error is not None:
            raise entry.error
        assert entry.image is not None
        return entry.image

    def hold(self, digest: str) -> HostImage | None:
        """The image, held once more; None: it is not there."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.image is None:
                return None
            entry.holds += 1
            self._entries.move_to_end(digest)
            return entry.image

    def release(self, digest: str) -> None:
        """Give one hold back."""
        with self._lock:
            entry = self._entries[digest]
            if entry.holds < 1:
                raise ValueError(f"image {digest[:12]} released more often than held")
            entry.holds -= 1

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep the image although nobody holds it, or no longer."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                entry.pinned = pinned

    def drop(self, digest: str) -> int:
        """Forget an image that nobody holds, pinned or not; the bytes freed."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.holds or entry.image is None:
                return 0
            return self._remove(digest)

    def nbytes(self, digest: str) -> int:
        """Bytes of the image; 0: it is not there."""
        with self._lock:
            entry = self._entries.get(digest)
            return 0 if entry is None or entry.image is None else entry.image.nbytes

    def take_left(self) -> list[str]:
        """Digests whose images gave way to others since the last call."""
        with self._lock:
            left, self._left = self._left, {}
            return list(left)

    def check_integrity(self) -> None:
        """Every byte has one owner and the budget is kept. Raises ValueError."""
        with self._lock:
            extents = [entry.extent for entry in self._entries.values() if entry.extent]
            self._arena.check_integrity(extents)
            if self._arena.reserved_bytes > self.budget_bytes:
                raise ValueError("more host memory is reserved than the budget allows")
            if any(entry.holds < 0 for entry in self._entries.values()):
                raise ValueError("an image is held a negative number of times")

    def _build(self, version: Version, entry: _Entry) -> None:
        """Fill `entry`; an error goes to everybody who waits, and leaves nothing behind."""
        try:
            plan, fill = self._open(version)
            num_bytes = plan.num_pages * plan.page_bytes
            pages = self._make_room(version, entry, num_bytes)
            pages = pages.view(plan.num_pages, plan.page_bytes)
            fill(pages)
        except BaseException as error:
            with self._lock:
                entry.error = error
                self._remove(version.digest)
        else:
            with self._lock:
                entry.image = HostImage(version.digest, plan, pages)
                self.builds += 1
        entry.ready.set()

    def _make_room(self, version: Version, entry: _Entry, num_bytes: int) -> torch.Tensor:
        """Give `entry` memory, uint8 [num_bytes]: what is free, what a new slab has, or what other
        images leave. A slab is pinned outside the lock, which the step thread takes too."""
        if num_bytes > self.budget_bytes:
            raise AdapterError(
                f"adapter {version.name}: its image takes {format_size(num_bytes)},"
                f" memory.host_adapters is {format_size(self.budget_bytes)}",
                reason="too_large",
            )
        with self._growing:
            while True:
                with self._lock:
                    extent = self._arena.take(num_bytes)
                    if extent is not None:
                        entry.extent = extent
                        return self._arena.view(extent)[:num_bytes]
                    slab_bytes = self._arena.room_for(num_bytes)
                    if slab_bytes is None:
                        self._evict_one(version, num_bytes)
                        continue
                memory = self._arena.make(slab_bytes)
                with self._lock:
                    self._arena.add(memory)

    def _evict_one(self, version: Version, num_bytes: int) -> None:
        victim = next((d for d, e in self._entries.items() if not e.holds and not e.pinned), None)
        if victim is None:
            raise NoHostRoom(f"{format_size(num_bytes)} for adapter {version.name}")
        self._remove(victim)
        self._left[victim] = None
        self.evictions += 1

    def _remove(self, digest: str) -> int:
        entry = self._entries.pop(digest)
        if entry.extent is not None:
            self._arena.release(entry.extent)
        return 0 if entry.image is None else entry.image.nbytes

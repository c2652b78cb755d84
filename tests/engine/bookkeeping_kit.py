"""Residency and scheduler without torch: images of pages only, loads that end on order."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from multilora_cli.adapters.hot_tier import HotTier
from multilora_cli.adapters.lease import Version
from multilora_cli.adapters.residency import Residency
from multilora_cli.adapters.residency_entry import NoHostRoom
from multilora_cli.errors import AdapterError
from multilora_cli.memory.eviction import EvictionRule, Evictor
from multilora_cli.memory.fences import StepClock
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.page_pool import PagePool
from multilora_cli.memory.prefix_cache import PrefixCache
from multilora_kernels.layout import ImagePlan

PAGE = 64


@dataclass(frozen=True)
class FakeVersion:
    """An adapter by its digest; `pages` is its size."""

    digest: str
    pages: int
    name: str = "fake"
    path: str = ""
    files: tuple[tuple[int, int, int, int, int], ...] = ()


@dataclass(frozen=True)
class FakeImage:
    """An image that is only a number of pages."""

    digest: str
    plan: ImagePlan
    pages: None = None


class LateExecutor(Executor):
    """Runs what was submitted when told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a job."""
        future: Future[Any] = Future()
        self.jobs.append((future, fn, args))
        return future

    def run_one(self, choose: random.Random) -> None:
        """Finish one job, any of those queued."""
        if self.jobs:
            future, fn, args = self.jobs.pop(choose.randrange(len(self.jobs)))
            try:
                future.set_result(fn(*args))
            except Exception as error:
                future.set_exception(error)


class FakeWarm:
    """Host images within a budget of pages; `broken` digests fail to load."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.images: dict[str, FakeImage] = {}
        self.holds: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.broken: set[str] = set()
        self.loading: set[str] = set()
        self.left: list[str] = []
        self.loads = 0

    def load(self, version: Version) -> FakeImage:
        """As HostCache: LRU makes room, held and pinned stay."""
        assert isinstance(version, FakeVersion)
        digest = version.digest
        if digest in self.broken:
            raise AdapterError(f"{digest} is broken")
        if digest not in self.images:
            while sum(i.plan.num_pages for i in self.images.values()) + version.pages > self.budget:
                idle = [d for d in self.images if not self.holds.get(d) and d not in self.pinned]
                if not idle:
                    raise NoHostRoom(digest)
                del self.images[idle[0]]
                self.left.append(idle[0])
            plan = ImagePlan(version.pages, PAGE, 4, (), {}, version.pages * PAGE)
            self.images[digest] = FakeImage(digest, plan)
            self.loads += 1
        self.holds[digest] = self.holds.get(digest, 0) + 1
        return self.images[digest]

    def hold(self, digest: str) -> FakeImage | None:
        """The image, held once more."""
        if digest not in self.images:
            return None
        self.holds[digest] = self.holds.get(digest, 0) + 1
        return self.images[digest]

    def release(self, digest: str) -> None:
        """One hold less."""
        self.holds[digest] -= 1
        assert self.holds[digest] >= 0, "released more often than held"

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep, or no longer."""
        if pinned and digest in self.images:
            self.pinned.add(digest)
        else:
            self.pinned.discard(digest)

    def drop(self, digest: str) -> int:
        """Forget an image nobody holds."""
        if self.holds.get(digest) or digest not in self.images:
            return 0
        return self.images.pop(digest).plan.num_pages * PAGE

    def nbytes(self, digest: str) -> int:
        """Bytes of the image."""
        image = self.images.get(digest)
        return image.plan.num_pages * PAGE if image is not None else 0

    def take_left(self) -> list[str]:
        """Digests whose images gave way."""
        left, self.left = self.left, []
        return left

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no image takes."""
        return (self.budget - sum(i.plan.num_pages for i in self.images.values())) * PAGE


@dataclass
class FakeCopy:
    """A copy that ends when told to."""

    digest: str
    pages: tuple[int, ...]
    finished: bool = False
    may_precede: bool = False
    precedes_steps: bool = False

    def done(self) -> bool:
        """Whether it was told to."""
        return self.finished

    def order(self) -> bool:
        """Steps come after it, unless they are told not to wait."""
        self.precedes_steps = self.may_precede
        return self.may_precede


class FakeCopier:
    """Records which image each page holds."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[str, int]] = {}
        self.copies: list[FakeCopy] = []
        self.instant = True
        self.may_precede = False  # whether a step may be launched behind a copy

    def start(self, image: FakeImage, pages: Sequence[int]) -> FakeCopy:
        """Write the pages now, be done later unless `instant`."""
        for index, page in enumerate(pages):
            self.content[page] = (image.digest, index)
        copy = FakeCopy(image.digest, tuple(pages), self.instant, self.may_precede)
        self.copies.append(copy)
        return copy


class FakeTable:
    """slot -> pages, as the device sees it after `flush`."""

    def __init__(self) -> None:
        self.staged: dict[int, tuple[int, ...]] = {}
        self.device: dict[int, tuple[int, ...]] = {}

    def can_hold(self, plan: ImagePlan) -> bool:
        """Always."""
        return True

    def set(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None:
        """Stage a row."""
        assert slot not in self.staged, "a slot was given to two adapters"
        self.staged[slot] = tuple(pages)

    def clear(self, slot: int) -> None:
        """Stage an empty row."""
        self.staged.pop(slot, None)

    def flush(self) -> None:
        """Bring the rows to the device."""
        self.device = dict(self.staged)


@dataclass
class Books:
    """Pool, caches and residency over fakes; time is a number."""

    num_pages: int = 40
    num_slots: int = 4
    host_pages: int = 30
    kv_reserve: float = 0.25
    prefetch_bytes_per_s: int = 0
    now: float = 0.0
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, PAGE, clock=self.clock, poison=self.poison)
        rule = EvictionRule()
        self.evictor = Evictor(self.pool, rule, self.kv_reserve)
        self.prefixes = PrefixCache(self.pool, rule, lambda: self.now)
        self.kv = KVCache(self.pool, self.evictor, self.prefixes)
        self.warm = FakeWarm(self.host_pages)
        self.copier = FakeCopier()
        self.table = FakeTable()
        self.loaders = LateExecutor()
        hot = HotTier(self.pool, self.evictor, self.table, self.copier, self.num_slots)
        self.residency = Residency(
            hot, self.warm, self.loaders, rule, lambda: self.now,
            prefetch_bytes_per_s=self.prefetch_bytes_per_s,
        )  # fmt: skip
        self.residency.purge = self.prefixes.purge
        self.evictor.attach(prefixes=self.prefixes, adapters=self.residency.idle)

    def poison(self, pages: Sequence[int]) -> None:
        """A page that was given back holds nothing."""
        for page in pages:
            self.copier.content.pop(page, None)

    def is_intact(self, copy: FakeCopy) -> bool:
        """Whether its pages are still its own, and its image still in host memory."""
        placed = [self.copier.content.get(page) for page in copy.pages]
        own = placed == [(copy.digest, index) for index in range(len(copy.pages))]
        return own and self.warm.holds.get(copy.digest, 0) > 0

    def reads(self, slot: int, digest: str) -> bool:
        """Whether the device's row for `slot` leads to exactly the pages of `digest`."""
        pages = self.table.device.get(slot)
        return pages is not None and all(
            self.copier.content.get(page) == (digest, index) for index, page in enumerate(pages)
        )

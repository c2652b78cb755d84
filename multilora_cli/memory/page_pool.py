"""One device buffer cut into equal pages, which KV cache and adapters share.

Every page is in exactly one state: free, fenced (given back, perhaps still read by a step), KV,
cached (a KV prefix nobody uses at the moment), adapter, or scratch (written by padding rows).
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from multilora_cli.memory.fences import FenceQueue, StepClock


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class IntegrityError(Exception):
    """An owner's books do not add up: a bug in this program."""


class PageUse(IntEnum):
    """What a page holds."""

    FREE = 0
    FENCED = 1
    SCRATCH = 2
    KV = 3
    CACHED = 4
    ADAPTER = 5


class PoisonPages(Protocol):
    """Overwrites pages so that whoever reads them notices."""

    def __call__(self, pages: Sequence[int]) -> None: ...


class PagePool:
    """The free list and the state of every page; the bytes themselves live elsewhere.

    Page 0 is scratch. Where `poison` is given, a page is overwritten when it is given back.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        *,
        clock: StepClock | None = None,
        poison: PoisonPages | None = None,
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, found {num_pages}")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.clock = clock or StepClock()
        self._poison = poison
        self._use = [PageUse.FREE] * num_pages
        self._use[0] = PageUse.SCRATCH
        self._free = list(range(num_pages - 1, 0, -1))
        self._fenced: FenceQueue[int] = FenceQueue(self.clock)
        self._counts = dict.fromkeys(PageUse, 0)
        self._counts[PageUse.SCRATCH] = 1
        self._counts[PageUse.FREE] = num_pages - 1

    @property
    def usable(self) -> int:
        """Pages that can hold something: all but the scratch page."""
        return self.num_pages - 1

    def count(self, use: PageUse) -> int:
        """Pages in state `use`."""
        return self._counts[use]

    def use(self, page: int) -> PageUse:
        """The state of `page`."""
        return self._use[page]

    def available(self, use: PageUse) -> int:
        """Pages that `allocate(.., use)` can give now.

        KV is written on the step stream, behind every launched step, so it may take fenced pages;
        adapters are written on the copy stream and may not.
        """
        self._collect()
        fenced = len(self._fenced) if use is PageUse.KV else 0
        return len(self._free) + fenced

    def allocate(self, count: int, use: PageUse, *, fenced: bool = False) -> list[int]:
        """Take `count` pages for `use`. Raises OutOfPages and takes nothing when too few are.

        `fenced`: fenced ones too, for a writer who waits until what is launched so far has ended.
        """
        available = self.available(PageUse.KV if fenced else use)
        if count > available:
            raise OutOfPages(f"{count} pages asked for {use.name}, {available} available")
        from_free = min(count, len(self._free))
        pages = [self._free.pop() for _ in range(from_free)]
        self._counts[PageUse.FREE] -= from_free
        if from_free < count:
            pages += self._fenced.take_oldest(count - from_free)
            self._counts[PageUse.FENCED] -= count - from_free
        for page in pages:
            self._use[page] = use
        self._counts[use] += count
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give `pages` back; a page that is free already is a bug."""
        for page in pages:
            use = self._use[page]
            if use in (PageUse.FREE, PageUse.FENCED, PageUse.SCRATCH):
                raise IntegrityError(f"page {page} given back while {use.name}")
            self._counts[use] -= 1
            self._use[page] = PageUse.FENCED
        self._counts[PageUse.FENCED] += len(pages)
        if self._poison is not None and pages:
            self._poison(pages)
        self._fenced.put(pages)

    def mark(self, page: int, use: PageUse) -> None:
        """Move an owned page between KV and CACHED."""
        if {self._use[page], use} != {PageUse.KV, PageUse.CACHED}:
            raise IntegrityError(f"page {page}: {self._use[page].name} to {use.name}")
        self._counts[self._use[page]] -= 1
        self._counts[use] += 1
        self._use[page] = use

    def check_integrity(self) -> None:
        """Free, fenced, scratch and owned pages are disjoint and together all pages."""
        free, fenced = set(self._free), set(self._fenced)
        if len(free) != len(self._free) or len(fenced) != len(self._fenced) or free & fenced:
            raise IntegrityError("a page is on the free list twice")
        listed = {page for page, use in enumerate(self._use) if use is PageUse.FREE}
        waiting = {page for page, use in enumerate(self._use) if use is PageUse.FENCED}
        if listed != free or waiting != fenced:
            raise IntegrityError(f"pages {sorted(listed ^ free | waiting ^ fenced)}: wrong list")
        counts = {use: self._use.count(use) for use in PageUse}
        if counts != self._counts:
            raise IntegrityError(f"page counts are {self._counts}, expected {counts}")

    def _collect(self) -> None:
        """Move fenced pages that no step reads any more to the free list."""
        if not len(self._fenced):
            return
        past = self._fenced.take_past()
        for page in past:
            self._use[page] = PageUse.FREE
        self._free.extend(past)
        self._counts[PageUse.FENCED] -= len(past)
        self._counts[PageUse.FREE] += len(past)

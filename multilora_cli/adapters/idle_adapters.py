"""What hot adapters that nobody runs give to the evictor.

The pool is full most of the time: cached prefixes fill it. So every page that a sequence needs asks
what leaves for it, with a thousand adapters on the device. Idle ones are therefore kept in order,
and only those that changed since the last question are looked at again.
"""

from collections.abc import Callable, Iterator

from multilora_cli.adapters.residency_entry import NOBODY, Entry
from multilora_cli.memory.page_pool import IntegrityError
from multilora_cli.memory.ranked import Rank, Ranked

_WANTED = 1 << 20  # an idle adapter that somebody waits for leaves after all others


class IdleAdapters:
    """The eviction source over the placed adapters; `evict` moves one down to warm.

    Adapters that nobody waits for leave by priority and score; then those that are waited for, the
    one whose turn comes last first.
    """

    def __init__(self, evict: Callable[[Entry], None]) -> None:
        self._evict = evict
        self._changed: set[Entry] = set()
        self._unwanted: Ranked[Entry] = Ranked()
        self._wanted: Ranked[Entry] = Ranked()

    def changed(self, entry: Entry) -> None:
        """To be called after every change of state, leases, pin, priority or score."""
        self._changed.add(entry)

    def evictable_pages(self, order: int, enough: int) -> int:
        """Pages that a sequence of arrival `order` may take; counting ends at `enough`."""
        self._take_in()
        pages = self._unwanted.pages
        for entry, held in self._wanted:
            if pages >= enough:
                break
            pages += held if entry.waiting_order() > order else 0
        return pages

    def cheapest(self, order: int) -> tuple[int, float] | None:
        """(priority, score) of the adapter that would leave first."""
        entry = self._cheapest(order)
        if entry is None:
            return None
        wanted = _WANTED if entry.waiting_order() < NOBODY else 0
        return entry.priority + wanted, entry.score

    def evict_cheapest(self, order: int) -> None:
        """Let that adapter go."""
        entry = self._cheapest(order)
        if entry is not None:
            self._evict(entry)

    def check_integrity(self, placed: Iterator[Entry]) -> None:
        """Every idle adapter of `placed`, and no other, is on offer under its present rank."""
        self._take_in()
        idle = {entry for entry in placed if entry.is_idle}
        unwanted = {entry for entry in idle if entry.waiting_order() == NOBODY}
        for ranked, expected in ((self._unwanted, unwanted), (self._wanted, idle - unwanted)):
            ranks = {entry: _rank(entry) for entry in expected}
            if ranked.ranks() != ranks or ranked.pages != sum(map(_pages, expected)):
                names = sorted(entry.version.name for entry in expected)
                raise IntegrityError(f"idle adapters are not these, or not by rank: {names}")

    def _cheapest(self, order: int) -> Entry | None:
        self._take_in()
        unwanted, wanted = self._unwanted.first(), self._wanted.first()
        if unwanted is not None:
            return unwanted[0]
        return wanted[0] if wanted is not None and wanted[0].waiting_order() > order else None

    def _take_in(self) -> None:
        for entry in self._changed:
            wanted = entry.waiting_order() < NOBODY
            for ranked, fits in ((self._wanted, wanted), (self._unwanted, not wanted)):
                if fits and entry.is_idle:
                    ranked.put(entry, _rank(entry), _pages(entry))
                else:
                    ranked.remove(entry)
        self._changed.clear()


def _rank(entry: Entry) -> Rank:
    order = entry.waiting_order()
    return (entry.priority, entry.score) if order == NOBODY else (-order,)


def _pages(entry: Entry) -> int:
    return len(entry.placement.pages) if entry.placement is not None else 0

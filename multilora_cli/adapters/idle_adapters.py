"""What hot adapters that nobody runs give to the evictor."""

from collections.abc import Callable, Mapping

from multilora_cli.adapters.residency_entry import NOBODY, Entry

_WANTED = 1 << 20  # an idle adapter that somebody waits for leaves after all others


class IdleAdapters:
    """The eviction source over the placed adapters; `evict` moves one down to warm."""

    def __init__(self, placed: Mapping[str, Entry], evict: Callable[[Entry], None]) -> None:
        self._placed = placed
        self._evict = evict

    def evictable_pages(self, order: int) -> int:
        """Pages that a sequence of arrival `order` may take."""
        return sum(
            len(entry.placement.pages)
            for entry in self._placed.values()
            if entry.placement is not None and _is_idle(entry, order)
        )

    def cheapest(self, order: int) -> tuple[int, float] | None:
        """(priority, score) of the adapter that would leave first."""
        best = self._cheapest(order)
        return None if best is None else _rank(best)

    def evict_cheapest(self, order: int) -> None:
        """Let that adapter go."""
        best = self._cheapest(order)
        if best is not None:
            self._evict(best)

    def _cheapest(self, order: int) -> Entry | None:
        idle = [entry for entry in self._placed.values() if _is_idle(entry, order)]
        return min(idle, key=_rank) if idle else None


def _is_idle(entry: Entry, order: int) -> bool:
    """Nobody runs it, nothing pins it, and nobody who arrived by `order` waits for it."""
    return entry.is_idle and entry.waiting_order() > order


def _rank(entry: Entry) -> tuple[int, float]:
    wanted = _WANTED if entry.waiting_order() < NOBODY else 0
    return entry.priority + wanted, entry.score

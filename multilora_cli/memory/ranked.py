"""Items in the order in which they leave, while their ranks change."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Rank = tuple[float, ...]


class Ranked(Generic[Item]):
    """Items by rank, the lowest first, of equal ranks the one that came first; and the pages that
    they hold together."""

    def __init__(self) -> None:
        self.pages = 0
        self._items: dict[Item, tuple[Rank, int, int]] = {}  # rank, ticket, pages
        self._heap: list[tuple[Rank, int, Item]] = []  # with entries that are out of date
        self._ticket = 0

    def __iter__(self) -> Iterator[tuple[Item, int]]:
        """Every item and its pages, in no order."""
        return ((item, pages) for item, (_, _, pages) in self._items.items())

    def ranks(self) -> dict[Item, Rank]:
        """The rank of every item."""
        return {item: rank for item, (rank, _, _) in self._items.items()}

    def put(self, item: Item, rank: Rank, pages: int = 1) -> None:
        """Add `item`, or give it another place."""
        known = self._items.get(item)
        if known is not None and (known[0], known[2]) == (rank, pages):
            return
        self.remove(item)
        self._ticket += 1
        self._items[item] = (rank, self._ticket, pages)
        self.pages += pages
        if len(self._heap) > 4 * len(self._items) + 64:
            self._heap = [(kept, ticket, each) for each, (kept, ticket, _) in self._items.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, self._ticket, item))

    def remove(self, item: Item) -> None:
        """Forget `item`, if it is here."""
        known = self._items.pop(item, None)
        if known is not None:
            self.pages -= known[2]

    def first(self) -> tuple[Item, Rank] | None:
        """The item of the lowest rank, and that rank."""
        while self._heap:
            rank, ticket, item = self._heap[0]
            known = self._items.get(item)
            if known is not None and known[1] == ticket:
                return item, rank
            heapq.heappop(self._heap)
        return None

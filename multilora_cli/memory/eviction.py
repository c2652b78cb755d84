"""One rule for what leaves the pool: cached KV prefixes and idle adapters compete by cost.

Greedy-dual size-frequency: an item's score is `inflation + uses * reload_s / pages`, the lowest
score leaves first, and `inflation` rises to the score of whatever left. Frequency and reload cost
are in the product; recency is in the inflation, which an item only catches up with when it is
used. A 27 MB adapter comes back in about 1 ms, a prefix of 2,000 tokens in about 50: per page
that is 0.08 against 0.4 ms, so an equally used prefix stays longer.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from multilora_cli.memory.page_pool import PagePool, PageUse

ANYONE = -1  # the order of a claim that may take from every waiting sequence
_HALF_LIFE_S = 600.0  # uses count half after ten minutes, so that old fame fades


class EvictionRule:
    """The inflation that both kinds of items share."""

    def __init__(self) -> None:
        self.inflation = 0.0

    def score(self, uses: float, reload_s: float, pages: int) -> float:
        """The score of an item used now: `uses` decayed, `reload_s` seconds to have it again."""
        return self.inflation + uses * reload_s / max(pages, 1)

    def evicted(self, score: float) -> None:
        """An item of this score left."""
        self.inflation = max(self.inflation, score)


def decayed(uses: float, idle_s: float) -> float:
    """`uses` after `idle_s` seconds without one."""
    return uses * math.exp2(-max(idle_s, 0.0) / _HALF_LIFE_S)


class EvictionSource(Protocol):
    """An owner of pages that can give some back.

    `order` is the arrival number of the sequence that needs room: an item kept for a sequence that
    arrived earlier is not offered to it, so that the oldest always gets on.
    """

    def evictable_pages(self, order: int, enough: int) -> int:
        """Pages that could be given back now; counting may end at `enough`."""
        ...

    def cheapest(self, order: int) -> tuple[int, float] | None:
        """(priority, score) of the item that would leave first; None: there is none."""
        ...

    def evict_cheapest(self, order: int) -> None:
        """Give that item's pages back."""
        ...


class Evictor:
    """Makes room in the pool by the rule, and keeps adapters off the KV floor."""

    def __init__(self, pool: PagePool, rule: EvictionRule, kv_reserve: float = 0.0) -> None:
        self._pool = pool
        self._rule = rule
        self._prefixes: Sequence[EvictionSource] = ()
        self._adapters: Sequence[EvictionSource] = ()
        self.adapter_limit = pool.usable - int(pool.usable * kv_reserve)

    def attach(self, *, prefixes: EvictionSource | None, adapters: EvictionSource | None) -> None:
        """Name the owners; None where a run has none of that kind."""
        self._prefixes = () if prefixes is None else (prefixes,)
        self._adapters = () if adapters is None else (adapters,)

    def make_room(self, count: int, use: PageUse, order: int = ANYONE) -> bool:
        """Evict until `count` pages can be allocated for `use`; evicts nothing when in vain.

        For adapters False can also mean that pages are on their way: fenced until a step ends.
        """
        if use is PageUse.ADAPTER:
            return self._room_for_adapter(count, order)
        if self._pool.available(use) >= count:
            return True
        sources = (*self._prefixes, *self._adapters)
        if not self._could_have(sources, count, order):
            return False
        self._evict(sources, count, order)
        return True

    def could_have(self, count: int, order: int = ANYONE) -> bool:
        """Whether evictions would leave `count` pages for KV now."""
        return self._could_have((*self._prefixes, *self._adapters), count, order)

    def _room_for_adapter(self, count: int, order: int) -> bool:
        over = self._pool.count(PageUse.ADAPTER) + count - self.adapter_limit
        idle = sum(source.evictable_pages(order, over) for source in self._adapters)
        sources = (*self._prefixes, *self._adapters)
        if over > idle or not self._could_have(sources, count, order):
            return False
        while self._pool.count(PageUse.ADAPTER) + count > self.adapter_limit:
            self._evict_from(self._adapters, order)
        self._evict(sources, count, order)
        return self._pool.available(PageUse.ADAPTER) >= count

    def _could_have(self, sources: Sequence[EvictionSource], count: int, order: int) -> bool:
        missing = count - self._pool.available(PageUse.KV)
        for source in sources:
            if missing > 0:
                missing -= source.evictable_pages(order, missing)
        return missing <= 0

    def _evict(self, sources: Sequence[EvictionSource], count: int, order: int) -> None:
        while self._pool.available(PageUse.KV) < count:
            self._evict_from(sources, order)

    def _evict_from(self, sources: Sequence[EvictionSource], order: int) -> None:
        offers = [(source.cheapest(order), source) for source in sources]
        best = min(
            ((offer, source) for offer, source in offers if offer is not None),
            key=lambda pair: pair[0],
        )
        self._rule.evicted(best[0][1])
        best[1].evict_cheapest(order)

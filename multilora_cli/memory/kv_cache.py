"""Which pages hold the keys and values of which sequence.

Full pages may be shared: by sequences that start alike (through the prefix cache) and by the
answers of one request (through `fork`). A page that is still written has one holder.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from multilora_cli.memory.eviction import ANYONE, Evictor
from multilora_cli.memory.page_pool import IntegrityError, PagePool, PageUse
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS, PrefixCache
from multilora_cli.sizing.pages import pages_for_tokens


@dataclass(slots=True)
class _Table:
    """The page table of one sequence; the first `num_published` pages are cached blocks."""

    owner: str
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    num_published: int = 0


class KVCache:
    """Sequence id -> page table; counts the holders of every page."""

    def __init__(self, pool: PagePool, evictor: Evictor, prefixes: PrefixCache | None) -> None:
        self._pool = pool
        self._evictor = evictor
        self._prefixes = prefixes
        self._tables: dict[int, _Table] = {}
        self._holders = [0] * pool.num_pages
        self._copies: list[tuple[int, int]] = []

    def open(self, seq_id: int, owner: str, keys: Sequence[bytes], max_tokens: int) -> int:
        """Start a table on the cached blocks that `keys` name; returns the tokens they hold.

        At most `max_tokens`, rounded down to whole blocks. `owner` is the adapter digest or "".
        """
        if seq_id in self._tables:
            raise IntegrityError(f"sequence {seq_id} has a page table already")
        table = self._tables[seq_id] = _Table(owner)
        if self._prefixes is None:
            return 0
        for key in keys[: max_tokens // BLOCK_TOKENS]:
            page = self._prefixes.get(key)
            if page is None:
                break
            self._hold(page)
            table.pages.append(page)
        table.num_published = len(table.pages)
        return table.num_published * BLOCK_TOKENS

    def table_for(self, seq_id: int, num_tokens: int) -> "array[int] | None":
        """The page table where it holds `num_tokens` tokens as it is; read only."""
        pages = self._tables[seq_id].pages
        return pages if num_tokens <= len(pages) * BLOCK_TOKENS else None

    def reserve(self, seq_id: int, num_tokens: int, order: int = ANYONE, spare: int = 0) -> bool:
        """Have pages for `num_tokens` tokens of the sequence; False: no room, nothing changed.

        `spare` pages must be left over, for somebody who has waited longer.
        """
        table = self._tables[seq_id]
        missing = pages_for_tokens(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if spare and not self._evictor.could_have(missing + spare, order):
            return False
        if not self._evictor.make_room(missing, PageUse.KV, order):
            return False
        pages = self._pool.allocate(missing, PageUse.KV)
        for page in pages:
            self._holders[page] = 1
        table.pages.extend(pages)
        return True

    def publish(self, seq_id: int, keys: Sequence[bytes], num_tokens: int) -> None:
        """Let others reuse the full blocks among the first `num_tokens` tokens, all computed.

        Where the same block is cached already the sequence goes on with that page.
        """
        if self._prefixes is None:
            return
        table = self._tables[seq_id]
        for index in range(table.num_published, min(num_tokens // BLOCK_TOKENS, len(keys))):
            parent = keys[index - 1] if index else None
            own = table.pages[index]
            if self._holders[own] > 1 and not self._prefixes.holds(own):
                break  # forked before it was published: another holder's chain may differ
            page = self._prefixes.insert(keys[index], parent, own, table.owner)
            if page != own:
                self._hold(page)
                # A new array: whoever has copied the old one's entries sees that they are stale.
                table.pages = array("i", table.pages)
                table.pages[index] = page
                self._let_go([own])
            table.num_published = index + 1

    def fork(self, seq_id: int, child_id: int, num_tokens: int) -> bool:
        """Give `child_id` the first `num_tokens` tokens of `seq_id`; False: no room for it.

        Full pages are shared. A last partial page is copied at the start of the next step.
        """
        table = self._tables[seq_id]
        full, partial = divmod(num_tokens, BLOCK_TOKENS)
        if partial and not self._evictor.make_room(1, PageUse.KV):
            return False
        child = _Table(table.owner, table.pages[:full], min(table.num_published, full))
        for page in child.pages:
            self._hold(page)
        if partial:
            source, target = table.pages[full], self._pool.allocate(1, PageUse.KV)[0]
            self._holders[target] = 1
            child.pages.append(target)
            for page in (source, target):  # neither may change hands before it is copied
                self._hold(page)
            self._copies.append((source, target))
        self._tables[child_id] = child
        return True

    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """(source page, target page) to copy before the next step reads or writes."""
        return tuple(self._copies)

    def copies_launched(self) -> None:
        """The step that makes the pending copies was handed to the device."""
        copies, self._copies = self._copies, []
        for pair in copies:
            self._let_go(pair)

    def close(self, seq_id: int) -> None:
        """Let go of every page of the sequence; cached blocks stay for others."""
        self._let_go(self._tables.pop(seq_id).pages)

    def table(self, seq_id: int) -> "array[int]":
        """The page table, int32, in order; read only."""
        return self._tables[seq_id].pages

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def check_integrity(self) -> None:
        """Holders equal the tables that name a page; what is written has one holder."""
        holders = [0] * self._pool.num_pages
        for seq_id, table in self._tables.items():
            if len(set(table.pages)) != len(table.pages):
                raise IntegrityError(f"sequence {seq_id} holds a page twice")
            for page in table.pages:
                holders[page] += 1
            for page in table.pages[: table.num_published]:
                if self._prefixes is None or not self._prefixes.holds(page):
                    raise IntegrityError(f"page {page} counts as cached but is not")
        for source, target in self._copies:
            holders[source] += 1
            holders[target] += 1
        if holders != self._holders:
            raise IntegrityError("a page's holders are miscounted")
        held = sum(count > 0 for count in holders)
        if held != self._pool.count(PageUse.KV):
            raise IntegrityError(f"{held} pages held, {self._pool.count(PageUse.KV)} in the pool")
        if self._prefixes is not None:
            self._prefixes.check_integrity()

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0 and self._prefixes is not None:
            self._prefixes.busy(page)
        self._holders[page] += 1

    def _let_go(self, pages: Sequence[int]) -> None:
        """Drop one hold of each; ends of chains first, so that they are offered first."""
        unheld = []
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._prefixes is not None and self._prefixes.holds(page):
                self._prefixes.idle(page)
            else:
                unheld.append(page)
        if unheld:
            self._pool.free(unheld)

"""What torch's caching allocator keeps of a card for tensors that come and go: its rules, counted.

As the engine sets it, with expandable segments: tensors of up to 1 MiB lie in one stretch of
addresses that grows by 2 MiB, larger ones in one that grows by 20 MiB. A free block is split, and
joined again with free neighbours; the smallest that fits is taken, and the stretch grows only where
none does. What was mapped stays, so what counts is how the tensors of a step fit into what earlier
ones left behind.
"""

from dataclasses import dataclass

_UNIT = 512
_SMALL = 2**20
_SMALL_PAGE = 2 * 2**20
LARGE_PAGE = 20 * 2**20  # what is mapped at a time
# What the stretches of other tensors leave unused at their ends, and small holes between them.
ENDS = 2 * LARGE_PAGE


@dataclass(eq=False)
class Block:
    """Some bytes in a row, of a tensor or free."""

    size: int
    owner: "_Stretch"
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """Bytes that are kept for the tensors taken so far."""

    def __init__(self) -> None:
        self._small, self._large = _Stretch(_SMALL_PAGE), _Stretch(LARGE_PAGE)
        self._live = 0
        self.peak = 0  # bytes of the tensors that were there at once

    @property
    def kept(self) -> int:
        """Bytes of the card that are mapped, free blocks included."""
        return self._small.kept + self._large.kept

    def take(self, size: int) -> Block | None:
        """Room for a tensor of `size` bytes; None: an empty one takes none."""
        size = -(-size // _UNIT) * _UNIT
        if not size:
            return None
        self._live += size
        self.peak = max(self.peak, self._live)
        return (self._small if size <= _SMALL else self._large).take(size)

    def give(self, *blocks: Block | None) -> None:
        """The tensors are gone."""
        for block in blocks:
            if block is not None:
                self._live -= block.size
                block.owner.give(block)

    def emptied(self) -> int:
        """Bytes that stay mapped once whole pages without a tensor are given back."""
        return self._small.emptied() + self._large.emptied()


class _Stretch:
    """One growing stretch of addresses, mapped by pages from its start."""

    def __init__(self, page: int) -> None:
        self.kept = 0
        self._page = page
        self._free: list[Block] = []
        self._last: Block | None = None

    def take(self, size: int) -> Block:
        """The smallest free block that fits; the last one, which could grow, only if need be."""
        fitting = [block for block in self._free if block.size >= size]
        inner = [block for block in fitting if block is not self._last]
        block = min(inner or fitting or [self._grown(size)], key=lambda block: block.size)
        self._free.remove(block)
        block.is_free = False
        if block.size > size:
            rest = Block(block.size - size, self, before=block, after=block.after)
            block.size, block.after = size, rest
            if rest.after is not None:
                rest.after.before = rest
            else:
                self._last = rest
            self._free.append(rest)
        return block

    def give(self, block: Block) -> None:
        """Free again, and one with its free neighbours."""
        block.is_free = True
        self._free.append(block)
        if block.before is not None and block.before.is_free:
            block = block.before
            self._join(block)
        self._join(block)

    def emptied(self) -> int:
        """`kept`, less the whole pages within free blocks."""
        block, end, left = self._last, self.kept, self.kept
        while block is not None:
            begin = end - block.size
            if block.is_free:
                pages = end // self._page - -(-begin // self._page)
                left -= max(pages, 0) * self._page
            block, end = block.before, begin
        return left

    def _grown(self, size: int) -> Block:
        """The last block once it holds `size` bytes."""
        last = self._last
        if last is None or not last.is_free:
            last = Block(0, self, before=self._last)
            if last.before is not None:
                last.before.after = last
            self._free.append(last)
            self._last = last
        more = -(-(size - last.size) // self._page) * self._page
        last.size += more
        self.kept += more
        return last

    def _join(self, first: Block) -> None:
        """Make one of `first` and what comes after it, where that is free."""
        second = first.after
        if second is None or not second.is_free:
            return
        self._free.remove(second)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        else:
            self._last = first

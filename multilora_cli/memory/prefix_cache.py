"""Pages of KV that later prompts can reuse, found by a chain of hashes.

A block is what a page holds: 16 tokens. Its key is sha256(parent key, tokens); the parent of the
first block is sha256(base digest, adapter digest, salt). So a key names the tokens from the start,
the exact weights that computed them and who may share them: never a name, never another adapter's
KV.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multilora_cli.memory.eviction import EvictionRule, decayed
from multilora_cli.memory.page_pool import IntegrityError, PagePool, PageUse
from multilora_cli.memory.ranked import Ranked
from multilora_kernels.layout import TOKENS_PER_PAGE

BLOCK_TOKENS = TOKENS_PER_PAGE


def root_key(base_digest: str, adapter_digest: str, salt: str) -> bytes:
    """The parent key of a sequence's first block."""
    hasher = hashlib.sha256()
    for part in (base_digest, adapter_digest, salt):
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
    """Append to `keys` the keys of every full block of `tokens` that is not in it yet."""
    for start in range(len(keys) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("i", tokens[start : start + BLOCK_TOKENS]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else root) + block).digest())


@dataclass(slots=True)
class _Block:
    """One cached page; `children` are cached blocks that follow it."""

    key: bytes
    page: int
    parent: bytes | None
    owner: str  # adapter digest, "" for the base
    children: int = 0
    uses: float = 1.0
    used_at: float = 0.0
    score: float = 0.0
    idle: bool = False  # no sequence holds the page


class PrefixCache:
    """key -> page. Blocks no sequence holds can be evicted, the ends of chains first.

    `block_s` is what 16 tokens cost to compute again, in seconds; the engine measures it.
    """

    def __init__(
        self, pool: PagePool, rule: EvictionRule, now: Callable[[], float], block_s: float = 4e-4
    ) -> None:
        self._pool = pool
        self._rule = rule
        self._now = now
        self.block_s = block_s
        self._blocks: dict[bytes, _Block] = {}
        self._by_page: dict[int, _Block] = {}
        self._ends: Ranked[bytes] = Ranked()  # keys of idle blocks that none follows, by score
        self._idle = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: bytes) -> int | None:
        """The page of block `key`, if it is cached."""
        block = self._blocks.get(key)
        return None if block is None else block.page

    def holds(self, page: int) -> bool:
        """Whether `page` is a cached block, held by a sequence or not."""
        return page in self._by_page

    def insert(self, key: bytes, parent: bytes | None, page: int, owner: str) -> int:
        """Publish `page` as block `key`; returns the page that holds it, an older one if any.

        `parent` is None for a first block, else a block that is cached.
        """
        existing = self._blocks.get(key)
        if existing is not None:
            return existing.page
        block = _Block(key, page, parent, owner, used_at=self._now())
        if parent is not None:
            self._blocks[parent].children += 1
            self._ends.remove(parent)
        self._blocks[key] = self._by_page[page] = block
        return page

    def busy(self, page: int) -> None:
        """A sequence took the cached `page` that none held."""
        block = self._by_page[page]
        now = self._now()
        block.uses = decayed(block.uses, now - block.used_at) + 1.0
        block.used_at = now
        block.idle = False
        self._idle -= 1
        self._ends.remove(block.key)
        self._pool.mark(page, PageUse.KV)

    def idle(self, page: int) -> None:
        """The last sequence that held the cached `page` let go of it."""
        block = self._by_page[page]
        block.idle = True
        uses = decayed(block.uses, self._now() - block.used_at)
        block.score = self._rule.score(uses, self.block_s, 1)
        self._idle += 1
        self._pool.mark(page, PageUse.CACHED)
        self._offer(block)

    def purge(self, owner: str) -> int:
        """Drop every block computed with adapter `owner` that no sequence holds; how many."""
        dropped = 0
        queue = [b for b in self._blocks.values() if b.owner == owner and b.idle and not b.children]
        while queue:
            block = queue.pop()
            parent = self._drop(block)
            dropped += 1
            if parent is not None and parent.idle and not parent.children:
                queue.append(parent)
        return dropped

    def evictable_pages(self, order: int, enough: int) -> int:
        """Pages of blocks that no sequence holds."""
        return self._idle

    def cheapest(self, order: int) -> tuple[int, float] | None:
        """(priority, score) of the block that would leave first."""
        first = self._ends.first()
        return None if first is None else (0, first[1][0])

    def evict_cheapest(self, order: int) -> None:
        """Drop the block that `cheapest` named."""
        first = self._ends.first()
        if first is not None:
            self._drop(self._blocks[first[0]])
            self.evictions += 1

    def check_integrity(self) -> None:
        """Keys and pages agree, parents are cached, children are counted, idle is counted."""
        children = dict.fromkeys(self._blocks, 0)
        for block in self._blocks.values():
            if self._by_page.get(block.page) is not block:
                raise IntegrityError(f"page {block.page} and its block disagree")
            if block.parent is not None:
                if block.parent not in self._blocks:
                    raise IntegrityError(f"page {block.page} is cached without its parent")
                children[block.parent] += 1
                if self._blocks[block.parent].idle and not block.idle:
                    raise IntegrityError(f"page {block.page} is in use, what it follows is not")
            if self._pool.use(block.page) is not (PageUse.CACHED if block.idle else PageUse.KV):
                raise IntegrityError(f"page {block.page}: idle {block.idle} but not in the pool")
        if len(self._by_page) != len(self._blocks):
            raise IntegrityError("a page belongs to no block")
        if any(children[key] != block.children for key, block in self._blocks.items()):
            raise IntegrityError("children are miscounted")
        self._check_idle()

    def _check_idle(self) -> None:
        if self._idle != sum(b.idle for b in self._blocks.values()):
            raise IntegrityError("idle blocks are miscounted")
        ends = {b.key: (b.score,) for b in self._blocks.values() if _is_end(b)}
        if self._ends.ranks() != ends:
            raise IntegrityError("idle ends of chains are not on offer, or not by score")

    def _offer(self, block: _Block) -> None:
        """Let an idle end of a chain leave, with the score of its last use."""
        if _is_end(block):
            self._ends.put(block.key, (block.score,))

    def _drop(self, block: _Block) -> _Block | None:
        """Forget `block`, free its page and offer its parent, which is returned."""
        del self._blocks[block.key]
        del self._by_page[block.page]
        self._ends.remove(block.key)
        self._idle -= 1
        self._pool.free([block.page])
        if block.parent is None:
            return None
        parent = self._blocks[block.parent]
        parent.children -= 1
        self._offer(parent)
        return parent


def _is_end(block: _Block) -> bool:
    """Whether it can leave: no sequence holds it, and no cached block follows it."""
    return block.idle and not block.children

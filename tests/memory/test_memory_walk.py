"""Random walks over pool, KV cache, prefix cache and eviction; the books are audited on the way."""

import random
from dataclasses import dataclass, field

import pytest

from multilora_cli.memory.eviction import ANYONE, EvictionRule, Evictor
from multilora_cli.memory.fences import StepClock
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.page_pool import PagePool, PageUse
from multilora_cli.memory.prefix_cache import PrefixCache, extend_keys, root_key
from multilora_cli.sizing.pages import pages_for_tokens


@dataclass
class _Live:
    """A sequence of the walk."""

    tokens: list[int]
    root: bytes
    owner: str
    keys: list[bytes] = field(default_factory=list)


class _Walk:
    """A pool of few pages, sequences that come and go, and pages that only the walk holds.

    `content` is what each page holds: the key of the block written into it. A sequence must
    always read, in each of its full blocks, what its own tokens say.
    """

    def __init__(self, seed: int, num_pages: int = 32) -> None:
        self.random = random.Random(seed)
        self.clock = StepClock()
        self.now = 0.0
        self.content: dict[int, object] = {}
        self.pool = PagePool(num_pages, 64, clock=self.clock, poison=self._poison)
        rule = EvictionRule()
        self.prefixes = PrefixCache(self.pool, rule, lambda: self.now)
        self.evictor = Evictor(self.pool, rule, kv_reserve=0.25)
        self.evictor.attach(prefixes=self.prefixes, adapters=None)
        self.kv = KVCache(self.pool, self.evictor, self.prefixes)
        self.live: dict[int, _Live] = {}
        self.adapters: list[list[int]] = []
        self.next_id = 0

    def _poison(self, pages: list[int]) -> None:
        for page in pages:
            self.content.pop(page, None)

    def step(self) -> None:
        """One random operation."""
        self.now += self.random.random()
        operation = self.random.choice(
            ("open", "extend", "extend", "extend", "close", "fork", "adapter", "launch", "purge")
        )
        getattr(self, "_" + operation)()

    def _open(self) -> None:
        owner = self.random.choice(("", "a", "b"))
        start = self.random.randrange(3)
        tokens = [start * 1000 + i for i in range(self.random.randrange(1, 90))]
        seq = _Live(tokens, root_key("base", owner, ""), owner)
        extend_keys(seq.keys, seq.root, tokens)
        before = self._state()
        cached = self.kv.open(self.next_id, owner, seq.keys, len(tokens) - 1)
        assert cached < len(tokens)
        if self.kv.reserve(self.next_id, len(tokens) + 1):
            self.live[self.next_id] = seq
            self._write(self.next_id, cached)
        else:
            self.kv.close(self.next_id)
            assert self._state() == before, "a failed reservation changed something"
        self.next_id += 1

    def _write(self, seq_id: int, start: int) -> None:
        """Fill the blocks from token `start` on, then publish."""
        seq, table = self.live[seq_id], self.kv.table(seq_id)
        for index in range(start // 16, len(seq.tokens) // 16):
            self.content[table[index]] = seq.keys[index]
        if len(seq.tokens) % 16:
            self.content[table[len(seq.tokens) // 16]] = seq.keys[-1:], len(seq.tokens)
        if self.random.random() < 0.8:
            self.kv.publish(seq_id, seq.keys, len(seq.tokens))

    def _extend(self) -> None:
        if not self.live:
            return
        seq_id = self.random.choice(list(self.live))
        seq = self.live[seq_id]
        done = len(seq.tokens)
        grown = self.random.randrange(1, 24)
        if not self.kv.reserve(seq_id, done + grown + 1):
            return
        self.kv.copies_launched()
        seq.tokens += [self.random.randrange(2) for _ in range(grown)]
        extend_keys(seq.keys, seq.root, seq.tokens)
        self._write(seq_id, done)

    def _close(self) -> None:
        if self.live:
            seq_id = self.random.choice(list(self.live))
            del self.live[seq_id]
            self.kv.close(seq_id)

    def _fork(self) -> None:
        if not self.live:
            return
        parent = self.random.choice(list(self.live))
        seq = self.live[parent]
        child = self.next_id
        self.next_id += 1
        if not self.kv.fork(parent, child, len(seq.tokens)):
            return
        for source, target in self.kv.pending_copies():
            self.content[target] = self.content[source]
        if self.random.random() < 0.5:
            self.clock.launch()
            self.kv.copies_launched()
        self.live[child] = _Live(list(seq.tokens), seq.root, seq.owner, list(seq.keys))

    def _adapter(self) -> None:
        if self.adapters and self.random.random() < 0.5:
            self.pool.free(self.adapters.pop(self.random.randrange(len(self.adapters))))
            return
        count = self.random.randrange(1, 8)
        if self.evictor.make_room(count, PageUse.ADAPTER):
            self.adapters.append(self.pool.allocate(count, PageUse.ADAPTER))
        assert self.pool.count(PageUse.ADAPTER) <= self.evictor.adapter_limit

    def _launch(self) -> None:
        step = self.clock.launch()
        self.clock.complete(step - self.random.randrange(3))

    def _purge(self) -> None:
        if self.random.random() < 0.1:
            self.prefixes.purge(self.random.choice(("", "a", "b")))

    def _state(self) -> tuple[int, int, int]:
        free = self.pool.count(PageUse.FREE) + self.pool.count(PageUse.FENCED)
        return free, self.pool.count(PageUse.CACHED), self.pool.count(PageUse.KV)

    def check(self) -> None:
        """Every owner's audit, and that each sequence reads its own blocks."""
        self.pool.check_integrity()
        self.kv.check_integrity()
        for seq_id, seq in self.live.items():
            table = self.kv.table(seq_id)
            assert len(table) >= pages_for_tokens(len(seq.tokens))
            for index in range(len(seq.tokens) // 16):
                assert self.content[table[index]] == seq.keys[index]

    def finish(self) -> None:
        """Everybody goes; nothing may stay owned."""
        for seq_id in self.live:
            self.kv.close(seq_id)
        self.live.clear()
        self.kv.copies_launched()
        for pages in self.adapters:
            self.pool.free(pages)
        for owner in ("", "a", "b"):
            self.prefixes.purge(owner)
        self.clock.complete(self.clock.launch())
        assert self.pool.available(PageUse.ADAPTER) == self.pool.usable
        assert len(self.prefixes) == 0
        self.pool.check_integrity()


def _walk(operations: int, audit_every: int) -> None:
    per_walk = 10_000
    for seed in range(operations // per_walk):
        walk = _Walk(seed)
        for index in range(per_walk):
            walk.step()
            if index % audit_every == 0:
                walk.check()
        walk.finish()


def test_random_walk() -> None:
    _walk(50_000, audit_every=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_walk_of_a_million() -> None:
    _walk(1_000_000, audit_every=1)


def test_a_claim_that_cannot_succeed_evicts_nothing() -> None:
    walk = _Walk(0, num_pages=9)
    tokens = list(range(32))
    keys: list[bytes] = []
    extend_keys(keys, root_key("base", "", ""), tokens)
    walk.kv.open(0, "", keys, 31)
    assert walk.kv.reserve(0, 33)
    walk.kv.publish(0, keys, 32)
    walk.kv.close(0)
    assert walk.pool.count(PageUse.CACHED) == 2
    assert not walk.evictor.make_room(9, PageUse.KV, ANYONE)
    assert walk.pool.count(PageUse.CACHED) == 2
    assert walk.evictor.make_room(8, PageUse.KV, ANYONE)
    assert walk.pool.count(PageUse.CACHED) == 0

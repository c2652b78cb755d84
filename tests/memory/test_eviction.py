"""The one rule by which cached prefixes and idle adapters compete."""

from dataclasses import dataclass, field

from multilora_cli.memory.eviction import ANYONE, EvictionRule, Evictor, decayed
from multilora_cli.memory.page_pool import PagePool, PageUse
from multilora_cli.memory.prefix_cache import PrefixCache, extend_keys, root_key


def cached_prefix(
    pool: PagePool, prefixes: PrefixCache, blocks: int, start: int, owner: str = ""
) -> list[bytes]:
    """`blocks` cached pages of one chain that nobody uses; their keys."""
    keys: list[bytes] = []
    tokens = list(range(start, start + 16 * blocks))
    extend_keys(keys, root_key("base", owner, ""), tokens)
    for index, page in enumerate(pool.allocate(blocks, PageUse.KV)):
        prefixes.insert(keys[index], keys[index - 1] if index else None, page, owner)
        prefixes.idle(page)
    return keys


@dataclass
class OneAdapter:
    """An idle adapter of some pages."""

    pool: PagePool
    rule: EvictionRule
    pages: list[int] = field(default_factory=list)
    score: float = 0.0

    def use(self, count: int, uses: float, reload_s: float) -> None:
        """Place it."""
        self.pages = self.pool.allocate(count, PageUse.ADAPTER)
        self.score = self.rule.score(uses, reload_s, count)

    def evictable_pages(self, order: int, enough: int) -> int:
        """All of it."""
        return len(self.pages)

    def cheapest(self, order: int) -> tuple[int, float] | None:
        """Itself."""
        return (0, self.score) if self.pages else None

    def evict_cheapest(self, order: int) -> None:
        """Free it."""
        self.pool.free(self.pages)
        self.pages = []


class _Case:
    def __init__(self, num_pages: int, kv_reserve: float = 0.0) -> None:
        self.now = 0.0
        self.pool = PagePool(num_pages + 1, 64)
        self.rule = EvictionRule()
        self.prefixes = PrefixCache(self.pool, self.rule, lambda: self.now)
        self.adapter = OneAdapter(self.pool, self.rule)
        self.evictor = Evictor(self.pool, self.rule, kv_reserve)
        self.evictor.attach(prefixes=self.prefixes, adapters=self.adapter)


def test_cheap_adapter_leaves_before_an_equally_used_prefix() -> None:
    """27 MB are back in 1.4 ms, 13 pages; a block of 16 tokens takes 0.4 ms to compute."""
    case = _Case(20)
    cached_prefix(case.pool, case.prefixes, 7, 0)
    case.adapter.use(13, uses=1.0, reload_s=1.4e-3)
    assert case.evictor.make_room(5, PageUse.KV, ANYONE)
    assert case.adapter.pages == [] and len(case.prefixes) == 7


def test_an_adapter_in_much_use_outlives_a_prefix_used_once() -> None:
    case = _Case(20)
    cached_prefix(case.pool, case.prefixes, 7, 0)
    case.adapter.use(13, uses=50.0, reload_s=1.4e-3)
    assert case.evictor.make_room(5, PageUse.KV, ANYONE)
    assert len(case.adapter.pages) == 13 and len(case.prefixes) == 2


def test_what_is_not_used_again_leaves_however_famous_it_was() -> None:
    """Recency: every eviction raises the bar that an unused item has to clear."""
    case = _Case(30)
    case.adapter.use(13, uses=20.0, reload_s=1.4e-3)
    for start in range(0, 16_000, 16):
        assert case.evictor.make_room(1, PageUse.KV, ANYONE)
        cached_prefix(case.pool, case.prefixes, 1, start)
        if not case.adapter.pages:
            return
    raise AssertionError("an adapter nobody uses stayed for ever")


def test_ends_of_chains_leave_first_and_recent_ones_last() -> None:
    case = _Case(12)
    old = cached_prefix(case.pool, case.prefixes, 4, 0)
    new = cached_prefix(case.pool, case.prefixes, 4, 1000)
    page = case.prefixes.get(old[0])
    assert page is not None
    for key in old:  # used once more, together
        hit = case.prefixes.get(key)
        assert hit is not None
        case.prefixes.busy(hit)
    for key in reversed(old):
        hit = case.prefixes.get(key)
        assert hit is not None
        case.prefixes.idle(hit)
    assert case.evictor.make_room(4 + 3, PageUse.KV, ANYONE)
    assert [case.prefixes.get(key) is not None for key in new] == [True, False, False, False]
    assert all(case.prefixes.get(key) is not None for key in old)
    case.prefixes.check_integrity()


def test_adapters_never_take_the_kv_floor_even_from_free_pages() -> None:
    case = _Case(20, kv_reserve=0.25)
    assert case.evictor.adapter_limit == 15
    assert not case.evictor.make_room(16, PageUse.ADAPTER)
    case.adapter.use(10, 1.0, 1e-3)
    assert case.evictor.make_room(6, PageUse.ADAPTER), "an idle adapter makes room for another"
    assert case.adapter.pages == []
    assert case.evictor.make_room(20, PageUse.KV)


def test_a_purge_takes_the_blocks_of_one_adapter_only() -> None:
    case = _Case(12)
    mine = cached_prefix(case.pool, case.prefixes, 3, 0, "mine")
    other = cached_prefix(case.pool, case.prefixes, 3, 0, "other")
    assert case.prefixes.purge("mine") == 3
    assert [case.prefixes.get(key) for key in mine] == [None] * 3
    assert all(case.prefixes.get(key) is not None for key in other)
    assert case.pool.count(PageUse.CACHED) == 3


def test_keys_depend_on_base_adapter_salt_and_every_token_before() -> None:
    roots = {
        root_key(base, adapter, salt)
        for base in ("", "b", "bc") for adapter in ("", "c", "d") for salt in ("", "d", "x")
    }  # fmt: skip
    assert len(roots) == 27, "no two combinations run together"
    first: list[bytes] = []
    second: list[bytes] = []
    extend_keys(first, b"r", [1] * 40)
    extend_keys(second, b"r", [2] + [1] * 39)
    assert len(first) == len(second) == 2 and first[1] != second[1]
    extend_keys(first, b"r", [1] * 48)
    assert len(first) == 3


def test_fame_fades() -> None:
    assert decayed(8.0, 600.0) == 4.0 and decayed(8.0, 0.0) == 8.0 == decayed(8.0, -5.0)

"""Prefetch by popularity: what it moves, what it leaves alone, how much, and what it brings."""

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate

import pytest

from multilora_cli.adapters.lease import Lease, State
from multilora_cli.memory.page_pool import PageUse
from tests.adapters.residency_kit import settle, state_of
from tests.engine.bookkeeping_kit import PAGE, Books, FakeVersion

A, B, C, D = (FakeVersion(f"v{i}", 4) for i in range(4))


def use(books: Books, version: FakeVersion, times: int = 1) -> None:
    """Requests for a version, one after another, started and ended."""
    for order in range(times):
        lease = books.residency.lease(version, order)
        settle(books)
        assert books.residency.acquire(lease) is not None
        books.clock.complete(books.clock.launch())
        books.residency.release(lease)
        settle(books)


def idle(books: Books, seconds: float = 5.0) -> None:
    """Time in which nobody asks for anything."""
    for _ in range(int(seconds * 10)):
        books.now += 0.1
        settle(books)


def test_a_popular_adapter_comes_back_when_there_is_room() -> None:
    books = Books(num_pages=21, prefetch_bytes_per_s=10**6, kv_reserve=0.0)
    use(books, A, 3)
    assert books.evictor.make_room(18, PageUse.KV)
    pages = books.pool.allocate(18, PageUse.KV)
    assert state_of(books, A) is State.WARM
    idle(books)
    assert state_of(books, A) is State.WARM, "there is no room"
    books.pool.free(pages)
    books.residency.lease(B, 9)  # something changes
    settle(books)
    idle(books)
    assert state_of(books, A) is State.HOT
    assert books.residency.prefetch.copies == 1 and books.residency.prefetch.bytes == 4 * PAGE
    use(books, A)
    assert books.residency.prefetch.hits == 1


def test_without_bytes_a_second_nothing_moves() -> None:
    books = Books(num_pages=21, kv_reserve=0.0)
    use(books, A, 3)
    books.evictor.make_room(18, PageUse.KV)
    idle(books)
    assert state_of(books, A) is State.WARM and books.residency.prefetch.wait_s is None


def test_it_takes_the_place_of_what_is_used_much_less_and_of_nothing_else() -> None:
    books = Books(num_slots=2, prefetch_bytes_per_s=10**6)
    use(books, A, 6)
    use(books, B, 1)
    assert state_of(books, B) is State.HOT
    idle(books)
    assert state_of(books, A) is State.HOT and state_of(books, B) is State.WARM
    for rival in (C, D):
        use(books, rival, 4)
        idle(books)
        assert state_of(books, rival) is State.HOT, "6 is not twice 4"
    assert books.residency.prefetch.copies == 1


@pytest.mark.parametrize("how", ["running", "waiting", "pinned", "priority"])
def test_what_is_needed_stays(how: str) -> None:
    books = Books(num_slots=2 if how != "pinned" else 3, prefetch_bytes_per_s=10**6)
    use(books, A, 9)
    if how == "pinned":
        use(books, C, 9)
        books.residency.load(1, B, 1, pin="hot")
        use(books, D)
        use(books, D)
    elif how == "priority":
        books.residency.load(1, B, 1, hot=True, priority=3)
    lease: Lease | None = None
    if how in ("running", "waiting"):
        lease = books.residency.lease(B, 99)
    settle(books)
    if how == "running" and lease is not None:
        assert books.residency.acquire(lease) is not None
    idle(books)
    assert state_of(books, B) is State.HOT


def test_what_an_operator_sent_away_is_not_brought_back() -> None:
    books = Books(prefetch_bytes_per_s=10**6)
    use(books, A, 9)
    books.residency.evict(1, A.digest, cold=False, unpin=False, purge=False)
    settle(books)
    idle(books, 20)
    assert state_of(books, A) is State.WARM and books.residency.prefetch.copies == 0


def test_a_stored_adapter_comes_into_host_memory_that_is_free() -> None:
    books = Books(num_slots=2, host_pages=8, prefetch_bytes_per_s=10**6)
    use(books, A, 4)
    use(books, B, 4)
    use(books, C, 4)  # A leaves host memory
    assert books.warm.nbytes(A.digest) == 0
    books.residency.evict(1, B.digest, cold=True, unpin=False, purge=False)
    settle(books)
    idle(books)
    assert books.warm.nbytes(A.digest) > 0 and books.residency.prefetch.loads == 1
    assert books.warm.nbytes(C.digest) > 0, "an image left for a guess"


def test_bytes_a_second_are_kept_and_it_comes_to_rest() -> None:
    cap = 4 * PAGE * 2  # two adapters a second
    books = Books(num_pages=200, num_slots=20, host_pages=400, prefetch_bytes_per_s=cap)
    versions = [FakeVersion(f"v{i}", 4) for i in range(16)]
    for version in versions:
        use(books, version, 2)
    books.evictor.make_room(190, PageUse.KV)
    pages = books.pool.allocate(190, PageUse.KV)
    books.pool.free(pages)
    books.residency.prefetch.stir()
    began, moved = books.now, []
    for _ in range(200):
        books.now += 0.1
        settle(books)
        moved.append((books.now - began, books.residency.prefetch.bytes))
    for since, num_bytes in moved:
        assert num_bytes <= cap * (since + 1.0) + 4 * PAGE
    assert all(state_of(books, version) is State.HOT for version in versions)
    assert books.residency.prefetch.copies == books.residency.evictions >= 14
    assert books.residency.prefetch.wait_s is None, "it looks for ever"


def test_a_failed_copy_to_be_is_no_loop() -> None:
    """An adapter that cannot fit beside what is pinned is tried once, then left."""
    books = Books(num_pages=21, num_slots=4, kv_reserve=0.0, prefetch_bytes_per_s=10**6)
    use(books, A, 5)
    books.evictor.make_room(20, PageUse.KV)
    pages = books.pool.allocate(18, PageUse.KV)
    idle(books, 10)
    assert books.residency.prefetch.copies == 0 and books.residency.prefetch.wait_s is None
    assert books.warm.holds[A.digest] == 0, "the image is held for nothing"
    books.pool.free(pages)


def _traffic(count: int, seed: int) -> Iterator[FakeVersion]:
    """Zipf 1.0 over 100 adapters."""
    choose = random.Random(seed)
    versions = [FakeVersion(f"z{i}", 2) for i in range(100)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(100)))
    for _ in range(count):
        yield versions[bisect(weights, choose.random() * weights[-1])]


def _hot_at_arrival(count: int, bytes_per_s: int) -> float:
    """Room for 24 on the device; every 50 requests long prompts take all of it for a moment."""
    books = Books(
        num_pages=80, num_slots=25, host_pages=200, kv_reserve=0.2,
        prefetch_bytes_per_s=bytes_per_s,
    )  # fmt: skip
    found = 0
    for order, version in enumerate(_traffic(count, 5)):
        if order % 50 == 0 and books.evictor.make_room(75, PageUse.KV):
            books.pool.free(books.pool.allocate(75, PageUse.KV))
        found += state_of(books, version) is State.HOT
        use(books, version)
        for _ in range(4):
            books.now += 0.25
            books.clock.complete(books.clock.launch())
            books.residency.poll()
    return found / count


def test_more_requests_find_their_adapter_hot() -> None:
    without, with_prefetch = _hot_at_arrival(600, 0), _hot_at_arrival(600, PAGE * 2 * 8)
    assert with_prefetch > without + 0.05, (without, with_prefetch)


def test_room_that_comes_when_a_step_ends_is_waited_for() -> None:
    """One step ahead a step is nearly always under way: what leaves for a guess is free later."""
    books = Books(num_slots=3, prefetch_bytes_per_s=10**6)
    use(books, A, 9)
    use(books, B, 8)
    leases = [books.residency.lease(rival, 20) for rival in (C, D)]
    for lease in leases:
        settle(books)
        assert books.residency.acquire(lease) is not None
    for lease in leases:
        books.residency.release(lease)
    books.residency.poll()
    assert state_of(books, A) is State.WARM and state_of(books, B) is State.WARM
    evicted = books.residency.evictions
    step = books.clock.launch()
    idle(books)
    assert state_of(books, A) is State.COPYING
    assert not books.copier.content.keys() & set(books.residency._placed[A.digest].placement.pages)
    assert books.residency.evictions == evicted + 1, "B is not worth it"
    books.clock.complete(step)
    idle(books)
    assert state_of(books, A) is State.HOT

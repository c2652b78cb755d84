"""The residency ladder: random walks with audits, and the rules one by one. No torch."""

import random
import subprocess
import sys

import pytest

from multilora_cli.adapters import hot_tier
from multilora_cli.adapters.lease import Lease, State
from multilora_cli.adapters.residency_entry import Entry, NoHostRoom
from multilora_cli.memory.page_pool import PageUse
from tests.adapters.residency_kit import VERSIONS, Walk, settle, state_of
from tests.engine.bookkeeping_kit import PAGE, Books, FakeVersion
from tests.memory.test_eviction import cached_prefix


def _walk(operations: int, per_walk: int = 5_000) -> None:
    guesses = 0
    for seed in range(operations // per_walk):
        walk = Walk(seed)
        for _ in range(per_walk):
            walk.step()
            walk.check()
        walk.finish()
        guesses += walk.residency.prefetch.copies
    assert guesses > 10, "the walk hardly meets prefetch"


def test_random_walk() -> None:
    _walk(30_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_walk_of_a_million() -> None:
    _walk(1_000_000)


def test_a_load_is_tried_again_if_room_was_made_before_its_failure_was_taken_in() -> None:
    """Two loads end between two steps: the second found no room beside the first, which nobody
    wants any more. It was not tried again until something else left, or for 60 s."""
    books = Books(host_pages=5)
    large, small = FakeVersion("large", 4), FakeVersion("small", 2)
    lease, _ = books.residency.lease(large, 1), books.residency.lease(small, 2)
    books.residency.poll()
    assert len(books.loaders.jobs) == 2
    for job in range(2):
        future, load, arguments = books.loaders.jobs.pop(0)
        if job == 0:
            future.set_result(load(*arguments))
        else:
            with pytest.raises(NoHostRoom) as caught:
                load(*arguments)
            future.set_exception(caught.value)
    books.residency.release(lease)
    settle(books)
    assert state_of(books, small) is State.HOT


def _asleep_for_room() -> tuple[Books, Lease]:
    """Both slots are in use; a third adapter is warm, and the lease that waits for it sleeps."""
    books = Books(num_slots=3, host_pages=40)
    residency = books.residency
    runs = residency.lease(VERSIONS[0], 1)
    settle(books)
    assert residency.acquire(runs) is not None
    other = residency.lease(VERSIONS[1], 2)
    settle(books)
    assert residency.acquire(other) is not None
    waits = residency.lease(VERSIONS[2], 3)
    while books.loaders.jobs or state_of(books, VERSIONS[2]) is not State.WARM:
        books.loaders.run_one(random.Random(0))
        residency.poll()
    residency.sleep(waits)
    assert waits.asleep == "room"
    return books, waits


def test_a_lease_is_woken_when_its_image_leaves_host_memory() -> None:
    books, waits = _asleep_for_room()
    books.residency._holds.release(books.residency._entries[waits.digest])
    del books.warm.images[waits.digest]
    books.residency.reports.standings()
    assert waits.asleep is None and books.residency.obstacle(waits) == "load"


def test_a_lease_is_woken_when_it_is_known_what_its_adapter_takes() -> None:
    books, waits = _asleep_for_room()
    books.residency._holds.release(books.residency._entries[waits.digest])
    unknown = books.residency.footprint(waits)
    books.residency.poll()
    assert waits.asleep is None and books.residency.footprint(waits) > unknown


def test_a_lease_is_woken_when_other_pins_take_other_pages() -> None:
    books, waits = _asleep_for_room()
    before = books.residency.footprint(waits)
    books.residency.load(9, VERSIONS[0], 4, pin="hot")
    assert waits.asleep is None and books.residency.footprint(waits) > before


def test_leases_from_before_a_drain_sleep_on_and_later_ones_never_do() -> None:
    books, waits = _asleep_for_room()
    books.residency.evict(9, waits.digest, cold=False, unpin=True, purge=False)
    assert waits.asleep == "room" and books.residency.obstacle(waits) == books.residency.no_room
    later = books.residency.lease(VERSIONS[2], 5)
    books.residency.sleep(later)
    assert later.asleep is None and books.residency.obstacle(later) == "drain"


def test_the_end_of_a_pin_makes_room_in_host_memory() -> None:
    books = Books(host_pages=5)
    large, small = FakeVersion("large", 4), FakeVersion("small", 2)
    books.residency.load(1, large, 1, pin="warm")
    settle(books)
    books.residency.lease(small, 2)
    settle(books)
    assert state_of(books, small) is State.STORED
    books.residency.evict(2, "large", cold=False, unpin=True, purge=False)
    settle(books)
    assert state_of(books, small) is State.HOT


def test_a_lease_brings_its_adapter_up_and_an_idle_one_stays_until_room_is_needed() -> None:
    books = Books(num_slots=2)
    first, second = VERSIONS[0], VERSIONS[1]
    lease = books.residency.lease(first, 1)
    assert books.residency.acquire(lease) is None
    settle(books)
    assert books.residency.acquire(lease) == 1
    waiting = books.residency.lease(second, 2)
    settle(books)
    assert books.residency.acquire(waiting) is None, "a running adapter was evicted"
    books.residency.release(lease)
    assert state_of(books, first) is State.HOT
    settle(books)
    assert books.residency.acquire(waiting) == 1
    assert state_of(books, first) is State.WARM


def test_a_newcomer_never_takes_what_is_kept_for_an_older_sequence() -> None:
    books = Books(num_slots=2)
    old = books.residency.lease(VERSIONS[0], 1)
    new = books.residency.lease(VERSIONS[1], 2)
    settle(books)
    assert books.residency.is_ready(old) and not books.residency.is_ready(new)
    assert books.evictor.make_room(39, PageUse.KV, 1) is False, "the oldest may not evict itself"
    assert books.evictor.make_room(39, PageUse.KV, 0) is True
    assert not books.residency.is_ready(old)


def test_kv_floor_is_never_taken_by_adapters() -> None:
    books = Books(num_pages=41, kv_reserve=0.5)
    leases = [books.residency.lease(version, i) for i, version in enumerate(VERSIONS[4:6])]
    settle(books)
    assert [books.residency.is_ready(lease) for lease in leases] == [True, False]
    books.residency.acquire(leases[0])
    settle(books)
    assert books.pool.count(PageUse.ADAPTER) == 8
    assert books.evictor.make_room(32, PageUse.KV, 9)


def test_an_adapter_that_can_never_fit_is_refused_with_both_numbers() -> None:
    books = Books(num_pages=21, kv_reserve=0.0)
    lease = books.residency.lease(VERSIONS[6], 1)
    settle(books)
    failure = books.residency.failure(lease)
    assert failure is not None and "25 pages" in failure.reason and "20 at most" in failure.reason
    assert books.warm.holds["d6"] == 0


def test_slots_and_pages_wait_for_the_last_step_that_may_read_them() -> None:
    books = Books(num_slots=2, num_pages=10, kv_reserve=0.0)
    lease = books.residency.lease(VERSIONS[3], 1)
    settle(books)
    books.residency.acquire(lease)
    step = books.clock.launch()
    books.residency.release(lease)
    waiting = books.residency.lease(VERSIONS[4], 2)
    settle(books)
    assert state_of(books, VERSIONS[3]) is State.WARM, "evicted while the step still runs"
    assert not books.residency.is_ready(waiting), "pages were overwritten under a running step"
    books.clock.complete(step)
    settle(books)
    assert books.residency.is_ready(waiting)


def test_a_pinned_adapter_never_leaves_for_others() -> None:
    """Not for a moment: neither for adapters that are used more, nor for KV."""
    books = Books(num_slots=3)
    pinned = VERSIONS[1]
    books.residency.load(1, pinned, 1, pin="hot")
    settle(books)
    for order, version in enumerate(VERSIONS[2:5] * 4):
        lease = books.residency.lease(version, 10 + order)
        settle(books)
        assert books.residency.acquire(lease) is not None
        books.residency.release(lease)
        assert state_of(books, pinned) is State.HOT
        assert not books.evictor.make_room(39, PageUse.KV), "all pages but the pinned ones"
        assert books.evictor.make_room(37, PageUse.KV)
    left = [
        event for event in books.residency.reports.take_events() if event.digest == pinned.digest
    ]
    assert [event.state for event in left][-1] is State.HOT and books.residency.evictions > 4
    assert sum(event.state is State.HOT for event in left) == 1, "it went and came back"


def test_a_full_pool_costs_no_look_at_every_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is full of cached prefixes sooner or later; then every page evicts another. With a
    thousand adapters on the device a look at each of them took 1 ms a page, half a step."""
    books = Books(num_pages=1_500, num_slots=1_001, host_pages=1_000, kv_reserve=0.0)
    for index in range(1_000):
        books.residency.load(index, FakeVersion(f"a{index}", 1), index, hot=True)
    settle(books, 2_000)
    assert books.pool.count(PageUse.ADAPTER) == 1_000
    cached_prefix(books.pool, books.prefixes, 499, 0)
    looks = 0
    waiting_order = Entry.waiting_order

    def counted(entry: Entry) -> int:
        nonlocal looks
        looks += 1
        return waiting_order(entry)

    assert books.evictor.make_room(1, PageUse.KV, 1)
    monkeypatch.setattr(Entry, "waiting_order", counted)
    for page in range(2, 500):
        assert books.evictor.make_room(page, PageUse.KV, 1)
        lease = books.residency.lease(FakeVersion("a1", 1), page)
        books.residency.acquire(lease)
        books.residency.release(lease)
    assert books.prefixes.evictions + books.residency.evictions == 499
    assert looks < 20 * 499


def test_of_adapters_that_are_waited_for_the_last_in_turn_leaves_first() -> None:
    books = Books(num_slots=3)
    books.residency.load(1, VERSIONS[0], 1, hot=True)
    books.residency.load(2, VERSIONS[1], 2, hot=True)
    settle(books)
    for order, version in ((20, VERSIONS[0]), (10, VERSIONS[1])):
        books.residency.lease(version, order)
    assert books.evictor.make_room(37, PageUse.KV, 15)
    assert state_of(books, VERSIONS[0]) is State.WARM
    assert state_of(books, VERSIONS[1]) is State.HOT
    assert not books.evictor.make_room(38, PageUse.KV, 15), "its turn comes before"


def test_priority_is_evicted_later() -> None:
    books = Books(num_slots=3)
    books.residency.load(1, VERSIONS[0], 1, hot=True, priority=5)
    books.residency.load(2, VERSIONS[1], 2, hot=True)
    settle(books)
    books.residency.lease(VERSIONS[2], 3)
    settle(books)
    assert state_of(books, VERSIONS[0]) is State.HOT
    assert state_of(books, VERSIONS[1]) is State.WARM


def test_failed_loads_back_off_and_do_not_hold_up_others() -> None:
    books = Books()
    books.warm.broken = {"d0"}
    pauses = []
    for _ in range(8):
        lease = books.residency.lease(VERSIONS[0], 1)
        other = books.residency.lease(VERSIONS[1], 2)
        settle(books)
        failure = books.residency.failure(lease)
        assert failure is not None and failure.reason == "d0 is broken"
        pauses.append(round(failure.retry_at - books.now, 3))
        assert books.residency.is_ready(other)
        books.residency.release(lease)
        books.residency.release(other)
        books.now = failure.retry_at
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    books.warm.broken.clear()
    lease = books.residency.lease(VERSIONS[0], 9)
    settle(books)
    assert books.residency.failure(lease) is None and books.residency.is_ready(lease)


def test_bookkeeping_needs_no_torch() -> None:
    code = (
        "import sys, multilora_cli.engine.scheduler, multilora_cli.engine.answers,"
        " multilora_cli.engine.process, multilora_cli.adapters.residency;"
        " sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_that_come_when_a_step_ends_are_not_promised_twice() -> None:
    """Two adapters need the room of one each: both wait for the step under way, no third leaves,
    and neither waits for the other."""
    books = Books(num_pages=17, num_slots=9, host_pages=40, kv_reserve=0.0)
    versions = [FakeVersion(f"w{i}", 4) for i in range(6)]
    for order, version in enumerate(versions[:4]):
        lease = books.residency.lease(version, order)
        settle(books)
        assert books.residency.acquire(lease) is not None
        books.residency.release(lease)
    step = books.clock.launch()
    leases = [books.residency.lease(version, 10 + i) for i, version in enumerate(versions[4:])]
    for _ in range(4):
        settle(books)
    assert books.residency.evictions == 2
    assert not books.evictor.make_room(9, PageUse.KV), "no other takes what was made room for"
    assert books.pool.available(PageUse.KV) == 0
    books.clock.complete(step)
    books.residency.poll()
    assert [books.residency.acquire(lease) is not None for lease in leases] == [True, True]
    assert books.residency.evictions == 2


def test_sequences_that_grow_in_every_step_do_not_take_what_an_adapter_waits_for() -> None:
    """One step ahead, in a full pool: what leaves for it is fenced, and each step needs a page."""
    books = Books(num_pages=41, num_slots=64, host_pages=100, kv_reserve=0.0)
    for order in range(40):
        lease = books.residency.lease(FakeVersion(f"w{order}", 1), order)
        settle(books)
        assert books.residency.acquire(lease) is not None
        books.residency.release(lease)
    lease = books.residency.lease(FakeVersion("coming", 4), 99)
    under_way = books.clock.launch()
    for _ in range(6):
        settle(books)
        if books.residency.acquire(lease) is not None:
            break
        assert books.evictor.make_room(1, PageUse.KV)
        books.pool.allocate(1, PageUse.KV)
        under_way, ended = books.clock.launch(), under_way
        books.clock.complete(ended)
    else:
        raise AssertionError("it never came")
    books.residency.check_integrity()


def test_a_step_comes_behind_a_copy_under_way() -> None:
    """The adapter is hot at once; image, slot and pages stay until the copy is done."""
    books = Books()
    books.copier.instant, books.copier.may_precede = False, True
    version = FakeVersion("a", 3)
    lease = books.residency.lease(version, 1)
    books.residency.poll()
    books.loaders.run_one(random.Random(0))
    books.residency.load(7, version, 2, hot=True)
    books.residency.poll()
    (copy,) = books.copier.copies
    assert copy.precedes_steps and books.residency.obstacle(lease) is None
    assert [done.call_id for done in books.residency.reports.take_done()] == [7]
    slot = books.residency.acquire(lease)
    assert slot is not None and books.reads(slot, "a")
    books.residency.release(lease)
    books.residency.evict(8, "a", cold=True, unpin=True, purge=False)
    books.clock.complete(books.clock.launch())
    books.residency.poll()
    assert (
        not books.residency.reports.take_done() and books.is_intact(copy) and books.residency.busy()
    )
    copy.finished = True
    books.residency.poll()
    assert [done.call_id for done in books.residency.reports.take_done()] == [8]
    assert not any(books.warm.holds.values())


def test_many_copies_do_not_hold_a_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a few MB of copies a step begins; those beyond are waited for by their own."""
    monkeypatch.setattr(hot_tier, "_AHEAD_BYTES", 5 * PAGE)
    books = Books(num_pages=60)
    books.copier.instant, books.copier.may_precede = False, True
    leases = [books.residency.lease(FakeVersion(name, 3), i) for i, name in enumerate("abc")]
    for _ in range(4):
        books.residency.poll()
        books.loaders.run_one(random.Random(0))
    copies = books.copier.copies
    ready = [lease.digest for lease in leases if books.residency.is_ready(lease)]
    assert ready == [copies[0].digest] and len(copies) == 3
    copies[0].finished = True
    books.residency.poll()
    ready = [lease.digest for lease in leases if books.residency.is_ready(lease)]
    assert ready == [copies[0].digest], "6 pages are still on their way"
    copies[1].finished = True
    books.residency.poll()
    assert all(books.residency.is_ready(lease) for lease in leases)

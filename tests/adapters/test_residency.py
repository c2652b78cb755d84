"""The residency ladder: random walks with audits, and the rules one by one. No torch."""

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from multilora_cli.adapters import hot_tier
from multilora_cli.adapters.lease import Lease, Standing, State
from multilora_cli.adapters.residency_entry import Entry, NoHostRoom
from multilora_cli.memory.page_pool import IntegrityError, PageUse
from tests.engine.bookkeeping_kit import PAGE, Books, FakeVersion
from tests.memory.test_eviction import cached_prefix

VERSIONS = [FakeVersion(f"d{i}", pages) for i, pages in enumerate((1, 2, 3, 5, 8, 13, 25))]


class Walk:
    """Sequences take, use and give up leases; operators load, evict and pin; loads fail."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.books = Books(prefetch_bytes_per_s=20 * PAGE)
        self.books.copier.instant = False
        self.residency = self.books.residency
        self.leases: list[Lease] = []
        self.slots: dict[int, tuple[int, int]] = {}  # id of a lease -> slot, last launched step
        self.kv: list[list[int]] = []
        self.calls: set[int] = set()
        self.next = 0
        self.told: dict[str, Standing] = {}  # what changes came to

    def step(self) -> None:
        """One random operation, then the audit."""
        self.books.now += self.random.random() * 0.3
        weights = {"lease": 4, "acquire": 6, "suspend": 1, "release": 4, "load": 2, "evict": 1,
                   "job": 4, "copy": 4, "poll": 6, "launch": 3, "kv": 3, "breakage": 1,
                   "lull": 0.1}  # fmt: skip
        self.do(self.random.choices(list(weights), list(weights.values()))[0])

    def do(self, operation: str, choices: random.Random | None = None) -> None:
        """One operation by name; what it leaves open is taken from `choices`."""
        self.random = choices or self.random
        getattr(self, "_" + operation)()

    def _number(self) -> int:
        self.next += 1
        return self.next

    def _lease(self) -> None:
        if len(self.leases) < 12:
            version = self.random.choice(VERSIONS)
            self.leases.append(self.residency.lease(version, self._number()))

    def _acquire(self) -> None:
        waiting = [lease for lease in self.leases if not lease.running]
        if waiting:
            lease = self.random.choice(waiting)
            ready = self.residency.is_ready(lease)
            slot = self.residency.acquire(lease)
            assert (slot is not None) == ready
            if slot is not None:
                self.slots[id(lease)] = (slot, self.books.clock.launched)

    def _suspend(self) -> None:
        running = [lease for lease in self.leases if lease.running]
        if running:
            lease = self.random.choice(running)
            self.residency.suspend(lease)
            del self.slots[id(lease)]

    def _release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.residency.release(lease)
            self.slots.pop(id(lease), None)
            with pytest.raises(IntegrityError):
                self.residency.release(lease)

    def _load(self) -> None:
        call = self._number()
        self.calls.add(call)
        hot, pin = self.random.random() < 0.5, self.random.choice((None, None, None, "warm", "hot"))
        version = self.random.choice(VERSIONS)
        self.residency.load(
            call, version, call, hot=hot, pin=pin, priority=self.random.randrange(2)
        )

    def _evict(self) -> None:
        call = self._number()
        self.calls.add(call)
        cold, unpin = self.random.random() < 0.5, self.random.random() < 0.9
        digest = self.random.choice(VERSIONS).digest
        self.residency.evict(call, digest, cold=cold, unpin=unpin, purge=cold)

    def _job(self) -> None:
        self.books.loaders.run_one(self.random)

    def _copy(self) -> None:
        copies = [copy for copy in self.books.copier.copies if not copy.finished]
        if copies:
            self.random.choice(copies).finished = True
        self.books.copier.copies = [copy for copy in copies if not copy.finished]
        self.books.copier.may_precede = self.random.random() < 0.5

    def _poll(self) -> None:
        self.residency.poll()
        for done in self.residency.reports.take_done():
            self.calls.remove(done.call_id)

    def _launch(self) -> None:
        """A step reads the adapters of every running lease, until it has ended."""
        step = self.books.clock.launch()
        self.books.clock.complete(step - self.random.randrange(2))

    def _kv(self) -> None:
        if self.kv and self.random.random() < 0.5:
            self.books.pool.free(self.kv.pop())
        else:
            count = self.random.randrange(1, 9)
            if self.books.evictor.make_room(
                count, PageUse.KV, self.random.randrange(self.next + 1)
            ):
                self.kv.append(self.books.pool.allocate(count, PageUse.KV))

    def _lull(self) -> None:
        """Everybody leaves, and for a while only what nobody waits for moves."""
        while self.leases:
            self._release()
        while self.kv:
            self.books.pool.free(self.kv.pop())
        for _ in range(10):
            self.books.now += 0.3
            self._launch()
            for operation in (self._job, self._copy, self._poll):
                operation()
                self.check()

    def _breakage(self) -> None:
        digest = self.random.choice(VERSIONS).digest
        broken = self.books.warm.broken
        broken.symmetric_difference_update({digest} if self.random.random() < 0.3 else set(broken))

    def check(self) -> None:
        """The owners' audits, and that every running lease reads its own adapter."""
        books = self.books
        books.pool.check_integrity()
        self.residency.check_integrity()
        assert books.pool.count(PageUse.ADAPTER) <= books.evictor.adapter_limit
        for copy in books.copier.copies:
            assert copy.finished or books.is_intact(copy), "a copy writes where others are"
        self._compare_changes()
        submitted = [args[0].digest for _, _, args in books.loaders.jobs]
        assert len(set(submitted)) == len(submitted) <= 2, "two loads of one digest"
        for lease in self.leases:
            if lease.running:
                slot = self.slots[id(lease)][0]
                assert books.reads(slot, lease.digest), "a lease reads something else"

    def _compare_changes(self) -> None:
        """Whoever takes changes now and then knows the same as whoever asks about everything."""
        if self.next % 3:
            return
        changed, gone = self.residency.reports.take_changes()
        self.told.update((standing.digest, standing) for standing in changed)
        for digest in gone:
            self.told.pop(digest, None)
        known = self.residency.reports.standings()
        assert self.told.keys() == {standing.digest for standing in known}
        for standing in known:
            same = {"idle_s": standing.idle_s}
            if standing.state is State.LOADING:  # its image counts once the load is taken in
                same["host_bytes"] = standing.host_bytes
            assert replace(self.told[standing.digest], **same) == standing

    def finish(self) -> None:
        """Everybody leaves; after the loads, copies and drains end nothing is owned."""
        for lease in self.leases:
            self.residency.release(lease)
        self.leases.clear()
        self.books.warm.broken.clear()
        for version in VERSIONS:
            self.calls.add(self._number())
            self.residency.evict(self.next, version.digest, cold=True, unpin=True, purge=True)
        for _ in range(200):
            self.books.now += 1.0
            self._job()
            self._copy()
            self._poll()
            self.books.clock.complete(self.books.clock.launch())
        assert not self.calls, "a call was never answered"
        assert not self.residency.has_work and self.residency.reports.standings() == []
        assert self.books.warm.images == {} and not any(self.books.warm.holds.values())
        for pages in self.kv:
            self.books.pool.free(pages)
        self.books.clock.complete(self.books.clock.launch())
        assert self.books.pool.available(PageUse.ADAPTER) == self.books.pool.usable
        self.check()


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


def settle(books: Books, polls: int = 50) -> None:
    """Let every load and copy that can end, end."""
    for _ in range(polls):
        while books.loaders.jobs:
            books.loaders.run_one(random.Random(0))
        books.residency.poll()
        if not books.residency.has_work:
            return


def state_of(books: Books, version: FakeVersion) -> State | None:
    """Where a version is."""
    states = {s.digest: s.state for s in books.residency.reports.standings()}
    return states.get(version.digest)


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

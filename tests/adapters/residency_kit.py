"""What tests of the residency ladder share: a random walk over it, and waiting for its loads."""

import random
from dataclasses import replace

import pytest

from multilora_cli.adapters.lease import Lease, Standing, State
from multilora_cli.memory.page_pool import IntegrityError, PageUse
from tests.engine.bookkeeping_kit import PAGE, Books, FakeVersion

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

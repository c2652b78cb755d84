"""Which adapters are where, and who needs them: the ladder stored -> warm -> hot.

    STORED --load--> LOADING --> WARM --copy--> COPYING --> HOT
                        |          ^                         |
                        v          +--------- evicted -------+
                      FAILED (reason, retry time)

A load is started by the first lease or call that wants the digest, and only one runs per digest.
Loader threads read and convert; this class, like the slots and pages it hands out, belongs to the
step thread and changes between steps only. Nothing a running lease or a pin needs is ever evicted.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from multilora_cli.adapters.hot_tier import HotTier
from multilora_cli.adapters.idle_adapters import IdleAdapters
from multilora_cli.adapters.image_holds import ImageHolds
from multilora_cli.adapters.lease import Done, Failure, Lease, Obstacle, Pin, State, Version
from multilora_cli.adapters.loads import Loads
from multilora_cli.adapters.pending import Pending
from multilora_cli.adapters.pinned_pages import PinnedPages
from multilora_cli.adapters.prefetch import Prefetch
from multilora_cli.adapters.reports import Reports
from multilora_cli.adapters.residency_entry import Call, Drain, Entry, NoHostRoom, WarmTier
from multilora_cli.errors import MloraError
from multilora_cli.memory.eviction import EvictionRule
from multilora_cli.memory.page_pool import IntegrityError

_log = logging.getLogger(__name__)

# Of the adapters that wait for room, only the oldest few are tried in each step: a thousand that
# wait must not cost the running sequences time.
_LOOK_AHEAD = 4
_RETRY_S = (1.0, 60.0)  # first and longest pause after a failed load


class Residency:
    """Leases and calls in, slots out. `now` is monotonic seconds."""

    def __init__(
        self,
        hot: HotTier,
        warm: WarmTier,
        loaders: Executor,
        rule: EvictionRule,
        now: Callable[[], float],
        num_loaders: int = 2,
        prefetch_bytes_per_s: int = 0,
    ) -> None:
        self._hot = hot
        self._warm = warm
        self._holds = ImageHolds(warm)
        self._rule = rule
        self._now = now
        self._loads = Loads(warm, loaders, num_loaders, now, lambda: self.on_loaded())
        self._entries: dict[str, Entry] = {}
        self._placed: dict[str, Entry] = {}  # copying or hot
        self.prefetch = Prefetch(prefetch_bytes_per_s, now)
        self.idle = IdleAdapters(self._evict_idle)
        self._pending = Pending()
        self._serial = 0
        self._pinned = PinnedPages(self._placed, self._wake_all)
        self.reports = Reports(self._entries, warm, now, self._lost_image)
        self.purge: Callable[[str], int] = lambda digest: 0  # cached prefixes of a digest
        self.on_loaded: Callable[[], None] = lambda: None  # on a loader thread
        self.loads = 0
        self.evictions = 0
        self.failed_loads = 0

    # ---- what sequences do

    def lease(self, version: Version, order: int) -> Lease:
        """A claim on `version` for the sequence of place `order`; starts its load."""
        entry = self._entry(version)
        if entry.failure is not None and self._now() >= entry.failure.retry_at:
            self._reset(entry)
        self._serial += 1
        lease = Lease(version.digest, order, self._serial)
        entry.leases.add(lease)
        self._leases_changed(entry)
        self._pending.add(entry)
        return lease

    def acquire(self, lease: Lease) -> int | None:
        """The slot of a hot adapter, which stays hot until `suspend` or `release`; else None."""
        entry = self._entries[lease.digest]
        if entry.placement is None or not self.is_ready(lease):
            return None
        if lease.running:
            raise IntegrityError(f"adapter {lease.digest[:12]} acquired twice by one lease")
        lease.running = True
        entry.running += 1
        self._leases_changed(entry)
        entry.hits += 1
        self.prefetch.used(entry)
        self._touch(entry)
        return entry.placement.slot

    def sleep(self, lease: Lease) -> None:
        """Set `lease.asleep` where nothing has to be asked about it until that is None again."""
        self._entries[lease.digest].sleep(lease)

    def is_ready(self, lease: Lease) -> bool:
        """Whether `acquire` would give a slot now."""
        entry = self._entries[lease.digest]
        return entry.state is State.HOT and entry.may_run(lease)

    def suspend(self, lease: Lease) -> None:
        """The sequence was preempted: it waits for its slot again, the claim stays."""
        self._stop(self._entries[lease.digest], lease)

    def release(self, lease: Lease) -> None:
        """The sequence ended, in whatever way; once per lease."""
        if lease.released:
            raise IntegrityError(f"adapter {lease.digest[:12]}: lease released twice")
        entry = self._entries[lease.digest]
        self._stop(entry, lease)
        entry.leases.remove(lease)
        self._leases_changed(entry)
        lease.released = True
        self._holds.unhold(entry)

    def failure(self, lease: Lease) -> Failure | None:
        """Why the lease's adapter cannot be had, if its load failed."""
        return self._entries[lease.digest].failure

    def is_loading(self, lease: Lease) -> bool:
        """Whether the adapter's bytes are still on their way into host memory."""
        return self._entries[lease.digest].state in (State.STORED, State.LOADING)

    def waits_for_room(self, lease: Lease) -> bool:
        """Whether only slots and pages, which others hold, keep the lease from running."""
        entry = self._entries[lease.digest]
        return entry.state in (State.WARM, State.COPYING, State.HOT) and entry.may_run(lease)

    @property
    def no_room(self) -> Obstacle:
        """What the device has none of for an adapter in host memory."""
        return "pages" if self._hot.has_free_slot else "slot"

    def obstacle(self, lease: Lease) -> Obstacle | None:
        """What `acquire` waits for; None: it would give a slot now."""
        entry = self._entries[lease.digest]
        if not entry.may_run(lease):
            return "drain"
        if entry.state is State.HOT:
            return None
        return self.no_room if entry.state is State.WARM else "load"

    def reorder(self, lease: Lease, order: int) -> None:
        """The sequence's place in the order changed while it waits."""
        lease.order = order
        self._leases_changed(self._entries[lease.digest])

    def pages_needed(self, lease: Lease) -> int:
        """Pages the adapter has yet to take; 0 while unknown."""
        entry = self._entries[lease.digest]
        image = entry.image
        return image.plan.num_pages if image is not None and entry.placement is None else 0

    def pages_held(self, lease: Lease) -> int:
        """Pages of the pool that the adapter has."""
        placement = self._entries[lease.digest].placement
        return len(placement.pages) if placement is not None else 0

    def footprint(self, lease: Lease | None) -> int:
        """Pages that the lease's adapter, 0 while unknown, and all other pins take."""
        if lease is None:
            return self._pinned.total
        entry = self._entries[lease.digest]
        placed = entry.placement or entry.image
        return (placed.plan.num_pages if placed else 0) + self._pinned.beside(entry)

    # ---- what operators do

    def load(
        self, call_id: int, version: Version, order: int, *, hot: bool = False,
        pin: Pin | None = None, priority: int = 0,
    ) -> None:  # fmt: skip
        """Bring `version` up to warm, or hot; the outcome appears in `reports.take_done`."""
        entry = self._entry(version)
        hot = hot or pin == "hot"
        if pin == "hot" and entry.pin != "hot":
            pinned = sum(other.pin == "hot" for other in self._entries.values())
            slots = self._hot.num_slots
            if pinned + 1 >= slots:
                reason = f"{pinned} of {slots} slots are pinned: no slot would stay free"
                self.reports.done(call_id, entry, reason)
                return
        if entry.failure is not None:
            self._reset(entry)
        entry.pin = pin or entry.pin
        entry.priority = priority
        self._changed(entry)
        self._pinned.recount()
        if entry.pin is not None:
            self._warm.pin(entry.digest, True)
        entry.calls.append(Call(call_id, hot, order))
        self._pending.add(entry)

    def evict(self, call_id: int, digest: str, *, cold: bool, unpin: bool, purge: bool) -> None:
        """Move `digest` down once the leases that exist now have ended; see `take_done`."""
        entry = self._entries.get(digest)
        if entry is None:
            self.reports.done(call_id, None, pages=self.purge(digest) if purge else 0)
            return
        if entry.pin is not None and not unpin:
            reason = f"adapter {entry.version.name} is pinned {entry.pin}"
            self.reports.done(call_id, entry, reason)
            return
        if entry.pin is not None:
            self._unpin(entry)
            self._pinned.recount()
        for call in entry.calls:
            reason = f"adapter {entry.version.name} was evicted before it was loaded"
            self.reports.done(call.call_id, entry, reason)
        entry.calls.clear()
        entry.drains.append(Drain(call_id, self._serial + 1, cold, purge))
        self._leases_changed(entry)
        self._pending.add(entry)

    # ---- between steps

    def poll(self) -> None:
        """Take in what loaders and copies finished, evict what drained, start what is wanted."""
        if self._pending:
            self.prefetch.stir()
            self._move_wanted()
        elif self.prefetch.is_due():
            self._move_popular()
        self._hot.flush()

    def _move_wanted(self) -> None:
        for entry in self._pending.attended():
            if entry.state is State.LOADING:
                self._finish_load(entry)
            elif entry.placement is not None:
                self._finish_copy(entry)
            if entry.drains:
                self._finish_drains(entry)
            if entry.calls:
                self._answer_calls(entry)
        tries = _LOOK_AHEAD
        for order, entry in self._pending.wanted(lambda: self._loads.has_room):
            if not tries and not self._loads.has_room:
                break
            if entry.state is State.STORED:
                self._start_load(entry)
            elif entry.state is State.WARM and tries and entry.wants_hot():
                tries -= not self._start_copy(entry, order)
                self._finish_copy(entry)
                self._answer_calls(entry)
        self._pending.drop_settled(lambda entry: self._entries.get(entry.digest) is entry)

    def _move_popular(self) -> None:
        """Nobody wants a load or copy: bring up the first that there is room for."""
        for entry in self.prefetch.candidates(self._entries.values()):
            if not self._holds.take(entry):
                self._set_state(entry, State.STORED)
                num_bytes = entry.num_bytes if entry.num_bytes <= self._warm.free_bytes else 0
                if num_bytes and self._start_load(entry):
                    self._pending.add(entry)
                    self.prefetch.loading(num_bytes)
                    return
                continue
            if self.prefetch.make_room(entry, self._hot, self._placed, self._evict_idle):
                self._place(entry)
                self._pending.add(entry)
                self.prefetch.copied(entry, self._warm.nbytes(entry.digest))
                return
            self._holds.release(entry)
        self.prefetch.settle()

    def busy(self) -> bool:
        """Whether a load or copy is on its way, so that polling again soon is worth it."""
        return any(entry.is_moving for entry in self._pending.attended())

    @property
    def has_work(self) -> bool:
        """Whether `poll` has anything left to do, now or later; beside `prefetch`."""
        return bool(self._pending)

    def check_integrity(self) -> None:
        """States, holds, leases, slots and pages agree."""
        for entry in self._entries.values():
            entry.check_integrity()
        placed = {e.digest for e in self._entries.values() if e.placement is not None}
        if placed != set(self._placed):
            raise IntegrityError("the list of placed adapters is wrong")
        placements = [e.placement for e in self._placed.values() if e.placement is not None]
        self._hot.check_integrity(placements)
        self.idle.check_integrity(iter(self._placed.values()))
        self._pending.check_integrity(self._entries.values())

    # ---- one entry

    def _entry(self, version: Version) -> Entry:
        entry = self._entries.get(version.digest)
        if entry is None:
            entry = self._entries[version.digest] = Entry(version)
            self.reports.changed(version.digest)
            if self._warm.nbytes(version.digest):
                entry.state = State.WARM
        entry.version = version
        return entry

    def _finish_load(self, entry: Entry) -> None:
        try:
            entry.image = self._loads.take(entry)
        except NoHostRoom:
            entry.blocked_at = entry.tried_at  # what was let go of since may have made room
            self._set_state(entry, State.STORED)
            self._holds.give_way(entry, self._pending)
        except MloraError as error:
            self._fail(entry, error.message)
        except Exception as error:
            _log.exception("adapter %s: load failed", entry.version.name)
            self._fail(entry, f"loading failed: {type(error).__name__}: {error}")
        else:
            if entry.image is None:
                return
            self.loads += 1
            entry.failures = 0
            self._set_state(entry, State.WARM)
            if entry.pin is not None:
                self._warm.pin(entry.digest, True)
            self._holds.unhold(entry)

    def _finish_copy(self, entry: Entry) -> None:
        """Let steps use an adapter that is there or soon will be; the image is held until then."""
        placement = entry.placement
        if placement is None:
            return
        if entry.state is State.COPYING and self._hot.enter(placement):
            is_warm = self._warm.nbytes(entry.digest) > 0
            entry.rate(self._now(), self._rule, is_warm=is_warm)
            self._set_state(entry, State.HOT)
        if entry.state is State.HOT and placement.copy.done():
            self._holds.release(entry)
            self._changed(entry)

    def _finish_drains(self, entry: Entry) -> None:
        while entry.drains and not entry.is_moving:
            drain = entry.drains[0]
            if any(lease.serial < drain.serial for lease in entry.leases):
                return
            pages = len(entry.placement.pages) if entry.placement is not None else 0
            if entry.placement is not None:
                self._cool(entry)
            host = self._drop_image(entry) if drain.cold else 0
            if drain.purge:
                pages += self.purge(entry.digest)
            entry.drains.pop(0)
            self._leases_changed(entry)
            entry.uses = 0.0  # an operator sent it away: only new requests make it popular again
            standing = self.reports.standing(entry)
            unused = not (entry.drains or entry.leases or entry.calls or entry.pin)
            if unused and drain.cold:
                del self._entries[entry.digest]
            self.reports.evicted(Done(drain.call_id, standing, None, pages, host))

    def _answer_calls(self, entry: Entry) -> None:
        """Reply to the load calls whose tier is reached, or can never be."""
        if not entry.calls:
            return
        reason = entry.failure.reason if entry.failure is not None else None
        warm = entry.state in (State.WARM, State.COPYING, State.HOT)
        open_calls = []
        for call in entry.calls:
            if reason is not None or entry.state is State.HOT or (warm and not call.hot):
                self.reports.done(call.call_id, entry, reason)
            else:
                open_calls.append(call)
        entry.calls = open_calls
        self._pending.changed(entry)
        if reason is not None and entry.pin is not None:
            self._unpin(entry)
        self._holds.unhold(entry)

    def _start_load(self, entry: Entry) -> bool:
        """Load it, if a thread is free and host memory changed since there was no room in it."""
        if entry.blocked_at == self._holds.released or not self._loads.start(entry):
            return False
        entry.tried_at = self._holds.released
        self._set_state(entry, State.LOADING)
        return True

    def _start_copy(self, entry: Entry, order: int) -> bool:
        """Copy it to the device; False: there is no room for it now."""
        if not self._holds.take(entry) or entry.image is None:
            self._set_state(entry, State.STORED)
            return True
        entry.wake()  # what it takes is known now
        plan = entry.image.plan
        most = self._hot.page_limit - self._pinned.beside(entry)
        if plan.num_pages > most:
            self._fail(
                entry,
                f"the adapter needs {plan.num_pages} pages of the pool and can have {most} at most"
                f" ({self._hot.page_limit} for adapters, the rest of them pinned)",
            )
        elif not self._placed and not self._hot.fits_table(plan):
            self._fail(entry, "the adapter has more blocks than the table on the device holds")
        elif not self._hot.make_room(plan, order, self.idle):
            return False
        else:
            self._place(entry)
        return True

    def _place(self, entry: Entry) -> None:
        """Start the copy of the held image into the room that was made."""
        assert entry.image is not None
        entry.placement = self._hot.start(entry.image)
        self._placed[entry.digest] = entry
        self._pinned.moved(entry)
        self._set_state(entry, State.COPYING)

    def _evict_idle(self, entry: Entry) -> None:
        self.evictions += 1
        self._cool(entry)

    def _cool(self, entry: Entry) -> None:
        """Hot to warm, or to stored where the host image has left meanwhile."""
        if entry.placement is None:
            return
        self._hot.drop(entry.placement)
        entry.placement = None
        entry.is_guess = False
        del self._placed[entry.digest]
        self._pinned.moved(entry)
        self._set_state(entry, State.WARM if self._warm.nbytes(entry.digest) else State.STORED)
        if entry.demand() is not None:
            self._pending.add(entry)

    def _fail(self, entry: Entry, reason: str) -> None:
        first, longest = _RETRY_S
        pause = min(first * 2.0**entry.failures, longest)
        entry.failures += 1
        self.failed_loads += 1
        self._holds.release(entry)
        entry.failure = Failure(reason, self._now() + pause)
        self._set_state(entry, State.FAILED)

    def _reset(self, entry: Entry) -> None:
        """A failed adapter may be tried again."""
        entry.failure = None
        self._set_state(entry, State.WARM if self._warm.nbytes(entry.digest) else State.STORED)

    def _stop(self, entry: Entry, lease: Lease) -> None:
        if not lease.running:
            return
        lease.running = False
        entry.running -= 1
        self._leases_changed(entry)
        self._touch(entry)
        self._pending.add(entry)

    def _leases_changed(self, entry: Entry) -> None:
        entry.leases_changed()
        self._changed(entry)

    def _touch(self, entry: Entry) -> None:
        is_warm = self._warm.nbytes(entry.digest) > 0
        entry.touch(self._now(), self._rule, is_warm=is_warm)
        self._changed(entry)

    def _drop_image(self, entry: Entry) -> int:
        freed = self._holds.drop(entry)
        if entry.state is State.WARM:
            self._set_state(entry, State.STORED)
        return freed

    def _unpin(self, entry: Entry) -> None:
        self._holds.unpin(entry)
        entry.pin = None
        self._changed(entry)

    def _lost_image(self, entry: Entry) -> None:
        entry.state = State.STORED
        entry.wake()
        self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        self.idle.changed(entry)
        self._pending.changed(entry)
        self.reports.changed(entry.digest)

    def _wake_all(self) -> None:
        for entry in self._entries.values():
            entry.wake()

    def _set_state(self, entry: Entry, state: State) -> None:
        if state is not entry.state:
            entry.enter(state, self._now())
            entry.wake()
            self._changed(entry)
            self.reports.moved(entry)

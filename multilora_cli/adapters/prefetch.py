"""Adapters that nobody waits for, brought up in idle transfer time: the most popular first.

A request's arrival starts its own load, so there is nothing to guess for those. What is guessed is
who comes next: an adapter's uses, halved every ten minutes, say how popular it is. When no load and
no copy is wanted, warm adapters go to the device while there is room, or in the place of one that
is used less than half as much, and stored ones that were loaded before go into unused host memory.
Nothing that anybody uses, waits for or pinned leaves for a guess, nor does a cached prefix; so many
bytes a second at most are moved.
"""

from collections.abc import Callable, Iterable, Mapping

from multilora_cli.adapters.hot_tier import HotTier
from multilora_cli.adapters.lease import State
from multilora_cli.adapters.residency_entry import NOBODY, Entry

_SCAN_S = 0.25  # a look at 2,000 adapters takes 1 ms of the step thread
_TRIES = 4  # adapters that are looked at closely in each scan
_TIMES_MORE = 2.0  # used; uses fade alike, so no two adapters change places for ever


class Prefetch:
    """What may be moved and when. `now` is monotonic seconds; 0 bytes a second: nothing."""

    def __init__(self, bytes_per_s: int, now: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._credit = float(bytes_per_s)
        self._credited_at = now()
        self._scan_at = 0.0
        self._quiet = not bytes_per_s
        self.copies = 0
        self.loads = 0
        self.bytes = 0
        self.hits = 0  # prefetched adapters that were used before they left the device

    def stir(self) -> None:
        """Uses, room or demands changed: there may be something to do again."""
        self._quiet = not self._bytes_per_s

    def settle(self) -> None:
        """There is nothing to do until something changes."""
        self._quiet = True

    @property
    def wait_s(self) -> float | None:
        """Seconds until a look is worth it; None: not until something changes."""
        if self._quiet:
            return None
        self._refill()
        short_s = -min(self._credit, 0.0) / self._bytes_per_s
        return max(self._scan_at - self._now(), short_s, 0.001)

    def is_due(self) -> bool:
        """Whether to look now; the next look is a while later."""
        if self._quiet or self._now() < self._scan_at:
            return False
        self._refill()
        if self._credit <= 0.0:
            return False
        self._scan_at = self._now() + _SCAN_S
        return True

    def candidates(self, entries: Iterable[Entry]) -> list[Entry]:
        """The most popular of those that could come up, first."""
        now = self._now()
        able = [e for e in entries if e.uses > 0.0 and _could_rise(e)]
        return sorted(able, key=lambda entry: -entry.uses_at(now))[:_TRIES]

    def make_room(
        self,
        entry: Entry,
        hot: HotTier,
        placed: Mapping[str, Entry],
        evict: Callable[[Entry], None],
    ) -> bool:
        """Whether there is room on the device for `entry`, whose image is held; adapters that are
        used much less leave for it."""
        if entry.image is None:
            return False
        plan = entry.image.plan
        if not hot.has_room(plan):
            for victim in self._victims(entry, placed.values(), hot.pages_short(plan)):
                evict(victim)
        return hot.has_room(plan)

    def _victims(self, entry: Entry, placed: Iterable[Entry], pages: int) -> list[Entry]:
        """Idle adapters used less than half as much that have `pages` pages together, at least
        one; empty where there are not enough. A page of any warm adapter takes as long to come
        back, so uses alone compare them."""
        now = self._now()
        idle = [
            (other.priority, other.uses_at(now), other)
            for other in placed
            if other.is_idle and other.waiting_order() == NOBODY
        ]
        chosen: list[Entry] = []
        for priority, uses, other in sorted(idle, key=lambda item: item[:2]):
            if uses * _TIMES_MORE >= entry.uses_at(now) or priority > entry.priority:
                continue
            chosen.append(other)
            pages -= len(other.placement.pages) if other.placement is not None else 0
            if pages <= 0:
                return chosen
        return []

    def copied(self, entry: Entry, num_bytes: int) -> None:
        """A copy to the device was started."""
        entry.is_guess = True
        self.copies += 1
        self._spend(num_bytes)

    def loading(self, num_bytes: int) -> None:
        """A load into host memory was started."""
        self.loads += 1
        self._spend(num_bytes)

    def used(self, entry: Entry) -> None:
        """A sequence runs it."""
        self.hits += entry.is_guess
        entry.is_guess = False

    def _spend(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self._credit -= num_bytes

    def _refill(self) -> None:
        """At most one second's bytes are saved up; a large image runs into debt."""
        now = self._now()
        credit = self._credit + (now - self._credited_at) * self._bytes_per_s
        self._credit = min(credit, float(self._bytes_per_s))
        self._credited_at = now


def _could_rise(entry: Entry) -> bool:
    return (
        entry.state in (State.STORED, State.WARM)
        and entry.failure is None
        and not (entry.drains or entry.calls)
        and entry.waiting_order() == NOBODY
    )

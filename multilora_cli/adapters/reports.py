"""What is told of adapters: outcomes of calls, changes of tier, and what became of the others."""

from collections.abc import Callable, Mapping

from multilora_cli.adapters.lease import Done, Standing, State
from multilora_cli.adapters.residency_entry import Entry, WarmTier


class Reports:
    """Kept until they are taken. `now` is monotonic seconds."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        warm: WarmTier,
        now: Callable[[], float],
        lost_image: Callable[[Entry], None],
    ) -> None:
        """`lost_image`: told of an adapter that is found to have left host memory."""
        self._entries = entries
        self._warm = warm
        self._now = now
        self._lost_image = lost_image
        self._events: list[Standing] = []
        self._done: list[Done] = []
        self._changed: dict[str, None] = {}  # digests, since `take_changes`

    def changed(self, digest: str) -> None:
        """Its state, leases, pin, use or images changed, or it is known no more."""
        self._changed[digest] = None

    def moved(self, entry: Entry) -> None:
        """It is in another state."""
        self._events.append(self.standing(entry))

    def done(
        self, call_id: int, entry: Entry | None, failure: str | None = None, pages: int = 0
    ) -> None:
        """A call is over; `pages` became free."""
        standing = self.standing(entry) if entry is not None else None
        self._done.append(Done(call_id, standing, failure, freed_pages=pages))

    def evicted(self, done: Done) -> None:
        """An evict call is over."""
        self._done.append(done)

    def take_events(self) -> list[Standing]:
        """Tier changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_done(self) -> list[Done]:
        """Outcomes of load and evict calls since the last call."""
        done, self._done = self._done, []
        return done

    def take_changes(self) -> tuple[list[Standing], list[str]]:
        """Digests that changed since the last call, at first all, and those known no more. To tell
        of each of ten thousand every second kept the loop for 32 ms."""
        self._changed.update(dict.fromkeys(self._warm.take_left()))
        digests, self._changed = self._changed, {}
        known = [entry for each in digests if (entry := self._entries.get(each)) is not None]
        gone = [digest for digest in digests if digest not in self._entries]
        return [self.standing(entry) for entry in known], gone

    def standings(self) -> list[Standing]:
        """Every known digest."""
        return [self.standing(entry) for entry in self._entries.values()]

    def standing(self, entry: Entry) -> Standing:
        """What one costs and how it is used."""
        num_bytes = self._warm.nbytes(entry.digest)
        if entry.state is State.WARM and not num_bytes:
            self._lost_image(entry)
        return entry.standing(self._now(), num_bytes)

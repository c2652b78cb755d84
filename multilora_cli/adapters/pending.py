"""The adapters that something has to be done for between steps.

A thousand requests for a thousand adapters come at once, and then the loop runs once every few
milliseconds while two of them load. So only those that changed are looked at again; who is next is
kept in order.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from multilora_cli.adapters.lease import State
from multilora_cli.adapters.residency_entry import Entry
from multilora_cli.memory.page_pool import IntegrityError

# Place in the order (Entry.demand), then arrival here: no two are equal.
_Place = tuple[int, int]
_Placed = tuple[int, int, Entry]


class Pending:
    """In the order in which they came, so that the same calls lead to the same steps."""

    def __init__(self) -> None:
        self._arrivals: dict[Entry, int] = {}
        self._arrived = 0
        self._misplaced: dict[Entry, None] = {}  # changed since they were given their places
        self._doubtful: dict[Entry, None] = {}  # changed since they were found not to be settled
        self._attended: dict[Entry, None] = {}  # on their way, or with calls or drains
        self._places: dict[Entry, tuple[list[_Placed], _Place]] = {}
        self._stored: list[_Placed] = []  # those that are asked for and must be loaded
        self._others: list[_Placed] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, entry: Entry) -> None:
        """Something is to be done for `entry`."""
        if entry not in self._arrivals:
            self._arrived += 1
            self._arrivals[entry] = self._arrived
        self.changed(entry)

    def changed(self, entry: Entry) -> None:
        """To be called after every change of state, image, leases, calls, pin or drains."""
        if entry in self._arrivals:
            self._misplaced[entry] = None
            self._doubtful[entry] = None

    def attended(self) -> list[Entry]:
        """Those of this moment that are on their way, or that a call is to be answered about."""
        self._take_in()
        return sorted(self._attended, key=self._arrivals.__getitem__)

    def wanted(self, may_load: Callable[[], bool]) -> Iterator[tuple[int, Entry]]:
        """Those of this moment that are asked for, the earliest first, each with its place in the
        order; without those that must be loaded once no more loads may begin."""
        self._take_in()
        stored, others = list(self._stored), list(self._others)
        at = 0
        for placed in others:
            while at < len(stored) and stored[at] < placed and may_load():
                at += 1
                yield stored[at - 1][0], stored[at - 1][2]
            yield placed[0], placed[2]
        while at < len(stored) and may_load():
            at += 1
            yield stored[at - 1][0], stored[at - 1][2]

    def last(self, fits: Callable[[Entry], bool]) -> tuple[int, Entry] | None:
        """Of those that are in host memory, are asked for and fit, the one whose turn comes last;
        of equals the one that came first."""
        self._take_in()
        found: tuple[int, Entry] | None = None
        for order, _, entry in reversed(self._others):
            if found is not None and order < found[0]:
                break
            if fits(entry):
                found = order, entry
        return found

    def drop_settled(self, is_known: Callable[[Entry], bool]) -> None:
        """Forget those that are at rest, and those that are known no more."""
        for entry in self._doubtful:
            if entry.is_settled or not is_known(entry):
                self._displace(entry)
                self._attended.pop(entry, None)
                self._misplaced.pop(entry, None)
                del self._arrivals[entry]
        self._doubtful.clear()

    def check_integrity(self, known: Iterable[Entry]) -> None:
        """Everything that would be found by looking at all is known. Raises IntegrityError."""
        self._take_in()
        for entry in known:
            demand = entry.demand()
            if entry not in self._arrivals:
                if not entry.is_settled:
                    raise IntegrityError(f"{entry.version.name} is to be moved and not listed")
            elif (entry in self._attended) != _is_attended(entry):
                raise IntegrityError(f"{entry.version.name} needs attention, or no more")
            elif (None if demand is None else self._place(entry, demand)) != self._places.get(
                entry
            ):
                raise IntegrityError(f"{entry.version.name} has another place in the order")

    def _place(self, entry: Entry, demand: int) -> tuple[list[_Placed], _Place]:
        among = self._stored if entry.state is State.STORED else self._others
        return among, (demand, self._arrivals[entry])

    def _take_in(self) -> None:
        for entry in self._misplaced:
            if _is_attended(entry):
                self._attended[entry] = None
            else:
                self._attended.pop(entry, None)
            demand = entry.demand()
            self._displace(entry)
            if demand is not None:
                among, place = self._places[entry] = self._place(entry, demand)
                insort(among, (*place, entry))
        self._misplaced.clear()

    def _displace(self, entry: Entry) -> None:
        known = self._places.pop(entry, None)
        if known is not None:
            among, place = known
            del among[bisect_left(among, place, key=itemgetter(0, 1))]


def _is_attended(entry: Entry) -> bool:
    return bool(entry.drains or entry.calls) or entry.is_moving

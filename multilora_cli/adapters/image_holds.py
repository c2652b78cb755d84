"""Which warm images residency holds for adapters that somebody wants on the device."""

from multilora_cli.adapters.lease import State
from multilora_cli.adapters.pending import Pending
from multilora_cli.adapters.residency_entry import Entry, WarmTier


class ImageHolds:
    """Takes and gives back holds on images. `released` counts: a load that found no room in host
    memory is tried again only once it has grown."""

    def __init__(self, warm: WarmTier) -> None:
        self._warm = warm
        self.released = 0

    def take(self, entry: Entry) -> bool:
        """Hold the entry's image; False: it has left host memory."""
        if entry.image is None:
            entry.image = self._warm.hold(entry.digest)
        return entry.image is not None

    def release(self, entry: Entry) -> None:
        """Give the hold back, if there is one."""
        if entry.image is not None:
            entry.image = None
            self._warm.release(entry.digest)
            self.released += 1

    def unhold(self, entry: Entry) -> None:
        """Let go of a warm image nobody wants on the device; it stays within the host budget."""
        if entry.state is State.WARM and entry.image is not None and not entry.wants_hot():
            self.release(entry)

    def unpin(self, entry: Entry) -> None:
        """Its image may leave host memory: there may be room now."""
        self._warm.pin(entry.digest, False)
        self.released += 1

    def drop(self, entry: Entry) -> int:
        """Let the image leave host memory; bytes freed."""
        self.release(entry)
        freed = self._warm.drop(entry.digest)
        self.released += 1
        return freed

    def give_way(self, entry: Entry, pending: Pending) -> None:
        """Let go of the image of the last in the order that waits, so that `entry` can load."""
        mine = entry.demand()
        last = pending.last(lambda other: other.state is State.WARM and other.image is not None)
        if mine is not None and last is not None and last[0] > mine:
            self.release(last[1])

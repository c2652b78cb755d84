"""Pages of the adapters that are pinned to the device: no other adapter can ever have them."""

from collections.abc import Callable, Mapping

from multilora_cli.adapters.residency_entry import Entry


class PinnedPages:
    """Counts over the placed adapters; counted again where a pinned one came, went or changed."""

    def __init__(self, placed: Mapping[str, Entry], changed: Callable[[], None]) -> None:
        """`changed` is called when `total` did."""
        self._placed = placed
        self._changed = changed
        self.total = 0

    def recount(self) -> None:
        """A pin changed."""
        before, self.total = self.total, sum(map(_pages, self._placed.values()))
        if self.total != before:
            self._changed()

    def moved(self, entry: Entry) -> None:
        """An adapter came to the device or left it."""
        if entry.pin == "hot":
            self.recount()

    def beside(self, entry: Entry) -> int:
        """Pages of those other than `entry`."""
        return self.total - _pages(entry)


def _pages(entry: Entry) -> int:
    if entry.pin != "hot" or entry.placement is None:
        return 0
    return len(entry.placement.pages)

"""Which digests changed since somebody was told of them: asking each of ten thousand every second
kept the loop for 32 ms."""

from collections.abc import Callable, Iterable


class Untold:
    """Digests in the order in which they changed. One thread."""

    def __init__(self, left_host: Callable[[], Iterable[str]]) -> None:
        """`left_host`: digests whose images gave way to others since the last call."""
        self._left_host = left_host
        self._changed: dict[str, None] = {}

    def add(self, digest: str) -> None:
        """Its state, leases, calls, pin, use or images changed, or it is known no more."""
        self._changed[digest] = None

    def take(self) -> list[str]:
        """Those since the last call."""
        for digest in self._left_host():
            self.add(digest)
        changed = list(self._changed)
        self._changed.clear()
        return changed

"""Loads under way: at most one a digest, at most so many at once."""

from collections.abc import Callable
from concurrent.futures import Executor

from multilora_cli.adapters.hot_tier import Image
from multilora_cli.adapters.residency_entry import Entry, WarmTier


class Loads:
    """Hands entries to loader threads and takes what these made. `now` is monotonic seconds."""

    def __init__(
        self,
        warm: WarmTier,
        loaders: Executor,
        most: int,
        now: Callable[[], float],
        notify: Callable[[], None],
    ) -> None:
        self._warm = warm
        self._loaders = loaders
        self._most = most
        self._now = now
        self._notify = notify  # on a loader thread, whenever a load ends
        self._running = 0

    @property
    def has_room(self) -> bool:
        """Whether a thread is free."""
        return self._running < self._most

    def start(self, entry: Entry) -> bool:
        """Read and convert the entry's files; False: every thread is busy."""
        if not self.has_room:
            return False
        self._running += 1
        entry.started_at = self._now()
        entry.loading = self._loaders.submit(self._warm.load, entry.version)
        entry.loading.add_done_callback(lambda _: self._notify())
        return True

    def take(self, entry: Entry) -> Image | None:
        """The image, held once, of a load that ended; None: it goes on. Raises what it raised."""
        future = entry.loading
        if future is None or not future.done():
            return None
        entry.loading = None
        self._running -= 1
        image = future.result()
        entry.loads += 1
        entry.load_s = max(self._now() - entry.started_at, 1e-4)
        entry.num_bytes = self._warm.nbytes(entry.digest)
        return image

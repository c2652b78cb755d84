"""One lock a key, that exists as long as somebody holds or awaits it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeyedLocks:
    """Holders of one key wait for each other, holders of different keys do not."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # with holders and waiters

    @property
    def idle(self) -> bool:
        """Whether nobody holds or awaits any key."""
        return not self._locks

    @contextmanager
    def holding(self, key: str) -> Iterator[None]:
        """Alone with `key`."""
        with self._guard:
            lock, count = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, count + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, count = self._locks[key]
                if count == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, count - 1)

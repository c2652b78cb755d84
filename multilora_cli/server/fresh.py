"""Random names and seeds that nobody can guess.

The system's random bytes, 4 KiB at a time: a request needs some three times, and a system call
each took 60 us of it in a sandbox that intercepts them.
"""

import os
import threading

_POOL_BYTES = 4096


class Fresh:
    """Hands every byte out once. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """Some bytes, at most 4096."""
        with self._lock:
            if self._at + count > len(self._pool):
                self._pool, self._at = os.urandom(_POOL_BYTES), 0
            self._at += count
            return self._pool[self._at - count : self._at]


_fresh = Fresh()


def fresh_id() -> str:
    """32 hexadecimal digits."""
    return _fresh.take(16).hex()


def fresh_seed() -> int:
    """63 bits."""
    return int.from_bytes(_fresh.take(8), "little") >> 1

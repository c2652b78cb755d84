"""What fetching has in common: limits, kinds of failure, tries, and the slowest rate allowed."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How long and how much a fetch may take. Times in seconds."""

    connect_s: float = 5.0
    stall_s: float = 30.0  # without a byte, and the window over which the rate is measured
    floor_bytes_per_s: float = 64 * 1024
    tries: int = 4
    backoff_s: float = 0.5  # before the second try, doubled before each later one
    total_s: float = 120.0  # no try starts later than this after the first of the same thing
    down_s: float = 30.0  # an origin that could not be connected to is left alone that long
    file_bytes: int = 4 * 2**30
    shards: int = 256


class FetchError(Exception):
    """Why something was not fetched, in words that hold no key and no query string."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class TransientError(FetchError):
    """May go well when tried again; `no_contact`: the origin could not even be connected to."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, no_contact: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.no_contact = no_contact


class RefusedError(FetchError):
    """Will not go well when tried again: no access, no such thing, or not what we accept."""


class MissingError(RefusedError):
    """The origin has no such thing."""


class ChangedError(FetchError):
    """An object is no longer the one that was looked up: look all of them up again."""


class CorruptError(FetchError):
    """Bytes that are not those of the digest that was recorded or promised."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its origin; `version` is what the origin calls these very bytes."""

    name: str
    size: int
    version: str
    sha256: str | None = None  # of the whole file, where the origin says it


def host_of(endpoint: str) -> str:
    """Host and port of a URL as they are told: without scheme, user and path."""
    return endpoint.partition("://")[2].rpartition("@")[2].partition("/")[0]


class Origin(Protocol):
    """One adapter at a hub or in a bucket. Methods raise FetchError."""

    def revision(self) -> str | None:
        """The commit that everything below is read from; None where there is no such thing."""
        ...

    def look_up(self, names: Sequence[str]) -> dict[str, RemoteFile]:
        """Those of `names` that lie directly in the adapter's folder."""
        ...

    def read(self, file: RemoteFile) -> Iterator[bytes]:
        """The bytes of exactly this version, as they come."""
        ...


@dataclass(slots=True)
class Tries:
    """Tries again after transient failures, until tries or time are used up."""

    limits: FetchLimits
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def run(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` gives. Raises its last TransientError, any other error at once."""
        number, until = 1, self.clock() + self.limits.total_s
        while True:
            try:
                return attempt()
            except TransientError as error:
                wait = self._wait(number, error, until - self.clock())
                if wait is None:
                    raise
            self.sleep(wait)
            number += 1

    def _wait(self, number: int, error: TransientError, left: float) -> float | None:
        """Seconds to the next try; None: there is none."""
        if number >= self.limits.tries:
            return None
        wait = self.limits.backoff_s * 2.0 ** (number - 1) * (0.5 + self.jitter())
        wait = max(wait, error.retry_after_s or 0.0)
        return wait if wait < left else None


class RateFloor:
    """Ends a transfer that brings fewer bytes over a window than the slowest rate allowed."""

    def __init__(self, limits: FetchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._since = clock()
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Some more bytes came. Raises TransientError."""
        self._num_bytes += num_bytes
        elapsed = self._clock() - self._since
        if elapsed < self._limits.stall_s:
            return
        rate = self._num_bytes / elapsed
        if rate < self._limits.floor_bytes_per_s:
            raise TransientError(
                f"too slow: {rate:,.0f} bytes/s over {elapsed:.3g} s, at least"
                f" {self._limits.floor_bytes_per_s:,.0f} are expected"
            )
        self._since += elapsed
        self._num_bytes = 0

"""When what a step may still read can be overwritten.

Steps are numbered as they are handed to the device. A page or slot that is given back may still
be read by every step launched so far, so it is kept behind the last of them. Work on the step
stream comes after those steps by itself; only the copy stream has to wait for their end. On a CPU
a step has ended when it returns, so nothing ever waits.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class StepClock:
    """Numbers the steps given to the device and remembers the last one that ended."""

    def __init__(self) -> None:
        self.launched = 0
        self.completed = 0

    def launch(self) -> int:
        """The number of the step that is handed to the device now."""
        self.launched += 1
        return self.launched

    def complete(self, step: int) -> None:
        """Every step up to `step` has ended on the device."""
        self.completed = max(self.completed, step)


class FenceQueue(Generic[T]):
    """Things given back, in order, each behind the last step that may read it."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._queue: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._queue)

    def put(self, items: Iterable[T]) -> None:
        """Keep `items` until the last launched step has ended."""
        step = self._clock.launched
        self._queue.extend((step, item) for item in items)

    def take_past(self) -> list[T]:
        """Remove and return what no step can read any more."""
        past = []
        while self._queue and self._queue[0][0] <= self._clock.completed:
            past.append(self._queue.popleft()[1])
        return past

    def take_oldest(self, count: int) -> list[T]:
        """Remove and return `count` items for a writer on the step stream, oldest first."""
        return [self._queue.popleft()[1] for _ in range(count)]

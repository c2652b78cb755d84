"""Threads that share the work of one load, and memory that loads use one after the other."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Job = Callable[[], None]


class Crew:
    """Runs jobs on the calling thread and on idle ones of `executor`.

    Whoever asks does every job that no other thread has begun, so nobody waits for a thread to come
    free, and threads of `executor` itself may ask.
    """

    def __init__(self, executor: Executor | None = None, helpers: int = 0) -> None:
        """Args:
        executor: where the helpers are; None: everything is done by the calling thread.
        helpers: most threads beside the calling one for one list of jobs.
        """
        self._executor = executor
        self._helpers = helpers
        self.buffers: deque[torch.Tensor] = deque()  # see WeightFiles

    @property
    def width(self) -> int:
        """Most threads that work on one list of jobs.

        Jobs should be about as few, in calls that take long. A thread that waits for the
        interpreter is awake 0.05 ms and more after it is let go, and who comes back from a shorter
        call has it again by then: of two threads whose calls take 0.1 ms one does all the work.
        """
        return 1 if self._executor is None else 1 + self._helpers

    def begin(self, job: Job) -> Job:
        """Let another thread do `job`; gives what returns once it is done, and raises what it
        raised."""
        if self._executor is None:
            return job
        future = self._executor.submit(job)

        def finish() -> None:
            if future.cancel():
                job()
            else:
                future.result()

        return finish

    def each(self, jobs: Iterable[Job]) -> None:
        """Do all jobs, in any order. Once one has failed no other is begun, and it is raised."""
        listed = list(jobs)
        left = iter(listed)  # one for all threads: every job is taken once

        def work() -> None:
            try:
                for job in left:
                    job()
            except BaseException:
                for _ in left:
                    pass
                raise

        futures: list[Future[None]] = []
        if self._executor is not None:
            helpers = min(self._helpers, len(listed) - 1)
            futures = [self._executor.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            begun = [future for future in futures if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()

"""What a request holds while the engine works for it: a queue of deltas and the right to abort."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from multilora_cli.engine.messages import Delta, Submit
from multilora_cli.errors import RequestError


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Ticket:
    """One HTTP request's sequences. Use it as a context: leaving aborts what is unfinished."""

    def __init__(self, submits: Sequence[Submit], abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._first_id = submits[0].request_id
        self.sizes = {submit.request_id: submit.n for submit in submits}  # sequences of each
        self._open = {request_id: set(range(n)) for request_id, n in self.sizes.items()}
        self._deltas: list[Delta] = []
        self._failure: RequestError | ClientGone | None = None
        self._listener: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in list(self._open):
            self._abort(request_id)
        self._open.clear()

    @property
    def ended(self) -> bool:
        """Whether all sequences ended and all that they said was taken."""
        return not self._open and not self._deltas

    def place(self, delta: Delta) -> int:
        """Which of the submitted prompts a delta belongs to."""
        return delta.request_id - self._first_id

    def push(self, delta: Delta) -> bool:
        """Keep what a step added until `tell`. True: the request id has no open sequence left."""
        indices = self._open.get(delta.request_id)
        if indices is None:
            return True
        if delta.index not in indices:
            return False  # cut at a stop string before; the engine does not know yet
        self._deltas.append(delta)
        if delta.finish_reason is None and delta.fault is None:
            return False
        return self._end(delta.request_id, delta.index)

    def tell(self) -> None:
        """Call the listener: a step's deltas are all here, or something failed."""
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` on every `tell`. It must not raise."""
        self._listener = listener

    def cut(self, delta: Delta) -> None:
        """End a sequence here; the engine stops once all of its request have ended."""
        if delta.index in self._open.get(delta.request_id, ()) and self._end(
            delta.request_id, delta.index
        ):
            self._abort(delta.request_id)

    def fail(self, error: RequestError | ClientGone) -> None:
        """End every open sequence with one error, after what has already come."""
        if self._failure is None:
            self._failure = error
            self.tell()

    def take(self) -> list[Delta]:
        """Deltas since the last call. Raises what failed, once all that came before is taken."""
        if isinstance(self._failure, ClientGone):
            raise self._failure
        if not self._deltas and self._open and self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas

    async def next(self) -> list[Delta]:
        """Deltas since the last call, at least one; none once all ended. Raises what failed."""
        while not (deltas := self.take()) and not self.ended:
            told = asyncio.get_running_loop().create_future()
            self.listen(lambda told=told: told.done() or told.set_result(None))  # type: ignore[misc]
            try:
                await told
            finally:
                self.listen(None)
        return deltas

    def _end(self, request_id: int, index: int) -> bool:
        self._open[request_id].discard(index)
        if self._open[request_id]:
            return False
        del self._open[request_id]
        return True

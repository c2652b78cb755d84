"""Threads for work that may take minutes: fetching and reading adapters.

Daemon threads, since a process that was told to stop must not wait for a slow download; what it
leaves on disk is swept by the next one.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Threads:
    """At most `limit` pieces of work at a time; others wait in the order they came."""

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What `function` gives, or what it raises. Its thread goes on if the caller is gone."""
        loop = asyncio.get_running_loop()
        async with self._slots:
            done: asyncio.Future[Result] = loop.create_future()

            def settle(result: Result | None, error: BaseException | None) -> None:
                if done.cancelled():
                    return
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(result)  # type: ignore[arg-type]

            def work() -> None:
                result, error = None, None
                try:
                    result = function(*arguments)
                except BaseException as raised:
                    error = raised
                try:
                    loop.call_soon_threadsafe(settle, result, error)
                except RuntimeError:
                    return  # the loop has ended, and with it everybody who wanted to know

            threading.Thread(target=work, daemon=True, name="adapters").start()
            return await done

"""Replies about everything there is: made and sent in pieces, so that no stream waits for them.

What ten thousand adapters are told in takes 0.1 s to make. Whoever makes a reply here gives the
others on the event loop their turn after every millisecond of it, and so does its sending.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilora_cli.server.ticket import ClientGone

TURN_S = 0.001
_PIECE_BYTES = 256 * 2**10  # of a reply, in one send: 0.1 ms
Item = TypeVar("Item")
_encode = msgspec.json.Encoder().encode


async def in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """The items; after each millisecond of them the others on the loop have their turn."""
    began_s = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began_s > TURN_S:
            await asyncio.sleep(0)
            began_s = time.perf_counter()


async def json_array(items: Iterable[Item], row: Callable[[Item], Any]) -> list[bytes]:
    """A JSON array of the rows of `items`, in pieces."""
    parts = [b"["]
    async for batch in in_turns(_batches(items)):
        parts += (_encode([row(item) for item in batch])[1:-1], b",")
    parts[max(len(parts) - 1, 1) :] = [b"]"]
    return parts


def json_object(fields: dict[str, Any], arrays: dict[str, list[bytes]]) -> list[bytes]:
    """A JSON object of `fields`, at least one, and behind them of `arrays`, in pieces."""
    parts = [_encode(fields)[:-1]]
    for name, array in arrays.items():
        parts += (b",", _encode(name), b":", *array)
    return [*parts, b"}"]


class LongReply(Response):
    """A good reply whose body comes in pieces."""

    def __init__(self, parts: Sequence[bytes], media_type: str, write_stall_s: float) -> None:
        """A client that reads nothing for `write_stall_s` gets no more."""
        super().__init__(None, media_type=media_type)
        self._parts = parts
        self._write_stall_s = write_stall_s
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: the whole reply. Raises ClientGone."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            for piece in _pieces(self._parts):
                async with asyncio.timeout(self._write_stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            raise ClientGone from None


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """As many at a time as are made within half a millisecond."""
    rest = iter(items)
    while batch := list(islice(rest, 32)):
        yield batch


def _pieces(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are worth a send each."""
    some: list[bytes] = []
    size = 0
    for part in parts:
        some.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            yield b"".join(some)
            some, size = [], 0
    yield b"".join(some)

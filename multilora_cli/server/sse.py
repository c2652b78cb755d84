"""Replies of a run, streamed or whole.

In a stream every delta of a step that belongs to the request goes out in one write. A token
without text (part of a character, a special one, text held back for a stop string) is a chunk with
empty text, so that a client sees when it came. The first chunk of a chat choice carries the role.
`[DONE]` ends a whole stream and nothing else; a failure is an error event, and the stream ends
without `[DONE]`.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilora_cli.engine.messages import TokenLogprobs
from multilora_cli.errors import RequestError
from multilora_cli.server.choice import Ending
from multilora_cli.server.connection import CONNECTION
from multilora_cli.server.contract import error_object, internal_error
from multilora_cli.server.replies import (
    TextLogprobs,
    chat_choice,
    chat_delta,
    chat_logprobs,
    chat_role,
    text_choice,
)
from multilora_cli.server.run import Run, Step
from multilora_cli.server.ticket import ClientGone

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


_MARK = "\0text\0"  # stands for the text of a chunk; nothing after a text holds a null
_encode = msgspec.json.Encoder().encode


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class Columns:
    """Log-probabilities and echoed prompts of a run's choices."""

    def __init__(self, run: Run) -> None:
        self._job = run.job
        self._pieces = run.tokenizer.pieces
        num_top = run.job.num_top or 0
        as_ids = run.job.ids_as_tokens
        self._texts = [TextLogprobs(self._pieces, num_top, as_ids=as_ids) for _ in run.choices]

    def echo(self, index: int) -> str:
        """The prompt's text where the request wants it before the answer."""
        return self._job.echo[index // self._job.n] if self._job.echo is not None else ""

    def entries(self, step: Step) -> list[TokenLogprobs | None]:
        """The prompt's log-probabilities where they came, then the answer's."""
        return [*(step.delta.prompt_logprobs or ()), *step.growth.logprobs]

    def take(self, index: int, entries: list[TokenLogprobs | None]) -> dict[str, Any] | None:
        """The logprobs object for some entries; None where the request wants none."""
        if self._job.num_top is None:
            return None
        if self._job.frame.kind == "chat":
            known = [entry for entry in entries if entry is not None]
            return chat_logprobs(
                known, self._pieces, self._job.num_top, as_ids=self._job.ids_as_tokens
            )
        prompt = self._job.submits[index // self._job.n].prompt
        return self._texts[index].take(entries, prompt)


class Chunks:
    """Turns steps of one run into the bytes of its stream."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._job = run.job
        self._make = chat_delta if run.job.frame.kind == "chat" else text_choice
        self._begun: set[int] = set()
        self._columns = Columns(run)
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, steps: list[Step]) -> bytes:
        """All chunks of some steps, in order."""
        return b"".join([self._events(step) for step in steps])

    def last(self) -> bytes:
        """What follows the last chunk of a whole stream."""
        if not self._job.include_usage:
            return DONE
        frame = self._job.frame
        return event(frame.chunk([]) | {"usage": frame.usage(self._run.usage)}) + DONE

    def _events(self, step: Step) -> bytes:
        """Almost every step adds nothing but text, between bytes that are always the same."""
        growth, index = step.growth, step.choice.index
        around = self._plain.get(index)
        if around is not None and growth.ending.finish_reason is None:
            told = growth.text or step.delta.token_ids
            return around[0] + _encode(growth.text) + around[1] if told else b""
        events = b"".join(map(event, self._chunks(step)))
        job = self._job
        if job.num_top is None and not job.continuous_usage and not job.return_ids:
            chunk = self._chunk(self._make(index, _MARK, None, Ending()))
            head, _, tail = event(chunk).rpartition(_encode(_MARK))
            self._plain[index] = head, tail
        return events

    def _chunks(self, step: Step) -> Iterator[dict[str, Any]]:
        index = step.choice.index
        first = index not in self._begun
        self._begun.add(index)
        text = step.growth.text
        if self._job.frame.kind == "chat":
            if first:
                yield self._chunk(chat_role(index))
        elif first:
            text = self._columns.echo(index) + text
        entries = self._columns.entries(step)
        ended = step.growth.ending.finish_reason is not None
        if text or ended or entries or step.delta.token_ids:
            logprobs = self._columns.take(index, entries) if entries else None
            choice = self._make(index, text, logprobs, step.growth.ending)
            yield self._chunk(choice | self._ids(step, first))

    def _ids(self, step: Step, first: bool) -> dict[str, Any]:
        """vLLM's fields: the answer's new token ids and, once, the prompt's."""
        if not self._job.return_ids:
            return {}
        prompt = self._job.submits[step.choice.index // self._job.n].prompt
        ids = {"prompt_token_ids": prompt} if first else {}
        return {"token_ids": list(step.growth.token_ids), **ids}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._job.frame.chunk([choice])
        if self._job.continuous_usage:
            chunk["usage"] = self._job.frame.usage(self._run.usage)
        elif self._job.include_usage:
            chunk["usage"] = None
        return chunk


async def whole_reply(run: Run, first: list[Step]) -> dict[str, Any]:
    """The reply of a run that is not streamed, once all its answers have ended."""
    job, columns = run.job, Columns(run)
    texts: list[list[str]] = [[] for _ in run.choices]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in run.choices]
    ids: list[list[int]] = [[] for _ in run.choices]

    def collect(steps: list[Step]) -> bool:
        for step in steps:
            index = step.choice.index
            texts[index].append(step.growth.text)
            logprobs[index] += columns.entries(step)
            ids[index] += step.growth.token_ids
        return True

    collect(first)
    await run.relay(collect)
    choices = []
    make = chat_choice if job.frame.kind == "chat" else text_choice
    for index, choice in enumerate(run.choices):
        text = columns.echo(index) + "".join(texts[index])
        shown = make(index, text, columns.take(index, logprobs[index]), choice.ending)
        if job.return_ids:
            prompt = job.submits[index // job.n].prompt
            shown |= {"token_ids": ids[index], "prompt_token_ids": prompt}
        choices.append(shown)
    return job.frame.reply(choices, run.usage)


class Body(Protocol):
    """Where a stream is written to (connection.ChunkedBody)."""

    @property
    def is_full(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...


class AsgiBody:
    """The same by ASGI messages, for servers that are not ours: each piece waits for `drain`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending = b""

    @property
    def is_full(self) -> bool:
        """Whether something was written that is not sent."""
        return bool(self._pending)

    def write(self, data: bytes) -> None:
        """Keep `data` for `drain`."""
        self._pending += data

    async def drain(self) -> None:
        """Send what was written."""
        data, self._pending = self._pending, b""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class EventStream(Response):
    """The streamed reply of a run whose first steps are already here.

    A step of the engine is encoded and written when its message comes, for all clients in one
    turn of the event loop; a task wakes only for the end of its stream or for a slow client.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, first: list[Step], write_stall_s: float) -> None:
        self._run = run
        self._first = first
        self._write_stall_s = write_stall_s
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, headers=headers | run.headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: the whole stream; leaving early, for whatever reason, aborts the run."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            connection = scope.get("state", {}).get(CONNECTION)
            body = AsgiBody(send) if connection is None else connection.body()
            last = await self._stream(body)
            async with asyncio.timeout(self._write_stall_s):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except (ClientGone, TimeoutError):
            pass  # nobody reads any more
        finally:
            self._run.close()

    async def _stream(self, body: Body) -> bytes:
        """Write all but the last event, which is the stream's end or an error."""
        chunks = Chunks(self._run)

        def write(steps: list[Step]) -> bool:
            body.write(chunks.encode(steps))
            return not body.is_full

        try:
            write(self._first)
            while not await self._run.relay(write):
                await self._drain(body)
            await self._drain(body)
            return chunks.last()
        except RequestError as error:
            await self._drain(body)
            return event(error_object(error))
        except (ClientGone, TimeoutError, asyncio.CancelledError):
            raise
        except Exception:
            _log.exception("a stream failed")
            return event(error_object(internal_error()))

    async def _drain(self, body: Body) -> None:
        if body.is_full:
            async with asyncio.timeout(self._write_stall_s):
                await body.drain()

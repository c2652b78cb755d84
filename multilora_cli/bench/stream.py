"""Server-sent events of a streamed answer, read as cheaply as they can be: 2 us an event."""

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

_DONE = b"[DONE]"
_MAX_PENDING = 16 * 2**20


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    adapter: Any = None  # ours: the version that answered


class _Chunk(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Answer:
    """What one stream has said so far; `times_s` has the arrival of every piece of text."""

    times_s: list[float] = field(default_factory=list)
    last_s: float | None = None  # of the last piece of text or of the finish reason
    model: str | None = None
    adapter: str | None = None  # that really answered, where the server tells
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    done: bool = False  # [DONE] or a finish reason came
    error: str | None = None
    _pending: bytes = b""

    def feed(self, data: bytes, now_s: float) -> int:
        """Take in bytes that arrived at `now_s`; gives how many pieces of text they held."""
        before = len(self.times_s)
        if self._pending:
            data = self._pending + data
        lines = data.split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > _MAX_PENDING:
            self.error, self._pending = "a line of the stream is longer than 16 MiB", b""
        for line in lines:
            if line[:5] == b"data:":
                self._event(line[5:].strip(), now_s)
        return len(self.times_s) - before

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == _DONE:
            self.done = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError:
            self.error = "an event of the stream is not a chunk of OpenAI's shape"
            return
        if chunk.error is not None:
            self.error = _message(chunk.error)
        if self.model is None:
            self.model = chunk.model
        for choice in chunk.choices:
            if _is_piece(choice):
                self.times_s.append(now_s)
                self.last_s = now_s
            if choice.finish_reason is not None:
                self.done, self.last_s = True, now_s
        if chunk.usage is not None:
            self._count(chunk.usage)

    def _count(self, usage: _Usage) -> None:
        self.input_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if isinstance(usage.adapter, dict):
            self.adapter = str(usage.adapter.get("name"))


def _is_piece(choice: _Choice) -> bool:
    """Whether a chunk stands for a token: any text, or an empty one in mid-answer.

    vLLM and we send an empty one where a token is only part of a character. The chunk that opens a
    chat (with a role) and the one that only ends an answer stand for none.
    """
    goes_on = choice.finish_reason is None
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or (choice.text is not None and goes_on)
    if delta.content or delta.reasoning_content:
        return True
    return delta.content is not None and delta.role is None and goes_on


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:500]


def error_message(raw: bytes) -> str:
    """The message in an error body, OpenAI's or FastAPI's; empty where there is none."""
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    found = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or ""
    return " ".join(found.split())[:500] if isinstance(found, str) else ""

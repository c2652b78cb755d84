"""Replies and chunks in OpenAI's shapes."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from multilora_cli.engine.messages import AdapterRef, TokenLogprobs
from multilora_cli.server.choice import Ending, Usage
from multilora_cli.text.pieces import PieceTable

MIN_LOGPROB = -9999.0  # JSON has no -Infinity
Kind = Literal["chat", "text"]
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}
_CHUNKS = {"chat": "chat.completion.chunk", "text": "text_completion"}
_PREFIXES = {"chat": "chatcmpl-", "text": "cmpl-"}


@dataclass(frozen=True)
class Frame:
    """What every reply and chunk of one request repeats."""

    kind: Kind
    model: str  # as the request named it
    adapter: AdapterRef | None
    base_digest: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.id or _PREFIXES[self.kind] + uuid.uuid4().hex)

    @property
    def headers(self) -> dict[str, str]:
        """Which adapter version answers."""
        if self.adapter is None:
            return {}
        return {
            "x-mlora-adapter": self.adapter.name,
            "x-mlora-digest": f"sha256:{self.adapter.digest}",
            "x-mlora-generation": str(self.adapter.generation),
        }

    def reply(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A whole reply."""
        return self._head(_OBJECTS[self.kind]) | {
            "choices": choices,
            "usage": self.usage(usage),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream, without usage."""
        return self._head(_CHUNKS[self.kind]) | {"choices": choices}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Token counts, and the adapter version they were spent on."""
        counts: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if self.adapter is not None:
            counts["adapter"] = {
                "name": self.adapter.name,
                "digest": f"sha256:{self.adapter.digest}",
                "generation": self.adapter.generation,
            }
        return counts

    def _head(self, kind: str) -> dict[str, Any]:
        digest = self.adapter.digest if self.adapter else self.base_digest
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{digest[:12]}" if digest else None,
        }


def chat_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, ending: Ending
) -> dict[str, Any]:
    """A choice of a whole chat reply."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, **ending._asdict()}


def chat_delta(
    index: int, text: str, logprobs: dict[str, Any] | None, ending: Ending
) -> dict[str, Any]:
    """A choice of a chat chunk."""
    delta = {"content": text} if text or ending.finish_reason is None else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, **ending._asdict()}


def text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, ending: Ending
) -> dict[str, Any]:
    """A choice of a text completion, whole or chunk."""
    return {"index": index, "text": text, "logprobs": logprobs, **ending._asdict()}


def chat_role(index: int) -> dict[str, Any]:
    """The first choice of a stream: who speaks."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chat_logprobs(
    logprobs: Sequence[TokenLogprobs], pieces: PieceTable, num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """The logprobs object of chat: chosen tokens, each with its best alternatives."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": id_label(token_id) if as_ids else pieces.label(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(pieces.piece(token_id, skip_special=False)),
        }

    content = []
    for entry in logprobs:
        tops = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        top = [shown(token_id, logprob) for token_id, logprob in tops]
        content.append(shown(entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def id_label(token_id: int) -> str:
    """A token's id in place of its text, which several tokens may share."""
    return f"token_id:{token_id}"


class TextLogprobs:
    """The logprobs object of text completions, with offsets that go on over the chunks."""

    def __init__(self, pieces: PieceTable, num_top: int, *, as_ids: bool = False) -> None:
        self._pieces = pieces
        self._num_top = num_top
        self._label = id_label if as_ids else pieces.label
        self._offset = 0

    def take(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Columns for some tokens; `token_ids` names those without probabilities (the first)."""
        columns: dict[str, list[Any]] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [],
        }  # fmt: skip
        for place, entry in enumerate(logprobs):
            token_id = token_ids[place] if entry is None else entry.token_id
            columns["text_offset"].append(self._offset)
            columns["tokens"].append(self._label(token_id))
            columns["token_logprobs"].append(entry and max(entry.logprob, MIN_LOGPROB))
            columns["top_logprobs"].append(entry and self._top(entry))
            self._offset += len(self._pieces.label(token_id))
        return columns

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        tops = zip(entry.top_ids[: self._num_top], entry.top_logprobs[: self._num_top], strict=True)
        found = {self._label(i): max(logprob, MIN_LOGPROB) for i, logprob in tops}
        found[self._label(entry.token_id)] = max(entry.logprob, MIN_LOGPROB)
        return found

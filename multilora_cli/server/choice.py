"""One answer as it grows: tokens to text, stop strings, log-probabilities, usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multilora_cli.engine.messages import Delta, TokenLogprobs
from multilora_cli.text.detokenizer import Found, StopMatcher
from multilora_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextRules:
    """How a request wants tokens turned into text."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # those that end an answer, end of sequence included


class Growth(NamedTuple):
    """What one delta added to an answer."""

    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


@dataclass
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Choice:
    """One sequence of a request, seen as text."""

    def __init__(self, index: int, tokenizer: Tokenizer, rules: TextRules) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._rules = rules
        self._detokenizer = tokenizer.detokenizer(skip_special=rules.skip_special)
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)

    def add(self, delta: Delta) -> Growth:
        """Take a delta; after a stop string the rest of it is not counted."""
        parts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        ends = delta.finish_reason == "stop"
        for place, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if delta.logprobs is not None:
                logprobs.append(delta.logprobs[place])
            if ends and place == len(delta.token_ids) - 1 and self._is_stop(token_id):
                continue
            found = self._text(token_id)
            if isinstance(found, Found):
                self.finish_reason, self.stop_reason = "stop", found.stop
                return Growth("".join([*parts, found.text]), logprobs, "stop")
            parts.append(found)
        if delta.finish_reason is not None:
            parts.append(self._matcher.flush())
            self.finish_reason = delta.finish_reason
        return Growth("".join(parts), logprobs, self.finish_reason)

    def _text(self, token_id: int) -> str | Found:
        text = self._detokenizer.add(token_id)
        if not text or self.num_tokens <= self._rules.min_tokens:
            return text
        return self._matcher.add(text)

    def _is_stop(self, token_id: int) -> bool:
        """Whether the last token ended the answer; then it is not part of the text."""
        if token_id not in self._rules.stop_ids:
            return False
        self.stop_reason = token_id
        return not self._rules.include_stop

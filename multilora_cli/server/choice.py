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
    told_ids: frozenset[int] = frozenset()  # those of them that the request named


class Ending(NamedTuple):
    """How an answer ended; both None while it goes on."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None  # stop string or id that the request named, as in vLLM


class Growth(NamedTuple):
    """What one delta added to an answer."""

    text: str
    logprobs: list[TokenLogprobs]
    ending: Ending
    token_ids: Sequence[int] = ()  # those that count; what ended it included


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
        self.ending = Ending()
        self._rules = rules
        self._detokenizer = tokenizer.detokenizer(skip_special=rules.skip_special)
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)

    def add(self, delta: Delta) -> Growth:
        """Take a delta; after a stop string the rest of it is not counted."""
        parts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        stop_reason: int | None = None
        ends = delta.finish_reason == "stop"
        for place, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if delta.logprobs is not None:
                logprobs.append(delta.logprobs[place])
            if ends and place == len(delta.token_ids) - 1 and token_id in self._rules.stop_ids:
                stop_reason = token_id if token_id in self._rules.told_ids else None
                if not self._rules.include_stop:
                    continue
            found = self._text(token_id)
            if isinstance(found, Found):
                self.ending = Ending("stop", found.stop)
                text = "".join([*parts, found.text])
                return Growth(text, logprobs, self.ending, delta.token_ids[: place + 1])
            parts.append(found)
        if delta.finish_reason is not None:
            parts.append(self._matcher.flush())
            self.ending = Ending(delta.finish_reason, stop_reason)
        return Growth("".join(parts), logprobs, self.ending, delta.token_ids)

    def _text(self, token_id: int) -> str | Found:
        text = self._detokenizer.add(token_id)
        if not text or self.num_tokens <= self._rules.min_tokens:
            return text
        return self._matcher.add(text)

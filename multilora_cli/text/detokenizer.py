"""Token ids to text as they arrive, and stop strings in that text.

Guarantees: the joined parts equal the decoding of all ids; a character is never split over
parts; bytes of a character that was never finished are dropped; the work is O(new text).
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from multilora_cli.text.pieces import PieceTable

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One sequence's output: ids in, whole characters out."""

    def __init__(self, pieces: PieceTable, *, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._whole = pieces.whole_texts(skip_special=skip_special)
        self._decoder = _UTF8(errors="replace")
        self._open = False  # in the middle of a character

    def add(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is still open."""
        if not self._open and (text := self._whole.get(token_id)) is not None:
            return text
        piece = self._pieces.piece(token_id, skip_special=self._skip_special)
        text = self._decoder.decode(piece)
        was_open, self._open = self._open, bool(self._decoder.getstate()[0])
        if not was_open and not self._open:
            self._whole[token_id] = text
        return text


class Found(NamedTuple):
    """A stop string that ended the text."""

    stop: str
    text: str  # what may still be sent; ends before the stop string


class StopMatcher:
    """Finds the first stop string to complete; one automaton step a character and string.

    Text that might be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._failures = [_failure_table(stop) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def add(self, text: str) -> str | Found:
        """The text that is safe to send now, or the stop that ended it."""
        if not self._stops:
            return text
        pending = self._held + text
        start = len(self._held)
        for place, char in enumerate(text, start + 1):
            ended = self._step(char)
            if ended:
                stop = max(ended, key=len)
                end = place if self._include else place - len(stop)
                return Found(stop, pending[: max(end, 0)])
        hold = max(self._matched)
        cut = len(pending) - hold
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> list[str]:
        ended = []
        for index, stop in enumerate(self._stops):
            failure = self._failures[index]
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                ended.append(stop)
                matched = failure[matched - 1]
            self._matched[index] = matched
        return ended


def _failure_table(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: length of the longest proper prefix that is a suffix, per position."""
    table = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = table[length - 1]
        if stop[length] == stop[place]:
            length += 1
        table[place] = length
    return table

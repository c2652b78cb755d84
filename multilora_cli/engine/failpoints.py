"""Faults on order, for tests: off unless EngineConfig.debug is set.

A failpoint is a place and an action, `{"row:7": "raise@3", "load": "sleep:0.5"}`:

    places   row:R       request R's row is prepared          step    a step begins
             forward:R   a forward pass that holds R's row    load    an adapter is loaded
             logits:R    request R's logits are computed
    actions  raise | sleep:SECONDS | exit | nan (logits only)
    @N       at the N-th hit only; @N+ from the N-th on; otherwise at every hit
"""

import os
import time
from collections import Counter
from collections.abc import Mapping

EXIT_STATUS = 99


class FailpointError(Exception):
    """What a failpoint raises."""


class Failpoints:
    """Counts hits and acts on those that are due."""

    def __init__(self, actions: Mapping[str, str] | None = None) -> None:
        self._actions = dict(actions or {})
        self._hits: Counter[str] = Counter()

    @property
    def armed(self) -> bool:
        """Whether there is any action."""
        return bool(self._actions)

    def arm(self, actions: Mapping[str, str]) -> None:
        """Replace all actions and forget the hits."""
        self._actions = dict(actions)
        self._hits.clear()

    def hit(self, place: str, request_id: int | None = None) -> str | None:
        """Act on `place`; returns an action the caller has to carry out, such as nan."""
        if not self._actions:
            return None
        name = place if request_id is None else f"{place}:{request_id}"
        action = self._actions.get(name)
        if action is None:
            return None
        self._hits[name] += 1
        verb, _, when = action.partition("@")
        if when and not self._is_due(when, self._hits[name]):
            return None
        return self._act(name, verb)

    def _is_due(self, when: str, hits: int) -> bool:
        return hits >= int(when[:-1]) if when.endswith("+") else hits == int(when)

    def _act(self, name: str, verb: str) -> str | None:
        kind, _, value = verb.partition(":")
        if kind == "raise":
            raise FailpointError(f"failpoint {name}")
        if kind == "sleep":
            time.sleep(float(value))
            return None
        if kind == "exit":
            os._exit(EXIT_STATUS)
        return kind

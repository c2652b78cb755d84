"""Why sequences wait: how many at the last decision, and how long in all, by reason."""

from collections import Counter
from typing import Literal, get_args

from multilora_cli.adapters.lease import Obstacle

Reason = Literal[
    "place",  # max_num_seqs sequences run, or the step has no token left
    "kv_pages",  # no pages for it, or for one before it
    "adapter_load",  # the adapter's bytes are on their way
    "adapter_slot",  # every slot of the device belongs to an adapter in use
    "adapter_pages",  # no pages for the adapter
    "adapter_budget",  # max_loras or max_adapter_bytes of distinct adapters run
    "adapter_drain",  # an evict call that came before it is not finished
    "turn",  # one that waited too long goes first
]
REASONS: tuple[Reason, ...] = get_args(Reason)
_OF_LEASE: dict[Obstacle, Reason] = {
    "load": "adapter_load",
    "slot": "adapter_slot",
    "pages": "adapter_pages",
    "drain": "adapter_drain",
}


class Waits:
    """Counts between one decision and the next. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(REASONS, 0.0)
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A decision is made: what waited until now has waited for its reason."""
        for reason, count in self.waiting.items():
            self.seconds[reason] += count * (now - self._since)
        self.waiting.clear()
        self._since = now

    def count(self, reason: Reason, sequences: int = 1) -> None:
        """So many sequences wait for this."""
        self.waiting[reason] += sequences


def reason_of(obstacle: Obstacle) -> Reason:
    """What a lease waits for, in the words of a sequence."""
    return _OF_LEASE[obstacle]

"""In which order sequences go: first come first served within each share, shares side by side.

A share is a tenant or an adapter. This is start-time fair queueing with the prices of virtual token
counters (1 a prompt token, 2 a generated one): each request begins where its share's last one will
end, so a share with a thousand requests waiting does not push back one that sends its first. How
long an answer gets is unknown when it arrives: it is charged what this share's answers took so far,
and the difference is settled when it ends, for the requests of the share that still wait too. A
share that was idle begins at the present: it saves nothing up.

One number orders a sequence everywhere, in the queues, for adapter loads and for what is evicted
for whom, so that no two rules wait for one another.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from multilora_cli.engine.sequence import Sequence
from multilora_cli.memory.page_pool import IntegrityError

FairBy = Literal["tenant", "adapter", "none"]

_PROMPT_PRICE, _OUTPUT_PRICE = 1, 2
_UNITS = 16  # of a price, so that weights need no floating point
_ARRIVAL_BITS = 40
_FIRST_GUESS = 128.0  # output tokens of a share's first answer
_LEARN = 0.2
_TOLERANCE = 256 * _UNITS  # of price: places are not moved for less, 128 output tokens


@dataclass(slots=True)
class _Share:
    """One tenant or adapter. Times are virtual: units of price over weight."""

    finish: int = 0  # where its next request begins
    live: int = 0  # sequences that have not ended
    owed: int = 0  # charged too little (or too much, below 0), not yet settled
    output: float = _FIRST_GUESS


class FairOrder:
    """Gives sequences their place, and new places to waiting ones once costs are known."""

    def __init__(self, by: FairBy = "tenant") -> None:
        self._by = by
        self._shares: dict[str, _Share] = {}
        self._live: set[str] = set()  # shares with sequences that have not ended
        self._owing: set[str] = set()  # shares charged wrongly by more than the tolerance
        self._now = 0  # the latest start among those that were taken up

    def share_of(self, tenant: str, digest: str) -> str:
        """Which share a request belongs to."""
        return {"tenant": tenant, "adapter": digest, "none": ""}[self._by]

    def place(self, sequence: Sequence, head: Sequence | None) -> None:
        """Give a sequence that arrives its order. `head` is the first that waits to begin, if any.

        To be settled before where `needs_settling` says so.
        """
        share = self._shares.setdefault(sequence.share, _Share())
        present = self._now if head is None else _start(head)
        begin = share.finish if share.live else max(share.finish, present)
        output = min(share.output, sequence.max_len - sequence.prompt_len)
        sequence.charged = self._cost(sequence, output)
        sequence.order = begin << _ARRIVAL_BITS | sequence.seq_id
        share.finish = begin + sequence.charged
        share.live += 1
        self._live.add(sequence.share)

    def present(self, arrival: int) -> int:
        """The order of a load call that arrives now."""
        return self._now << _ARRIVAL_BITS | arrival

    def taken_up(self, sequence: Sequence) -> None:
        """It runs: virtual time has come to its start."""
        self._now = max(self._now, _start(sequence))

    def ended(self, sequence: Sequence) -> None:
        """Its cost is known now; what was charged wrongly is settled with the share."""
        share = self._shares[sequence.share]
        share.live -= 1
        if sequence.num_outputs:
            share.output += _LEARN * (sequence.num_outputs - share.output)
        share.owed += self._cost(sequence, sequence.num_outputs) - sequence.charged
        if abs(share.owed) > _TOLERANCE:
            self._owing.add(sequence.share)
        if not share.live:
            self._live.remove(sequence.share)
        if not self._live:  # nobody competes: the next to come begin side by side
            self._shares.clear()
            self._owing.clear()

    def needs_settling(self, newcomer: str | None = None) -> bool:
        """Whether places have to change; a share alone has nobody to be compared with."""
        others = self._live if newcomer is None else self._live | {newcomer}
        return bool(self._owing) and len(others) > 1

    def settle(self, waiting: Iterable[Sequence], move: Callable[[Sequence, int], None]) -> None:
        """Shift the waiting sequences of shares that were charged wrongly, by `move`.

        One that ran before keeps its place: it goes on where it was.
        """
        for sequence in waiting:
            owed = self._shares[sequence.share].owed
            if owed and sequence.resumed_len < 0:
                for each in (sequence, *sequence.children):
                    move(each, max(each.order + (owed << _ARRIVAL_BITS), each.seq_id))
        for name in self._owing:
            share = self._shares[name]
            share.finish = max(share.finish + share.owed, 0)
            share.owed = 0
        self._owing.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every share counts exactly its live sequences."""
        live = Counter(sequence.share for sequence in sequences)
        counted = {name: share.live for name, share in self._shares.items() if share.live}
        if live != counted or self._live != set(counted):
            raise IntegrityError(f"shares count {counted}, their sequences are {dict(live)}")

    def _cost(self, sequence: Sequence, outputs: float) -> int:
        """Of a request's answers the first pays for the prompt."""
        prompt = 0 if sequence.index else sequence.prompt_len * _PROMPT_PRICE
        price = (prompt + outputs * _OUTPUT_PRICE) * _UNITS / sequence.weight
        return max(int(price), 1)


def _start(sequence: Sequence) -> int:
    return sequence.order >> _ARRIVAL_BITS

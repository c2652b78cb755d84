"""What the scheduler decided for one step, and what the step produced: values.

Those that exist once a row are tuples: they are made several hundred times a step, and take a third
of the time that frozen dataclasses do.
"""

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from multilora_cli.engine.messages import TokenLogprobs
from multilora_cli.engine.sequence import Sequence


class ScheduledRow(NamedTuple):
    """`length` tokens of one sequence from `start` on; `pages` is its page table, int32.

    `samples` are the sequences that take their next token from the last of them: none inside a
    prompt, the sequence itself, or all answers of a request whose prompt ends here.
    """

    sequence: Sequence
    start: int
    length: int
    pages: "array[int]"
    samples: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Rows of one token come first; `copies` (source, target) pages precede them."""

    rows: tuple[ScheduledRow, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def has_prompts(self) -> bool:
        """Whether a row has more than one token, which is then the last one."""
        return bool(self.rows) and self.rows[-1].length > 1

    @property
    def num_tokens(self) -> int:
        """Token rows of the step."""
        return sum(row.length for row in self.rows)

    @property
    def num_adapters(self) -> int:
        """Distinct adapters of the step."""
        return len({row.sequence.slot for row in self.rows} - {0})


class Sampled(NamedTuple):
    """One new token of one sequence; without meaning where the logits were not finite."""

    token_id: int
    finite: bool
    logprobs: TokenLogprobs | None = None


class RowResult(NamedTuple):
    """What one row produced: a token per entry of `samples`, or why it failed."""

    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens after `start`
    error: str | None = None

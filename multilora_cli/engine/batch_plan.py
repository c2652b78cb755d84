"""What the scheduler decided for one step, and what the step produced: values."""

from array import array
from dataclasses import dataclass

from multilora_cli.engine.messages import TokenLogprobs
from multilora_cli.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
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
    def num_tokens(self) -> int:
        """Token rows of the step."""
        return sum(row.length for row in self.rows)

    @property
    def num_adapters(self) -> int:
        """Distinct adapters of the step."""
        return len({row.sequence.slot for row in self.rows} - {0})


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token of one sequence; without meaning where the logits were not finite."""

    token_id: int
    finite: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row produced: a token per entry of `samples`, or why it failed."""

    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens after `start`
    error: str | None = None

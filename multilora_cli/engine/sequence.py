"""What one sequence is: its tokens, how far it is computed, and what it holds.

The engine may launch a step before it has seen the tokens of the one before. Until then a token is
*pending*: it exists on the device only. It counts in every length here; its value is unknown.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from multilora_cli.adapters.lease import Lease
from multilora_cli.engine.messages import AdapterRef, FinishReason, SamplingParams, TokenLogprobs


class Status(Enum):
    """WAITING holds no page; FORKING is an answer whose prompt another sequence computes."""

    WAITING = "waiting"
    FORKING = "forking"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer to one request. `order` is its place (engine.fair_order): lower goes first."""

    seq_id: int
    request_id: int
    index: int
    order: int  # given when it is admitted
    params: SamplingParams
    tokens: "array[int]"  # prompt and output
    prompt_len: int
    max_len: int  # it ends with this many tokens
    root: bytes  # parent key of its first KV block
    stop_ids: frozenset[int]
    is_plain: bool | None = field(default=None, kw_only=True)  # greedy alone; the runner's note
    share: str = ""  # whose part of the machine it uses
    weight: float = 1.0  # of its share
    charged: int = 0  # what its share was charged for it
    adapter: AdapterRef | None = None
    lease: Lease | None = None  # None: the base model, slot 0
    waiting_since: float = 0.0
    queued_s: float = 0.0  # waited until its prompt was taken up, its adapter's load included
    status: Status = Status.WAITING
    slot: int = 0
    num_computed: int = 0  # tokens whose K and V the launched steps write
    num_pending: int = 0  # sampled by launched steps and not seen yet
    pending_at: int = 0  # the newest pending token's place among the tokens its step sampled
    keys: list[bytes] = field(default_factory=list)  # of its full KV blocks
    children: list["Sequence"] = field(default_factory=list)  # FORKING, until the prompt is done
    resumed_len: int = -1  # tokens when it was taken up again after a preemption; -1: never
    cached_tokens: int = 0
    has_answered: bool = False  # its first delta was sent
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def owner(self) -> str:
        """Whose KV it computes: the adapter's digest, "" for the base."""
        return self.adapter.digest if self.adapter is not None else ""

    @property
    def length(self) -> int:
        """Tokens of prompt and output, pending ones included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far, pending ones included."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that exist but are not computed; 1 for a sequence that decodes."""
        return self.length - self.num_computed

    @property
    def may_go_on(self) -> bool:
        """Whether its next step can be decided before its pending token is seen.

        Not where that token is its last, and not while answers wait to share its pages: the next
        step would write to the page that they copy.
        """
        return not self.num_pending or not (self.children or self.length >= self.max_len)

    @property
    def kv_tokens(self) -> int:
        """Tokens it needs pages for to take one step beyond what is known.

        The last token of an answer is never fed back, so its K and V are never stored.
        """
        return min(self.length + 1, max(self.max_len - 1, self.length))

    @property
    def most_kv_tokens(self) -> int:
        """Tokens it needs pages for at its longest."""
        return max(self.max_len - 1, self.prompt_len)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be sent."""
        return self.params.prompt_logprobs is not None and not self.has_answered

    @property
    def may_be_preempted(self) -> bool:
        """A sequence that was preempted must produce a token before it is preempted again."""
        return self.length > self.resumed_len

    def see(self, token_id: int) -> None:
        """The oldest pending token is known."""
        self.tokens.append(token_id)
        self.num_pending -= 1

    def finish_reason(self) -> FinishReason | None:
        """Why it ends with its last token, which is known; None: it goes on."""
        num_outputs = len(self.tokens) - self.prompt_len
        enough = num_outputs >= self.params.min_tokens
        if num_outputs and enough and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None

"""What the front process and the engine process say to each other.

msgspec structs over one inherited socket pair, length-prefixed msgpack, no pickle and no port.
Token ids only: the engine never sees text. The front resolves names to digests before it submits.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from multilora_cli.adapters.entry import AdapterEntry

FinishReason = Literal["stop", "length", "abort", "error"]
Tier = Literal["cold", "stored", "warm", "hot", "failed"]


class _Message(msgspec.Struct, frozen=True, gc=False):
    """No message is part of a cycle: the collector need not walk those that are kept."""


class SamplingParams(_Message, frozen=True, kw_only=True):
    """How to choose tokens. Ranges are checked in the front before anything is sent."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # the front draws one when the client gives none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included unless ignored
    logprobs: int | None = None  # alternatives beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo)


class AdapterRef(_Message, frozen=True):
    """The exact adapter version a request was admitted with."""

    name: str
    digest: str  # sha256 hex of config and tensors
    path: str  # local folder that holds adapter_config.json and *.safetensors
    generation: int  # grows with every replacement under one name
    # FileIdentity.key of each file that the front hashed. While they are those, nobody hashes them
    # again: 27 MB take 20 to 35 ms of one core, the longest part of a first load.
    files: tuple[tuple[int, int, int, int, int], ...] = ()

    @classmethod
    def of(cls, entry: "AdapterEntry") -> "AdapterRef":
        """The version that a registry's entry stands for; its digest is known."""
        files = () if entry.digest is None else entry.files
        return cls(entry.name, entry.digest or "", entry.path, entry.generation, files)


class Submit(_Message, frozen=True, tag="submit"):
    """Run `n` sequences of one prompt; their deltas carry index 0 to n - 1."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    adapter: AdapterRef | None = None  # None: the base model
    n: int = 1
    cache_salt: str = ""  # prefix-cache entries are shared only within one salt
    tenant: str = ""
    weight: float = 1.0  # of its share, where several compete (engine.fair_order); above 0


class Abort(_Message, frozen=True, tag="abort"):
    """The client is gone: end every sequence of the request and free what it holds."""

    request_id: int


class LoadAdapter(_Message, frozen=True, tag="load"):
    """Read, check and convert an adapter to a warm image; `hot` copies it to the device too."""

    call_id: int
    adapter: AdapterRef
    hot: bool = False
    pin: Literal["hot", "warm"] | None = None
    priority: int = 0


class EvictAdapter(_Message, frozen=True, tag="evict"):
    """Move one digest down: `to` warm frees pages, cold frees pages and host bytes.

    With references left it drains first; the reply comes when the bytes are free. `purge_cache`
    drops the KV prefixes computed with the adapter as well (unload and replace).
    """

    call_id: int
    digest: str
    to: Literal["warm", "cold"] = "warm"
    unpin: bool = False
    purge_cache: bool = False


class Query(_Message, frozen=True, tag="query"):
    """Ask for a snapshot of counters, and of what changed in residency since the last one."""

    call_id: int


class Drain(_Message, frozen=True, tag="drain"):
    """Finish what was admitted within `deadline_s`, end the rest with an error, then exit."""

    deadline_s: float


ToEngine = Submit | Abort | LoadAdapter | EvictAdapter | Query | Drain


class TokenLogprobs(_Message, frozen=True):
    """Log-probability of one token and of the best alternatives at its position."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Fault(_Message, frozen=True):
    """Why a sequence ended without a finish: `code` is one of the error contract's."""

    code: str  # adapter_unavailable, adapter_loading, internal_error, server_shutting_down ...
    message: str
    retry_after_s: float | None = None


class Delta(_Message, frozen=True):
    """What one step added to one sequence.

    The stop id that ended a sequence is the last of `token_ids` (it counts as usage; the front
    leaves it out of the text). Exactly one delta of a sequence has a finish_reason or a fault.
    A request with max_tokens 0 gets one delta without tokens and finish_reason "length".
    """

    request_id: int
    index: int
    token_ids: list[int]  # a stop id that ended the sequence is its last token
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first delta
    finish_reason: FinishReason | None = None
    fault: Fault | None = None
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache; with the first delta
    queued_s: float = 0.0  # waited until its prompt was taken up; with the first delta


class Step(_Message, frozen=True, tag="step"):
    """All deltas of one engine step in one message."""

    deltas: list[Delta]


class AdapterStatus(_Message, frozen=True):
    """Where one digest is and what it costs."""

    digest: str
    tier: Tier
    pages: int
    host_bytes: int
    references: int
    pinned: bool
    loads: int
    hits: int
    last_used_s: float  # age of the last use when this was said; -1: never
    detail: str = ""  # the reason where tier is failed
    load_s: float = 0.0  # its last reading into host memory took so long; 0: none yet
    copy_s: float = 0.0  # its last way to the device, until steps could use it


class AdapterEvent(_Message, frozen=True, tag="adapter"):
    """A digest changed its tier."""

    status: AdapterStatus


class Progress(_Message, frozen=True, tag="progress"):
    """How far the engine's start is: phase name, done and total in the phase's own unit."""

    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True, tag="ready"):
    """The engine serves: what it allocated, beside what was planned."""

    device: str
    dtype: str
    max_model_len: int
    num_pages: int
    page_bytes: int
    planned: dict[str, int]  # bytes by part: weights, pool, workspace, tables
    allocated: dict[str, int]
    notes: list[str] = []  # lines for the start panel


class StartFailed(_Message, frozen=True, tag="start_failed"):
    """The engine could not start: one line for people; the process exits with `exit_code`."""

    message: str
    hint: str | None = None
    exit_code: int = 1


class Snapshot(_Message, frozen=True):
    """Counters of the engine at one moment.

    `adapters` are all that the engine knows; in the reply to a Query those alone that changed since
    the reply before, and `gone` are the digests that it has forgotten since. A status of every
    version a second would cost the loop 32 ms with ten thousand.
    `counters["loop_age_s"]` is how long the step in progress has taken; 0 between steps.
    """

    waiting: int
    running: int
    pages_total: int
    pages_free: int
    pages_kv: int
    pages_cached: int
    pages_adapters: int
    counters: dict[str, float]  # monotonically growing: steps, tokens, preemptions, evictions ...
    running_adapters: dict[str, int]  # digest -> running sequences
    waiting_adapters: dict[str, int]
    adapters: list[AdapterStatus]
    waits: dict[str, int] = {}  # sequences by what they wait for (engine.waits)
    wait_seconds: dict[str, float] = {}  # sequence-seconds waited, by the same
    gone: list[str] = []


class Reply(_Message, frozen=True, tag="reply"):
    """The answer to a call; `fault` is set when it failed."""

    call_id: int
    fault: Fault | None = None
    status: AdapterStatus | None = None
    snapshot: Snapshot | None = None
    freed_pages: int = 0
    freed_host_bytes: int = 0


FromEngine = Step | AdapterEvent | Progress | Ready | StartFailed | Reply

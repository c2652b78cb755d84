"""From logits to tokens, the same for a sequence whatever else is in the batch.

    1  logprobs: log-softmax of the model's own logits, before anything below
    2  penalties.py: logit_bias, suppressed stop ids, repetition, frequency, presence
    3  temperature 0 (below 1e-5): the most likely token; the first one where several are equal
    4  otherwise divide by the temperature, then truncation.py: top_k, top_p, min_p
    5  draw by Gumbel-max with the row's own noise (noise.py)

A row whose logits hold NaN or +inf, or nothing finite, is flagged; its neighbours are untouched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from multilora_cli.layers.noise import log_exponential, row_keys
from multilora_cli.layers.penalties import Penalties, SparseLogits
from multilora_cli.layers.truncation import HEAD, NO_TOP_P, apply_min_p, truncate

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


class RowParams(Protocol):
    """What the sampler reads of a request's parameters (engine.messages.SamplingParams has it)."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> int | None: ...


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits: its request's parameters and what was said so far.

    `prompt` and `output` are read only where a penalty is set, and may be empty elsewhere;
    arrays spare the conversion of long lists. The noise is drawn at position `num_outputs`.
    """

    params: RowParams
    prompt: Sequence[int] | np.ndarray
    output: Sequence[int] | np.ndarray
    num_outputs: int = -1  # tokens said so far; -1: len(output)
    pending_at: int = -1  # the last token said is on the device only, there in `pending`; -1: none

    @property
    def position(self) -> int:
        """Tokens said so far."""
        return len(self.output) if self.num_outputs < 0 else self.num_outputs


@dataclass(frozen=True)
class Randomness:
    """The rows that draw: all tensors have one entry for each of them."""

    rows: torch.Tensor | None  # int64 [Q]; None: every row of the batch
    keys: torch.Tensor  # int32 [Q, 2]
    temperature: torch.Tensor  # float32 [Q, 1]
    log_min_p: torch.Tensor | None  # float32 [Q]
    truncated: torch.Tensor | None  # int64 [F] into the Q rows; None: no top_k, no top_p
    top_k: torch.Tensor | None  # int64 [F]
    top_p: torch.Tensor | None  # float64 [F]
    is_settled: bool  # every truncated row has a top_k that truncation.HEAD covers


@dataclass(frozen=True)
class SamplingBatch:
    """How to choose a token for each row of a step, on the device. All greedy: nothing but None."""

    num_rows: int
    randomness: Randomness | None
    bias: SparseLogits | None
    penalties: Penalties | None
    num_top: int | None  # most alternatives any row asks for; None: no row wants logprobs

    @classmethod
    def build(
        cls,
        rows: Sequence[SamplingRow],
        vocab: int,
        device: torch.device,
        pending: torch.Tensor | None = None,
    ) -> "SamplingBatch":
        """The batch of `rows` over `vocab` tokens. Tokens of a logit_bias beyond it are ignored.

        `pending` int64 [N] on the device holds what the rows' `pending_at` points to.
        """
        wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        return cls(
            num_rows=len(rows),
            randomness=_randomness(rows, vocab, device),
            bias=_bias(rows, vocab, device),
            penalties=_penalties(rows, device, pending),
            num_top=min(max(wanted), vocab) if wanted else None,
        )


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the chosen tokens and of the most likely ones, likeliest first."""

    chosen: torch.Tensor  # float32 [R]
    top_ids: torch.Tensor  # int64 [R, num_top]
    top: torch.Tensor  # float32 [R, num_top]


@dataclass(frozen=True)
class SampleOutput:
    """The chosen tokens; rows that are not finite hold token 0 and no meaning."""

    token_ids: torch.Tensor  # int64 [R]
    finite: torch.Tensor  # bool [R]
    logprobs: Logprobs | None

    def told(self) -> torch.Tensor:
        """The tokens as they are told to the host: int64 [R], -1 for rows that are not finite."""
        return self.token_ids.masked_fill(~self.finite, -1)


@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Choose a token for each row of logits float32 [R, V], which are left as they are."""
    assert logits.dtype == torch.float32 and logits.shape[0] == batch.num_rows
    x = logits
    if batch.bias is not None or batch.penalties is not None:
        x = logits.clone()
    if batch.bias is not None:
        batch.bias.add_to(x)
    if batch.penalties is not None:
        batch.penalties.apply_to(x)
    best, token_ids = x.max(-1)
    finite = best.isfinite()
    if x is not logits:
        finite &= logits.amax(-1).isfinite()
    if batch.randomness is not None:
        token_ids = _draw(x, best, token_ids, batch.randomness)
    token_ids = token_ids.masked_fill(~finite, 0)
    logprobs = None
    if batch.num_top is not None:
        logprobs = token_logprobs(logits, token_ids, batch.num_top)
    return SampleOutput(token_ids, finite, logprobs)


def greedy(logits: torch.Tensor) -> SampleOutput:
    """The most likely token of each row of logits float32 [R, V]; the first of equal ones."""
    best, token_ids = logits.max(-1)
    finite = best.isfinite()
    return SampleOutput(token_ids.masked_fill(~finite, 0), finite, None)


def is_plain(params: RowParams) -> bool:
    """Whether `greedy` is all that these parameters ask for, at every position."""
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and not params.logit_bias
        and not params.min_tokens
        and not _is_penalised(params)
    )


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Log-softmax of logits float32 [R, V] at token_ids int64 [R] and at the num_top best."""
    logprobs = logits.log_softmax(-1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[1]))
    return Logprobs(logprobs.gather(1, token_ids[:, None])[:, 0], top_ids, top)


def _draw(
    x: torch.Tensor, best: torch.Tensor, greedy: torch.Tensor, how: Randomness
) -> torch.Tensor:
    """Tokens int64 [R]: drawn where `how` says so, `greedy` elsewhere."""
    if how.rows is not None:
        x, best = x[how.rows], best[how.rows]
    # Relative to the maximum first: a small temperature then overflows to -inf, never to NaN.
    x = (x - best[:, None]) / how.temperature
    if how.truncated is not None:
        assert how.top_k is not None and how.top_p is not None
        x[how.truncated] = truncate(
            x[how.truncated], how.top_k, how.top_p, is_settled=how.is_settled
        )
    if how.log_min_p is not None:
        x = apply_min_p(x, how.log_min_p)
    # max, whose indices come four times as fast as argmax on a CPU.
    _, drawn = (x - log_exponential(how.keys, x.shape[1])).max(-1)
    return drawn if how.rows is None else greedy.index_copy(0, how.rows, drawn)


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """`array` on the device, without waiting for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _randomness(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> Randomness | None:
    """The rows with a temperature, their noise keys and their cuts."""
    drawing = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if not drawing:
        return None
    params = [rows[i].params for i in drawing]
    numbers = np.array([(p.temperature, p.min_p, p.top_p, p.top_k) for p in params])
    temperature, min_p, top_p, top_k = numbers.T
    top_k = np.where(top_k < vocab, np.maximum(top_k, 0), 0).astype(np.int64)
    truncated = np.flatnonzero((top_k > 0) | (top_p < 1))
    keys = row_keys([p.seed for p in params], [rows[i].position for i in drawing])
    log_min_p = np.full(len(params), -np.inf)
    np.log(np.minimum(min_p, 1.0), out=log_min_p, where=min_p > 0)
    top_p, top_k = np.where(top_p < 1, top_p, NO_TOP_P)[truncated], top_k[truncated]
    return Randomness(
        rows=None if len(drawing) == len(rows) else _on(device, np.array(drawing)),
        keys=_on(device, keys),
        temperature=_on(device, temperature.astype(np.float32)[:, None]),
        log_min_p=_on(device, log_min_p.astype(np.float32)) if (min_p > 0).any() else None,
        truncated=_on(device, truncated) if len(truncated) else None,
        top_k=_on(device, top_k) if len(truncated) else None,
        top_p=_on(device, top_p) if len(truncated) else None,
        is_settled=bool(((top_k > 0) & (top_k <= HEAD)).all()),
    )


def _bias(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> SparseLogits | None:
    """logit_bias of all rows, and the stop ids of those still below min_tokens."""
    triples: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        params = row.params
        if params.logit_bias:
            triples += [(i, token, bias) for token, bias in params.logit_bias.items()]
        if params.min_tokens and row.position < params.min_tokens:
            triples += [(i, token, -np.inf) for token in params.stop_token_ids]
    triples = [entry for entry in triples if 0 <= entry[1] < vocab]
    if not triples:
        return None
    index = np.array([entry[:2] for entry in triples], dtype=np.int64)
    values = np.array([entry[2] for entry in triples], dtype=np.float32)
    row_index, tokens = np.ascontiguousarray(index.T)
    return SparseLogits(_on(device, row_index), _on(device, tokens), _on(device, values))


def _penalties(
    rows: Sequence[SamplingRow], device: torch.device, pending: torch.Tensor | None
) -> Penalties | None:
    """The rows with a penalty and what they said."""
    penalised = [i for i, row in enumerate(rows) if _is_penalised(row.params)]
    if not penalised:
        return None
    params = [rows[i].params for i in penalised]
    numbers = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params],
        dtype=np.float32,
    )
    strengths = _on(device, np.ascontiguousarray(numbers.T)[:, :, None])
    return Penalties(
        rows=_on(device, np.array(penalised)),
        repetition=strengths[0],
        frequency=strengths[1],
        presence=strengths[2],
        prompt=_history([rows[i].prompt for i in penalised], device),
        output=_said([rows[i] for i in penalised], device, pending),
    )


def _is_penalised(params: RowParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _history(
    histories: Sequence[Sequence[int] | np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists flattened to (index of the list, token): int64 [N] each."""
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in histories])
    owners = np.repeat(np.arange(len(histories)), [len(tokens) for tokens in histories])
    return _on(device, owners), _on(device, tokens)


def _said(
    rows: Sequence[SamplingRow], device: torch.device, pending: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of `rows` as `_history`, then the pending token of each row that has one."""
    owners, tokens = _history([row.output for row in rows], device)
    late = [(index, row.pending_at) for index, row in enumerate(rows) if row.pending_at >= 0]
    if not late:
        return owners, tokens
    assert pending is not None
    index, places = _on(device, np.array(late, dtype=np.int64)).unbind(1)
    return torch.cat([owners, index]), torch.cat([tokens, pending[places]])

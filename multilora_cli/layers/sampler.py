"""From logits to tokens, the same for a sequence whatever else is in the batch.

    1  logprobs: log-softmax of the model's own logits, before anything below
    2  logit_bias and suppressed stop ids (penalties.py), then repetition, frequency and presence
       (multilora_kernels.penalise)
    3  temperature 0 (below 1e-5): the most likely token; the first one where several are equal
    4  otherwise divide by the temperature, then top_k, top_p, min_p (multilora_kernels.truncation)
    5  draw by Gumbel-max with the row's own noise (multilora_kernels.noise)

3 to 5 are two launches (multilora_kernels.pick_tokens). Nothing here waits for a CUDA device, and
no shape depends on what is on it. A row whose logits hold NaN or +inf, or nothing finite, is
flagged; its neighbours are untouched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple, Protocol

import numpy as np
import torch

from multilora_cli.layers.penalties import SparseLogits
from multilora_kernels.noise import row_keys
from multilora_kernels.penalise import Histories, penalise
from multilora_kernels.pick_tokens import Draws, pick_tokens

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


class SamplingRow(NamedTuple):
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


class Asked:
    """What follows from the parameters of rows alone: the rows of a step are mostly those of the
    step before, and to look at 64 rows took the host as long as all else in such a step."""

    def __init__(self, params: Sequence[RowParams], vocab: int) -> None:
        self._params = list(params)
        self._vocab = vocab
        numbers = range(len(params))
        self.wanting = [i for i in numbers if params[i].logprobs is not None]
        self.most = max((params[i].logprobs or 0 for i in self.wanting), default=0)
        self.biased = [i for i in numbers if params[i].logit_bias or params[i].min_tokens]
        self.penalised = [i for i in numbers if is_penalised(params[i])]
        self.drawing = [i for i in numbers if params[i].temperature >= GREEDY_BELOW]
        self.seeds = [params[i].seed for i in self.drawing]
        self.fields, self.is_truncated = _draw_fields(params, self.drawing, vocab)

    def is_of(self, params: Sequence[RowParams], vocab: int) -> bool:
        """Whether these are the very parameters it was made of."""
        own = self._params
        return vocab == self._vocab and len(own) == len(params) and all(map(is_, own, params))


@dataclass(frozen=True)
class SamplingBatch:
    """How to choose a token for each row of a step, on the device. All greedy: nothing but None."""

    num_rows: int
    draws: Draws | None
    bias: SparseLogits | None
    histories: Histories | None
    num_top: int | None  # most alternatives any row asks for; None: no row wants logprobs
    wanting: torch.Tensor | None = None  # int64 [W], the rows that do; None: all, or none

    @classmethod
    def build(
        cls,
        rows: Sequence[SamplingRow],
        vocab: int,
        device: torch.device,
        pending: torch.Tensor | None = None,
        asked: Asked | None = None,
    ) -> "SamplingBatch":
        """The batch of `rows` over `vocab` tokens. Tokens of a logit_bias beyond it are ignored.

        `pending` int64 [N] on the device holds what the rows' `pending_at` points to. `asked` is of
        these rows' parameters, where the caller has it.
        """
        if asked is None:
            asked = Asked([row.params for row in rows], vocab)
        wanting = asked.wanting
        return cls(
            num_rows=len(rows),
            draws=_draws(rows, asked, device),
            bias=_bias(rows, asked, vocab, device),
            histories=_histories(rows, asked, device, pending),
            num_top=min(asked.most, vocab) if wanting else None,
            wanting=_on(device, np.array(wanting)) if 0 < len(wanting) < len(rows) else None,
        )


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the chosen tokens and of the most likely ones, likeliest first."""

    chosen: torch.Tensor  # float32 [W]
    top_ids: torch.Tensor  # int64 [W, num_top]
    top: torch.Tensor  # float32 [W, num_top]


@dataclass(frozen=True)
class SampleOutput:
    """The chosen tokens; rows that are not finite hold token 0 and no meaning."""

    token_ids: torch.Tensor  # int64 [R]
    told: torch.Tensor  # int64 [R], as the host is told them: -1 for rows that are not finite
    logprobs: Logprobs | None  # of the rows that want them, in order


@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Choose a token for each row of logits float32 [R, V], which are left as they are."""
    assert logits.shape[0] == batch.num_rows
    x = logits
    if batch.bias is not None or batch.histories is not None:
        x = logits.clone(memory_format=torch.contiguous_format)
    if batch.bias is not None:
        batch.bias.add_to(x)
    if batch.histories is not None:
        penalise(x, batch.histories)
    picked = pick_tokens(x, batch.draws)
    logprobs = None
    if batch.num_top is not None:
        wanting = slice(None) if batch.wanting is None else batch.wanting
        logprobs = token_logprobs(logits[wanting], picked.token_ids[wanting], batch.num_top)
    return SampleOutput(picked.token_ids, picked.told, logprobs)


def is_plain(params: RowParams) -> bool:
    """Whether `greedy` is all that these parameters ask for, at every position."""
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and not params.logit_bias
        and not params.min_tokens
        and not is_penalised(params)
    )


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Log-softmax of logits float32 [R, V] at token_ids int64 [R] and at the num_top best."""
    logprobs = logits.log_softmax(-1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[1]))
    return Logprobs(logprobs.gather(1, token_ids[:, None])[:, 0], top_ids, top)


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """`array` on the device, without waiting for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _draw_fields(
    params: Sequence[RowParams], drawing: Sequence[int], vocab: int
) -> tuple[np.ndarray, bool]:
    """`Draws.packed` without the keys, and whether any row is truncated."""
    packed = np.zeros((6, len(params)), dtype=np.int32)
    if not drawing:
        return packed, False
    drawn = [params[i] for i in drawing]
    temperature, min_p, top_p = np.array([(p.temperature, p.min_p, p.top_p) for p in drawn]).T
    log_min_p = np.full(len(drawn), -np.inf)
    np.log(np.minimum(min_p, 1.0), out=log_min_p, where=min_p > 0)
    top_k = np.array([p.top_k if 0 < p.top_k < vocab else 0 for p in drawn], dtype=np.int32)
    numbers = packed[:3].view(np.float32)
    numbers[:, drawing] = 1 / temperature, log_min_p, np.minimum(top_p, 1.0)
    packed[3, drawing] = top_k
    is_truncated = (top_k > 0) | (numbers[2, drawing] < 1) | (min_p > 0)
    return packed, bool(is_truncated.any())


def _draws(rows: Sequence[SamplingRow], asked: Asked, device: torch.device) -> Draws | None:
    """How each row draws; None where all are greedy."""
    drawing = asked.drawing
    if not drawing:
        return None
    packed = asked.fields.copy()
    packed[4:, drawing] = row_keys(asked.seeds, [rows[i].position for i in drawing]).T
    return Draws(_on(device, packed), asked.is_truncated)


def _bias(
    rows: Sequence[SamplingRow], asked: Asked, vocab: int, device: torch.device
) -> SparseLogits | None:
    """logit_bias of all rows, and the stop ids of those still below min_tokens."""
    if not asked.biased:
        return None
    tokens: list[int] = []
    values: list[float] = []
    counts = [0] * len(rows)
    for i in asked.biased:
        row = rows[i]
        params, before = row.params, len(tokens)
        if params.logit_bias:
            tokens += params.logit_bias.keys()
            values += params.logit_bias.values()
        if params.min_tokens and row.position < params.min_tokens:
            tokens += params.stop_token_ids
            values += [-np.inf] * len(params.stop_token_ids)
        counts[i] = len(tokens) - before
    token_ids = np.array(tokens, dtype=np.int64)
    is_known = (token_ids >= 0) & (token_ids < vocab)
    if not is_known.any():
        return None
    places = np.repeat(np.arange(len(rows)) * vocab, counts) + token_ids
    return SparseLogits(
        _on(device, places[is_known]), _on(device, np.array(values, dtype=np.float32)[is_known])
    )


def _histories(
    rows: Sequence[SamplingRow],
    asked: Asked,
    device: torch.device,
    pending: torch.Tensor | None,
) -> Histories | None:
    """The rows with a penalty and what they said."""
    penalised = asked.penalised
    if not penalised:
        return None
    parts: list[np.ndarray] = []
    for i in penalised:
        row = rows[i]
        late = (-1 - row.pending_at,) if row.pending_at >= 0 else ()
        parts += [np.asarray(part, dtype=np.int32) for part in (row.prompt, row.output, late)]
    lengths = np.array([len(part) for part in parts]).reshape(-1, 3)
    ends = lengths.sum(1).cumsum()
    starts = ends - lengths.sum(1)
    params = [rows[i].params for i in penalised]
    strengths = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    fields = np.empty((7, len(penalised)), dtype=np.int32)
    fields[:4] = penalised, starts, starts + lengths[:, 0], ends
    fields[4:].view(np.float32)[:] = np.array(strengths).T
    return Histories(_on(device, fields), _on(device, np.concatenate(parts)), pending)


def is_penalised(params: RowParams) -> bool:
    """Whether what a row said changes its logits."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )

"""Everything that happens on the device in one step.

If a pass over the whole batch raises, its halves are run alone, down to the row that cannot be
run: writing the same K and V twice does no harm, and one request's fault ends only that request.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from multilora_cli.engine.batch import BatchBuilder, StepTensors
from multilora_cli.engine.batch_plan import RowResult, Sampled, ScheduledBatch, ScheduledRow
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.fence import Fence, fence_of
from multilora_cli.engine.messages import TokenLogprobs
from multilora_cli.engine.sequence import Sequence
from multilora_cli.layers.sampler import (
    Logprobs,
    SampleOutput,
    SamplingBatch,
    SamplingRow,
    sample,
    token_logprobs,
)
from multilora_cli.models.decoder import Decoder

_log = logging.getLogger(__name__)

# Logits of prompt tokens are taken in slices: 256 rows of a vocabulary of 128k are 134 MB.
_PROMPT_ROWS = 256


@dataclass(frozen=True)
class _Draw:
    """One sequence that takes a token, and the token row its logits come from."""

    row: int
    sequence: Sequence
    token_row: int


class ModelRunner:
    """Runs scheduled batches on a decoder. Holds no queue and no sequence."""

    def __init__(
        self, decoder: Decoder, builder: BatchBuilder, pool: torch.Tensor, failpoints: Failpoints
    ) -> None:
        self._decoder = decoder
        self._builder = builder
        self._pool = pool
        self._failpoints = failpoints
        # Called with request id, position of the first row and float32 [rows, vocab] of logits of
        # prompt tokens, before they are cut down to what was asked for. `mlora verify` compares.
        self.on_prompt_logits: Callable[[int, int, torch.Tensor], None] | None = None

    def run(self, batch: ScheduledBatch) -> tuple[RowResult, ...]:
        """One result per row, in order."""
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            device = self._pool.device
            self._pool[torch.tensor(targets, device=device)] = self._pool[
                torch.tensor(sources, device=device)
            ]
        results: dict[int, RowResult] = {}
        sound = []
        for index, row in enumerate(batch.rows):
            try:
                self._failpoints.hit("row", row.sequence.request_id)
                sound.append((index, row))
            except Exception as error:
                results[index] = RowResult(error=_describe(error))
        self._run_isolated(sound, results)
        return tuple(results[index] for index in range(len(batch.rows)))

    def fence(self) -> Fence:
        """The point behind everything that `run` has launched so far."""
        return fence_of(self._pool.device)

    def _run_isolated(
        self, rows: list[tuple[int, ScheduledRow]], results: dict[int, RowResult]
    ) -> None:
        if not rows:
            return
        try:
            outcome = self._run_rows([row for _, row in rows])
        except Exception as error:
            _log.exception("a step of %d rows failed", len(rows))
            self._check_device()
            if len(rows) == 1:
                results[rows[0][0]] = RowResult(error=_describe(error))
                return
        else:
            results.update(zip((index for index, _ in rows), outcome, strict=True))
            return
        middle = len(rows) // 2
        self._run_isolated(rows[:middle], results)
        self._run_isolated(rows[middle:], results)

    def _check_device(self) -> None:
        """After a fault on the device itself nothing works any more: let the process end."""
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)

    @torch.inference_mode()
    def _run_rows(self, rows: Rows[ScheduledRow]) -> list[RowResult]:
        for row in rows:
            self._failpoints.hit("forward", row.sequence.request_id)
        step = self._builder.build(rows)
        hidden = self._decoder.forward(step.token_ids, step.positions, step.context)
        draws = [
            _Draw(index, sequence, int(step.last_rows[index]))
            for index, row in enumerate(rows)
            for sequence in row.samples
        ]
        sampled: list[list[Sampled]] = [[] for _ in rows]
        for draw, token in zip(draws, self._sample(hidden, draws), strict=True):
            sampled[draw.row].append(token)
        return [
            RowResult(tuple(sampled[index]), self._prompt_logprobs(row, hidden, step, index))
            for index, row in enumerate(rows)
        ]

    def _sample(self, hidden: torch.Tensor, draws: list[_Draw]) -> list[Sampled]:
        if not draws:
            return []
        index = torch.tensor([draw.token_row for draw in draws], device=hidden.device)
        logits = self._decoder.logits(hidden[index])
        for position, draw in enumerate(draws):
            if self._failpoints.hit("logits", draw.sequence.request_id) == "nan":
                logits[position] = torch.nan
        rows = [_sampling_row(draw.sequence) for draw in draws]
        batch = SamplingBatch.build(rows, logits.shape[1], logits.device)
        return _sampled(sample(logits, batch), draws)

    def _prompt_logprobs(
        self, row: ScheduledRow, hidden: torch.Tensor, step: StepTensors, index: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow this row's tokens."""
        sequence = row.sequence
        wanted = sequence.params.prompt_logprobs
        if wanted is None or not sequence.wants_prompt_logprobs:
            return ()
        count = min(row.start + row.length, sequence.prompt_len - 1) - row.start
        first = int(step.last_rows[index]) - row.length + 1
        found: list[TokenLogprobs] = []
        for offset in range(0, max(count, 0), _PROMPT_ROWS):
            size = min(_PROMPT_ROWS, count - offset)
            logits = self._decoder.logits(hidden[first + offset : first + offset + size])
            if self.on_prompt_logits is not None:
                self.on_prompt_logits(sequence.request_id, row.start + offset, logits)
            start = row.start + offset + 1
            targets = sequence.tokens[start : start + size].tolist()
            ids = torch.tensor(targets, device=hidden.device)
            found += _logprob_rows(targets, token_logprobs(logits, ids, wanted), [wanted] * size)
        return tuple(found)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _sampling_row(sequence: Sequence) -> SamplingRow:
    """The prompt is handed over only where a penalty reads it."""
    penalised = sequence.params.repetition_penalty != 1.0
    prompt = sequence.tokens[: sequence.prompt_len] if penalised else ()
    output = np.frombuffer(sequence.tokens[sequence.prompt_len :], dtype=np.int32)
    return SamplingRow(sequence.params, prompt, output)


def _sampled(output: SampleOutput, draws: list[_Draw]) -> list[Sampled]:
    token_ids: list[int] = output.token_ids.tolist()
    finite: list[bool] = output.finite.tolist()
    if output.logprobs is None:
        return [Sampled(token, ok) for token, ok in zip(token_ids, finite, strict=True)]
    wanted = [draw.sequence.params.logprobs for draw in draws]
    rows = _logprob_rows(token_ids, output.logprobs, [count or 0 for count in wanted])
    return [
        Sampled(token, ok, None if count is None else row)
        for token, ok, count, row in zip(token_ids, finite, wanted, rows, strict=True)
    ]


def _logprob_rows(
    token_ids: list[int], logprobs: Logprobs, counts: list[int]
) -> list[TokenLogprobs]:
    """On the host; `counts` is how many alternatives each row gets."""
    chosen: list[float] = logprobs.chosen.tolist()
    top_ids: list[list[int]] = logprobs.top_ids.tolist()
    top: list[list[float]] = logprobs.top.tolist()
    return [
        TokenLogprobs(token, value, ids[:count], values[:count])
        for token, value, ids, values, count in zip(
            token_ids, chosen, top_ids, top, counts, strict=True
        )
    ]

"""Everything that happens on the device in one step.

`launch` hands a step over and returns at once on a CUDA device; the Flight that it returns waits
for the few numbers that come back. If a pass over the whole batch raises, its halves are run alone,
down to the row that cannot be run: writing the same K and V twice does no harm, and one request's
fault ends only that request.
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from multilora_cli.engine.batch import PROMPT_ROWS, BatchBuilder
from multilora_cli.engine.batch_plan import RowResult, Sampled, ScheduledBatch, ScheduledRow
from multilora_cli.engine.decode_graphs import DecodeGraphs
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.fence import Fence, fence_of
from multilora_cli.engine.messages import TokenLogprobs
from multilora_cli.engine.prompt_graphs import PromptGraphs
from multilora_cli.engine.sequence import Sequence
from multilora_cli.layers.sampler import (
    Asked,
    Logprobs,
    SamplingBatch,
    SamplingRow,
    is_plain,
    sample,
    token_logprobs,
)
from multilora_cli.models.decoder import Decoder

_log = logging.getLogger(__name__)


class _Draw(NamedTuple):
    """One sequence that takes a token, and where its logits are."""

    row: int  # in the batch
    place: int  # among the tokens that the whole step samples
    sequence: Sequence
    token_row: int  # row of the pass's hidden states


@dataclass
class _PromptLogprobs:
    """Log-probabilities of a row's prompt tokens, on their way to the host, slice by slice."""

    count: int  # alternatives
    slices: list[tuple[list[int], Logprobs]] = field(default_factory=list)

    def on_host(self) -> tuple[TokenLogprobs, ...]:
        """One entry per token."""
        return tuple(
            entry
            for targets, logprobs in self.slices
            for entry in _logprob_rows(targets, logprobs, [self.count] * len(targets))
        )


class _Share(NamedTuple):
    """Rows of the batch in their order, all or a half: which ones they are there, and the place of
    each one's first sample among all of the step."""

    numbers: Rows[int]
    places: Rows[int]
    rows: Rows[ScheduledRow]

    @property
    def has_one_sample_each(self) -> bool:
        """Whether every row takes one token."""
        return all(len(row.samples) == 1 for row in self.rows)

    def halves(self) -> tuple["_Share", "_Share"]:
        """The first rows, and the others."""
        middle = len(self.rows) // 2
        first, second = slice(middle), slice(middle, None)
        return (
            _Share(self.numbers[first], self.places[first], self.rows[first]),
            _Share(self.numbers[second], self.places[second], self.rows[second]),
        )


@dataclass(frozen=True)
class _Pass:
    """What one pass over some rows sends back: pinned host tensors that are being filled."""

    rows: Rows[int]  # in the batch
    draws: list[_Draw]
    tokens: torch.Tensor | None  # int64 [draws]; -1 where the logits were not finite
    logprobs: Logprobs | None
    prompts: dict[int, _PromptLogprobs]  # by row
    fresh: torch.Tensor | None  # the same tokens on the device, 0 for -1

    def kept(self) -> "_Pass":
        """With tokens that outlive the next pass: those of a captured step do not."""
        return self if self.fresh is None else replace(self, fresh=self.fresh.clone())

    @property
    def places(self) -> Rows[int]:
        """Of its tokens among those of the step."""
        return [draw.place for draw in self.draws]

    def results(self) -> Iterator[tuple[int, RowResult]]:
        """Of every row, once the device is done."""
        sampled: dict[int, list[Sampled]] = {row: [] for row in self.rows}
        for draw, token in zip(self.draws, _sampled(self), strict=True):
            sampled[draw.row].append(token)
        for row, tokens in sampled.items():
            prompt = self.prompts.get(row)
            yield row, RowResult(tuple(tokens), prompt.on_host() if prompt else ())


class _PlainPass(NamedTuple):
    """What nearly every pass is: a captured step whose rows take one token each, told without more.

    Nothing is made for each row but what is told: at 256 rows the rest took a quarter of the host's
    time.
    """

    rows: Rows[int]  # in the batch
    places: Rows[int]  # of their tokens among those of the step
    tokens: torch.Tensor  # int64 [rows]; -1 where the logits were not finite
    fresh: torch.Tensor

    def kept(self) -> "_PlainPass":
        """With tokens that outlive the next pass."""
        return self._replace(fresh=self.fresh.clone())

    def results(self) -> Iterator[tuple[int, RowResult]]:
        """Of every row, once the device is done."""
        token_ids: list[int] = self.tokens.tolist()
        told = [RowResult((Sampled(token if token > 0 else 0, token >= 0),)) for token in token_ids]
        return zip(self.rows, told, strict=True)


class StepFlight:
    """A launched step: the passes that were made of it, and the rows that could not be run."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._fence: Fence | None = None
        self.passes: list[_Pass | _PlainPass] = []
        self.errors: dict[int, str] = {}

    def close(self, fence: Fence) -> None:
        """Everything is launched, up to `fence`."""
        self._fence = fence

    def results(self) -> tuple[RowResult, ...]:
        """Wait for the device; one result per row of the batch, in order."""
        assert self._fence is not None
        self._fence.wait()
        results = {row: RowResult(error=error) for row, error in self.errors.items()}
        for done in self.passes:
            results.update(done.results())
        return tuple(results[row] for row in range(self._num_rows))


class ModelRunner:
    """Runs scheduled batches on a decoder. Holds no queue and no sequence."""

    def __init__(
        self,
        decoder: Decoder,
        builder: BatchBuilder,
        failpoints: Failpoints,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._builder = builder
        self._graphs = graphs
        self._prompt_graphs = prompt_graphs
        self._pool = builder.pool
        self._failpoints = failpoints
        self._asked: Asked | None = None  # of the rows that were sampled last
        # Called with request id, position of the first row and float32 [rows, vocab] of logits of
        # prompt tokens, before they are cut down to what was asked for. `mlora verify` compares.
        self.on_prompt_logits: Callable[[int, int, torch.Tensor], None] | None = None

    def launch(self, batch: ScheduledBatch) -> StepFlight:
        """Hand the step to the device."""
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            self._pool[self._on_device(targets)] = self._pool[self._on_device(sources)]
        flight = StepFlight(len(batch.rows))
        self._run_isolated(self._sound(batch.rows, flight), flight)
        self._leave_tokens(flight.passes)
        flight.close(fence_of(self._pool.device))
        return flight

    def _sound(self, rows: Rows[ScheduledRow], flight: StepFlight) -> _Share:
        """The rows that no failpoint keeps out of the step."""
        share = _Share(range(len(rows)), _places(rows), rows)
        if not self._failpoints.armed:
            return share
        sound = []
        for number, row in enumerate(rows):
            try:
                self._failpoints.hit("row", row.sequence.request_id)
                sound.append(number)
            except Exception as error:
                flight.errors[number] = _describe(error)
        return _Share(sound, [share.places[n] for n in sound], [rows[n] for n in sound])

    def _run_isolated(self, share: _Share, flight: StepFlight, *, is_part: bool = False) -> None:
        if not share.rows:
            return
        try:
            done = self._run_rows(share)
            flight.passes.append(done.kept() if is_part else done)
            return
        except Exception as error:
            _log.exception("a step of %d rows failed", len(share.rows))
            self._check_device()
            if len(share.rows) == 1:
                flight.errors[share.numbers[0]] = _describe(error)
                return
        for half in share.halves():
            self._run_isolated(half, flight, is_part=True)

    @torch.inference_mode()
    def _leave_tokens(self, passes: Rows["_Pass | _PlainPass"]) -> None:
        """Leave the step's tokens among `sampled`, for the next one.

        Once all passes are launched: rows change places from step to step, so that what one pass
        leaves could be in the place of a token of the step before that another has yet to read.
        """
        sampled = self._builder.sampled
        for done in passes:
            if done.fresh is None:
                continue
            places = done.places
            first, last = places[0], places[-1]
            if last - first == len(places) - 1:
                sampled[first : last + 1] = done.fresh
            else:
                sampled[self._on_device(places)] = done.fresh

    def _check_device(self) -> None:
        """After a fault on the device itself nothing works any more: let the process end."""
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)

    @torch.inference_mode()
    def _run_rows(self, share: _Share) -> "_Pass | _PlainPass":
        rows, graphs = share.rows, self._graphs
        if self._failpoints.armed:
            for row in rows:
                self._failpoints.hit("forward", row.sequence.request_id)
        if graphs is not None and graphs.holds(rows):
            if _are_plain(rows) and not self._failpoints.armed:
                picked = graphs.run(rows).picked
                told = _to_host(picked.told)
                return _PlainPass(share.numbers, share.places, told, picked.token_ids)
            if not any(row.sequence.wants_prompt_logprobs for row in rows):
                return self._run_captured(graphs, share)
        if self._prompt_graphs is not None and self._prompt_graphs.holds(rows):
            return self._run_prompts(self._prompt_graphs, share)
        step = self._builder.build(rows)
        last_rows = step.last_rows.tolist()
        hidden = self._decoder.forward(step.token_ids, step.positions, step.context)
        draws = _draws(share, last_rows)
        tokens, logprobs, fresh = None, None, None
        if draws:
            adapters = self._builder.head_adapters([draw.sequence.slot for draw in draws])
            wanted = self._on_device([draw.token_row for draw in draws])
            logits = self._decoder.logits(hidden[wanted], adapters)
            tokens, logprobs, fresh = self._sample(logits, [draw.sequence for draw in draws])
        prompts = {
            number: self._prompt_logprobs(row, hidden, last)
            for number, row, last in zip(share.numbers, rows, last_rows, strict=True)
            if row.sequence.wants_prompt_logprobs
        }
        return _Pass(share.numbers, draws, tokens, logprobs, prompts, fresh)

    def _run_captured(self, graphs: DecodeGraphs, share: _Share) -> "_Pass | _PlainPass":
        """A captured step whose rows are sampled from the logits that it leaves."""
        rows = share.rows
        logits = graphs.run(rows).logits
        draws = _draws(share, range(len(rows)))
        if not draws:
            return _Pass(share.numbers, draws, None, None, {}, None)
        wanted = [draw.token_row for draw in draws]
        if wanted != list(range(len(rows))):
            logits = logits[self._on_device(wanted)]
        tokens, logprobs, fresh = self._sample(logits, [draw.sequence for draw in draws])
        if logprobs is None and share.has_one_sample_each:
            return _PlainPass(share.numbers, share.places, tokens, fresh)
        return _Pass(share.numbers, draws, tokens, logprobs, {}, fresh)

    def _run_prompts(self, graphs: PromptGraphs, share: _Share) -> _Pass:
        """A captured step with prompts leaves the logits of every sequence's last token."""
        logits, sequences = graphs.run(share.rows)
        draws = _draws(share, sequences)
        if not draws:
            return _Pass(share.numbers, draws, None, None, {}, None)
        logits = logits[self._on_device([draw.token_row for draw in draws])]
        tokens, logprobs, fresh = self._sample(logits, [draw.sequence for draw in draws])
        return _Pass(share.numbers, draws, tokens, logprobs, {}, fresh)

    def _on_device(self, values: Rows[int]) -> torch.Tensor:
        """int64, without waiting for what runs there."""
        tensor = torch.tensor(values, dtype=torch.int64, pin_memory=self._pool.is_cuda)
        return tensor.to(self._pool.device, non_blocking=True)

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        vocab, sampled = self._decoder.geometry.vocab_size, self._builder.sampled
        params = [sequence.params for sequence in sequences]
        asked = self._asked
        if asked is None or not asked.is_of(params, vocab):
            asked = self._asked = Asked(params, vocab)
        # What was said is handed over only where a penalty reads it.
        rows = [SamplingRow(each.params, (), (), each.num_outputs) for each in sequences]
        for place in asked.penalised:
            rows[place] = _penalised_row(sequences[place])
        return SamplingBatch.build(rows, vocab, sampled.device, sampled, asked)

    def _sample(
        self, logits: torch.Tensor, sequences: list[Sequence]
    ) -> tuple[torch.Tensor, Logprobs | None, torch.Tensor]:
        """The tokens of these sequences on their way to the host, and on the device."""
        if self._failpoints.armed:
            for position, sequence in enumerate(sequences):
                if self._failpoints.hit("logits", sequence.request_id) == "nan":
                    logits[position] = torch.nan
        output = sample(logits, self._sampling(sequences))
        return _to_host(output.told), _logprobs_to_host(output.logprobs), output.token_ids

    def _prompt_logprobs(
        self, row: ScheduledRow, hidden: torch.Tensor, last: int
    ) -> _PromptLogprobs:
        """Of the prompt tokens that follow this row's tokens; `last` is its last token row."""
        sequence = row.sequence
        wanted = sequence.params.prompt_logprobs or 0
        count = min(row.start + row.length, sequence.prompt_len - 1) - row.start
        first = last - row.length + 1
        found = _PromptLogprobs(wanted)
        for offset in range(0, max(count, 0), PROMPT_ROWS):
            size = min(PROMPT_ROWS, count - offset)
            adapters = self._builder.head_adapters([sequence.slot] * size)
            rows = hidden[first + offset : first + offset + size]
            logits = self._decoder.logits(rows, adapters)
            if self.on_prompt_logits is not None:
                self.on_prompt_logits(sequence.request_id, row.start + offset, logits)
            start = row.start + offset + 1
            targets = sequence.tokens[start : start + size].tolist()
            logprobs = token_logprobs(logits, self._on_device(targets), wanted)
            sent = _logprobs_to_host(logprobs)
            assert sent is not None
            found.slices.append((targets, sent))
        return found


def _places(rows: Rows[ScheduledRow]) -> Rows[int]:
    """The place of every row's first sample among all of the step."""
    counts = [len(row.samples) for row in rows]
    if counts.count(1) == len(counts):
        return range(len(counts))
    return [end - count for end, count in zip(accumulate(counts), counts, strict=True)]


def _draws(share: _Share, last_rows: Rows[int]) -> list[_Draw]:
    """Everything that takes a token in this pass; `last_rows` is each row's last token row."""
    return [
        _Draw(number, place + offset, sequence, last)
        for number, place, row, last in zip(*share, last_rows, strict=True)
        for offset, sequence in enumerate(row.samples)
    ]


def _are_plain(rows: Rows[ScheduledRow]) -> bool:
    """Whether every row takes its most likely token, one, and nothing else is asked."""
    for row in rows:
        if len(row.samples) != 1:
            return False
        sequence = row.sequence
        plain = sequence.is_plain
        if plain is None:
            params = sequence.params
            plain = sequence.is_plain = is_plain(params) and params.prompt_logprobs is None
        if not plain:
            return False
    return True


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy that is complete once a fence behind it was passed."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def _logprobs_to_host(logprobs: Logprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(_to_host(logprobs.chosen), _to_host(logprobs.top_ids), _to_host(logprobs.top))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _penalised_row(sequence: Sequence) -> SamplingRow:
    """With all that was said, the token that nobody has seen yet included."""
    return SamplingRow(
        sequence.params,
        sequence.tokens[: sequence.prompt_len],
        np.frombuffer(sequence.tokens[sequence.prompt_len :], dtype=np.int32),
        sequence.num_outputs,
        sequence.pending_at if sequence.num_pending else -1,
    )


def _sampled(done: _Pass) -> list[Sampled]:
    if done.tokens is None:
        return []
    token_ids: list[int] = done.tokens.tolist()
    sampled = [Sampled(max(token, 0), token >= 0) for token in token_ids]
    if done.logprobs is None:
        return sampled
    wanted = [draw.sequence.params.logprobs for draw in done.draws]
    places = [place for place, count in enumerate(wanted) if count is not None]
    rows = _logprob_rows(
        [token_ids[place] for place in places],
        done.logprobs,
        [wanted[place] or 0 for place in places],
    )
    for place, row in zip(places, rows, strict=True):
        sampled[place] = Sampled(max(token_ids[place], 0), token_ids[place] >= 0, row)
    return sampled


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

"""From a step's results to deltas: append tokens, end what is finished, share prompts."""

import logging

from multilora_cli.engine.batch_plan import RowResult, Sampled, ScheduledBatch, ScheduledRow
from multilora_cli.engine.messages import Delta, Fault
from multilora_cli.engine.scheduler import Scheduler
from multilora_cli.engine.sequence import Sequence, Status
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS, extend_keys

_log = logging.getLogger(__name__)


class Answers:
    """Applies results to sequences. An exception in one row's results ends that request only."""

    def __init__(self, scheduler: Scheduler, kv: KVCache) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self.prompt_tokens = 0  # computed, not taken from the prefix cache
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.failures = 0

    def take(self, batch: ScheduledBatch, results: tuple[RowResult, ...]) -> list[Delta]:
        """The deltas of a step; `results` in the order of `batch.rows`."""
        deltas: list[Delta] = []
        finished, take_decode = Status.FINISHED, self._take_decode
        for row, result in zip(batch.rows, results, strict=True):
            sequence = row.sequence
            if sequence.status is finished:
                continue  # it was aborted, or ended with its request, meanwhile
            sampled = result.sampled
            try:
                if result.error is not None:
                    self._fail(row, result.error)
                # One more token of an answer under way, as nearly always. A chunk of one token is
                # something else: an answer that was preempted is computed again, and samples only
                # where its last known token is.
                elif (
                    row.length == 1 and row.samples and sequence.has_answered and sampled[0].finite
                ):
                    deltas.append(take_decode(row, sequence, sampled[0]))
                else:
                    deltas += self._take_row(row, result)
            except Exception as error:
                _log.exception("request %d: its results failed", sequence.request_id)
                self._fail(row, f"{type(error).__name__}: {error}")
        return deltas

    def _take_decode(self, row: ScheduledRow, sequence: Sequence, sampled: Sampled) -> Delta:
        """One more token of an answer under way."""
        token_id, _, logprobs = sampled
        if (row.start + 1) % BLOCK_TOKENS == 0:
            self._publish(row)
        tokens = sequence.tokens
        tokens.append(token_id)  # Sequence.see, of which a call takes a tenth of this
        sequence.num_pending -= 1
        self.generated_tokens += 1
        reason = None
        if token_id in sequence.stop_ids or len(tokens) >= sequence.max_len:
            reason = sequence.finish_reason()
            if reason is not None:
                self._scheduler.retire(sequence)
        shown = None if logprobs is None else [logprobs]
        return Delta(sequence.request_id, sequence.index, [token_id], shown, None, reason)

    def _publish(self, row: ScheduledRow) -> None:
        """Offer the full blocks that the row completed; a sequence preempted since has none."""
        sequence = row.sequence
        if sequence.status is Status.RUNNING:
            extend_keys(sequence.keys, sequence.root, sequence.tokens)
            self._kv.publish(sequence.seq_id, sequence.keys, row.start + row.length)

    def _take_row(self, row: ScheduledRow, result: RowResult) -> list[Delta]:
        sequence, computed = row.sequence, row.start + row.length
        self.prompt_tokens += max(min(computed, sequence.prompt_len) - row.start, 0)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs += result.prompt_logprobs
        if all(sampled.finite for sampled in result.sampled):
            self._publish(row)
        if not row.samples:
            return self._end_of_prompt(sequence) if computed == sequence.length else []
        # Children first: the pages they share are the parent's, which may end with this token.
        pairs = list(zip(row.samples, result.sampled, strict=True))
        return [delta for pair in [*pairs[1:], pairs[0]] for delta in self._take_token(row, *pair)]

    def _end_of_prompt(self, sequence: Sequence) -> list[Delta]:
        """Nothing is to be generated: the prompt and its log-probabilities were all."""
        deltas = []
        for each in (*sequence.children, sequence):
            each.prompt_logprobs = sequence.prompt_logprobs
            each.cached_tokens = sequence.cached_tokens
            deltas.append(self._delta(each, None))
            self._scheduler.retire(each)
        return deltas

    def _take_token(self, row: ScheduledRow, sequence: Sequence, sampled: Sampled) -> list[Delta]:
        parent = row.sequence
        if sequence.status is Status.FINISHED:
            return []
        if not sampled.finite:
            who = f"adapter {sequence.adapter.name}" if sequence.adapter else "the base model"
            self._fail(row, f"{who} produced values that are not finite")
            return []
        sequence.see(sampled.token_id)
        self.generated_tokens += 1
        if sequence is not parent:
            sequence.prompt_logprobs = parent.prompt_logprobs
            sequence.cached_tokens = parent.cached_tokens
        delta = self._delta(sequence, sampled)
        if delta.finish_reason is not None:
            if sequence is not parent:
                parent.children.remove(sequence)
            self._scheduler.retire(sequence)
        elif sequence is not parent:
            self._scheduler.fork(parent, sequence)
        return [delta]

    def _delta(self, sequence: Sequence, sampled: Sampled | None) -> Delta:
        is_first = not sequence.has_answered
        if is_first and sequence.status is not Status.FORKING:
            self.cached_tokens += sequence.cached_tokens
        wanted = is_first and sequence.params.prompt_logprobs is not None
        # The first token of a prompt has no log-probability: nothing comes before it.
        prompt = [None, *sequence.prompt_logprobs] if wanted else None
        sequence.has_answered = True
        if wanted:
            sequence.prompt_logprobs = []
        token_ids = [] if sampled is None else [sampled.token_id]
        logprobs = [sampled.logprobs] if sampled is not None and sampled.logprobs else None
        return Delta(
            sequence.request_id,
            sequence.index,
            token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            finish_reason=sequence.finish_reason(),
            cached_tokens=sequence.cached_tokens if is_first else 0,
            queued_s=sequence.queued_s if is_first else 0.0,
        )

    def _fail(self, row: ScheduledRow, reason: str) -> None:
        """End a row's sequence, and the answers that wait for its prompt, with internal_error."""
        self.failures += 1
        _log.error("request %d failed: %s", row.sequence.request_id, reason)
        for sequence in (row.sequence, *row.samples):
            if sequence.status is not Status.FINISHED:
                self._scheduler.end(sequence, "error", Fault("internal_error", reason))

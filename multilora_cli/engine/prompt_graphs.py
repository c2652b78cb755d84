"""Steps with chunks of prompts beside decoding rows, as CUDA graphs.

Launched one by one, the kernels of such a step take the host 14 to 34 ms whatever it computes,
which is several decode steps; and where requests come and go all the time, most steps have a prompt
in them. A captured step has room for some rows of one token, then for some chunks of prompts with
so many tokens in all. A chunk that is not there has no tokens; spare tokens at the end belong to no
sequence and write nowhere. Adapters with extras and log-probabilities of prompts are launched
eagerly.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from multilora_cli.engine.batch import BatchBuilder, late_tokens, single_tokens
from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.engine.decode_graphs import Captured, Progress, Record
from multilora_cli.engine.page_rows import PageRows, table_columns
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS
from multilora_cli.models.decoder import Decoder
from multilora_cli.sizing.budget import (
    BASE_KIND,
    MAX_CHUNKS,
    PromptStep,
    StepKind,
    step_kind,
    step_kinds,
)
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.side_stream import SideStream
from multilora_kernels.spread_rows import spread_rows
from multilora_kernels.staging import Staging


class _Layout(NamedTuple):
    """Where the parts of the inputs begin, int32 each, at multiples of 16 bytes."""

    tokens: int  # four fields of so many: tokens, places, positions, slot mapping
    sequences: int  # four of so many: lengths, query starts, last rows, and the table's width

    @property
    def table(self) -> int:
        """Where the page table begins."""
        return 4 * (self.tokens + self.sequences)


class PromptGraphs:
    """Captured steps of the given sizes. `max_context` is in tokens."""

    def __init__(
        self,
        decoder: Decoder,
        builder: BatchBuilder,
        steps: Sequence[PromptStep],
        max_context: int,
        max_rank: int,
    ) -> None:
        self._decoder = decoder
        self._builder = builder
        self._steps = sorted(steps, key=lambda step: (step.num_tokens, step.decodes))
        self._max_context = max_context
        self._kinds = step_kinds(max_rank)
        self._graphs: dict[tuple[PromptStep, StepKind], Captured] = {}
        device = builder.pool.device
        most = max(step.decodes for step in steps) + MAX_CHUNKS
        tokens = max(step.num_tokens for step in steps)
        self._layout = _Layout(-(-tokens // 4) * 4, -(-(most + 1) // 4) * 4)
        columns = table_columns(max_context)
        self._inputs = torch.zeros(
            self._layout.table + most * columns, dtype=torch.int32, device=device
        )
        self._page_table = torch.zeros(most, columns, dtype=torch.int32, device=device)
        vocab = decoder.geometry.vocab_size
        self._logits = torch.empty(most, vocab, dtype=torch.float32, device=device)
        self._pages = PageRows(most, columns)
        self._staging = Staging(device)
        self._side = SideStream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Device bytes of what the graphs read and leave; GraphMemory counts the graphs."""
        return self._inputs.nbytes + self._page_table.nbytes + self._logits.nbytes

    def holds(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether a captured step has room for these rows."""
        extras = self._builder.table.has_extras
        return self._step_for(rows) is not None and not any(
            row.sequence.wants_prompt_logprobs or extras[row.sequence.slot] for row in rows
        )

    @torch.inference_mode()
    def record_all(self, record: Record, progress: Progress) -> None:
        """Record every step, the largest first, so that smaller ones reuse its memory; `progress`
        is told how many are done, and of how many."""
        keys = [(step, kind) for step in reversed(self._steps) for kind in self._kinds]
        segments = self._builder.segments
        for index, (step, kind) in enumerate(keys):
            progress(index, len(keys))
            if kind != BASE_KIND:
                segments.prepare_capture(
                    self._builder.table, step.num_tokens, kind.rank, groups=kind.groups
                )
            else:
                segments.build(np.zeros(step.num_tokens, dtype=np.int32))
            work: Callable[[], None] = partial(self._run, step, with_adapters=kind != BASE_KIND)
            with self._decoder.few_layers():
                work()  # compiles kernels, which a capture must not
            self._graphs[step, kind] = record(work)
        progress(len(keys), len(keys))
        segments.build(np.zeros(1, dtype=np.int32))

    def _run(self, step: PromptStep, *, with_adapters: bool) -> None:
        """One step from the fixed inputs to the logits of every sequence's last token."""
        builder, layout = self._builder, self._layout
        sequences = step.decodes + MAX_CHUNKS
        by_token = self._inputs[: 4 * layout.tokens].view(4, -1)[:, : step.num_tokens]
        by_sequence = self._inputs[4 * layout.tokens : layout.table].view(4, -1)
        token_ids, places, positions, slots = by_token.unbind(0)
        page_table = self._page_table[:sequences]
        spread_rows(self._inputs[layout.table :], by_sequence[3, :1], page_table)
        attention = AttentionBatch(
            query_start=by_sequence[1, : sequences + 1],
            seq_lens=by_sequence[0, :sequences],
            page_table=page_table,
            num_decodes=step.decodes,
            max_query_len=step.tokens,
            max_seq_len=self._max_context,
        )
        context = builder.context(
            slots.long(), attention, with_adapters=with_adapters, side=self._side
        )
        tokens = late_tokens(token_ids, places, builder.sampled)
        hidden = self._decoder.forward(tokens, positions.long(), context)
        last = hidden[by_sequence[2, :sequences].long()]
        self._decoder.logits(last, None, self._logits[:sequences])

    def run(self, rows: Sequence[ScheduledRow]) -> tuple[torch.Tensor, list[int]]:
        """Launch the step of `rows`: logits float32 [sequences, vocab], valid until the next one,
        and which of them is each row's."""
        step = self._step_for(rows)
        assert step is not None
        num_decodes = len(rows) - _num_chunks(rows)
        chunks = range(step.decodes, step.decodes + len(rows) - num_decodes)
        sequences = [*range(num_decodes), *chunks]
        slots = np.zeros(step.num_tokens, dtype=np.int32)
        inputs = self._host_inputs(rows, step, sequences, slots)
        kind = BASE_KIND
        if slots.any():
            self._builder.segments.build(slots)
            kind = step_kind(self._kinds, self._builder.table.groups_of(slots))
        self._staging.upload(self._inputs[: len(inputs)], inputs)
        self._graphs[step, kind].replay()
        return self._logits, sequences

    def _host_inputs(
        self,
        rows: Sequence[ScheduledRow],
        step: PromptStep,
        sequences: Sequence[int],
        slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """The inputs of `rows`, which are the step's `sequences`; fills in `slots` by token."""
        layout = self._layout
        by_token = np.zeros((4, layout.tokens), dtype=np.int32)
        by_sequence = np.zeros((4, layout.sequences), dtype=np.int32)
        by_token[1] = by_token[3] = -1  # known, and written nowhere
        lengths, starts, last_rows = by_sequence[0], by_sequence[1], by_sequence[2]
        starts[: step.decodes + 1] = np.arange(step.decodes + 1)
        table = self._pages.update(rows, sequences, step.decodes + MAX_CHUNKS)
        owners = np.zeros(layout.tokens, dtype=np.int32)  # the sequence of every token
        count = len(rows) - _num_chunks(rows)
        by_token[0, :count], by_token[1, :count] = single_tokens(rows[:count])
        by_token[2, :count] = [row.start for row in rows[:count]]
        slots[:count] = [row.sequence.slot for row in rows[:count]]
        owners[:count] = last_rows[:count] = np.arange(count)
        lengths[:count] = by_token[2, :count] + 1
        end = step.decodes
        for row, sequence in zip(rows[count:], sequences[count:], strict=True):
            part, stop = slice(end, end + row.length), row.start + row.length
            by_token[0, part] = row.sequence.tokens[row.start : stop]
            by_token[2, part] = np.arange(row.start, stop)
            slots[part] = row.sequence.slot
            owners[part] = sequence
            lengths[sequence] = stop
            last_rows[sequence] = part.stop - 1
            end = starts[sequence + 1] = part.stop
        for part in (slice(count), slice(step.decodes, end)):
            pages, places = np.divmod(by_token[2, part], BLOCK_TOKENS)
            by_token[3, part] = table[owners[part], pages] * BLOCK_TOKENS + places
        starts[sequences[-1] + 2 : step.decodes + MAX_CHUNKS + 1] = end  # chunks without tokens
        by_sequence[3, 0] = table.shape[1]
        return np.concatenate([by_token.reshape(-1), by_sequence.reshape(-1), table.reshape(-1)])

    def _step_for(self, rows: Sequence[ScheduledRow]) -> PromptStep | None:
        """The smallest captured step with room for these rows."""
        num_chunks = _num_chunks(rows)
        num_decodes = len(rows) - num_chunks
        num_tokens = sum(row.length for row in rows[num_decodes:])
        if not num_tokens or num_chunks > MAX_CHUNKS:
            return None
        fitting = (s for s in self._steps if s.decodes >= num_decodes and s.tokens >= num_tokens)
        return next(fitting, None)


def _num_chunks(rows: Sequence[ScheduledRow]) -> int:
    """Rows of more than one token: the last ones."""
    return next((n for n, row in enumerate(reversed(rows)) if row.length == 1), len(rows))

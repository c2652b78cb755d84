"""Decode steps as CUDA graphs: one launch for the whole model instead of several hundred.

A step of R rows runs as the smallest captured one that has room; spare rows have no context,
write nowhere and are not read. Steps without adapters have graphs of their own, without LoRA
launches; steps with adapters are captured for the attention's projections alone and for all, and
for a rank, which sizes the launches and nothing else: work of higher ranks is walked in turns.
Everything a graph reads is at a fixed address: the inputs here, which travel in one copy, the page
pool, the adapter table, and the work lists that `Segments.build` writes. It ends with the most
likely tokens; what else is to be sampled is sampled from the logits that it leaves.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from multilora_cli.engine.batch import BatchBuilder, late_tokens, single_tokens
from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.engine.device_meter import kept_bytes, settled_bytes
from multilora_cli.engine.page_rows import PageRows, table_columns
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS
from multilora_cli.models.decoder import Decoder
from multilora_cli.sizing.budget import BASE_KIND, StepKind, step_kind, step_kinds
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.pick_tokens import Picked, pick_tokens
from multilora_kernels.side_stream import SideStream
from multilora_kernels.spread_rows import spread_rows
from multilora_kernels.staging import Staging

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Record = Callable[[Callable[[], None]], "Captured"]

# Tokens, places, positions, slot mapping, sequence lengths; the last field holds one number, the
# width of the page table that follows.
_FIELDS = 6


class CapturedStep(NamedTuple):
    """What a captured step leaves on the device, a row each."""

    logits: torch.Tensor  # float32 [rows, vocab]
    picked: Picked  # the most likely tokens


class Captured(Protocol):
    """A recorded piece of work."""

    def replay(self) -> None:
        """Launch it again, on the current stream."""
        ...


class GraphMemory:
    """What graphs allocate from: one pool for all, since steps do not overlap.

    `torch.cuda.graph` empties torch's cache before every capture, and that of page-locked memory
    with it, so that each of 57 steps waited for the device and had its memory mapped anew: 5 to 7 s
    of a start. What it does that for, room for the graphs, is made here once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None  # that captures are made on
        self.pool_bytes = 0  # that torch keeps for what the captured steps allocate
        self.driver_bytes = 0  # that the driver keeps of them
        gc.collect()  # graphs of an engine before this one: see _uncollected
        settled_bytes(device)  # graphs cannot use what other steps have left in reserve

    def record(self, work: Callable[[], None]) -> Captured:
        """Capture `work`, and count what that takes: nothing else grows meanwhile."""
        kept, driver = kept_bytes(self._device)
        captured = self._capture(work)
        kept_after, driver_after = kept_bytes(self._device)
        self.pool_bytes += kept_after - kept
        self.driver_bytes += driver_after - driver
        return captured

    def _capture(self, work: Callable[[], None]) -> Captured:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.stream(self._stream):
            # Loader threads may use the device meanwhile: only this thread's calls are watched.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the collector from running. What it frees while this thread captures may be another
    graph, and to destroy one is a call that spoils the capture."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class _Rehearsed:
    """Work that was run and not recorded."""

    def replay(self) -> None:
        """There is nothing to launch."""
        raise RuntimeError("the step was rehearsed, not captured")


def rehearse(work: Callable[[], None]) -> Captured:
    """Takes the place of GraphMemory.record where only what steps need is wanted: their kernels."""
    return _Rehearsed()


class DecodeGraphs:
    """Captured decode steps of one decoder. `max_context` is in tokens."""

    def __init__(
        self,
        decoder: Decoder,
        builder: BatchBuilder,
        row_counts: Sequence[int],
        max_context: int,
        max_rank: int,
    ) -> None:
        self._decoder = decoder
        self._builder = builder
        self._row_counts = sorted(row_counts)
        self._max_context = max_context
        self._kinds = step_kinds(max_rank)
        # By rows, kind and whether adapters with extras are served.
        self._graphs: dict[tuple[int, StepKind, bool], Captured] = {}
        self._record: Record | None = None  # None: before the start, and once a capture failed
        device = builder.pool.device
        most = self._row_counts[-1]
        columns = table_columns(max_context)
        # Kernels are compiled for pointers at multiples of 16 bytes, so every field begins at one.
        self._field = -(-most // 4) * 4
        self._inputs = torch.zeros(
            _FIELDS * self._field + most * columns, dtype=torch.int32, device=device
        )
        self._page_table = torch.zeros(most, columns, dtype=torch.int32, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        # All graphs leave their logits here: one each would take 1.3 GB for an 8B and 256 rows.
        vocab = decoder.geometry.vocab_size
        self._logits = torch.empty(most, vocab, dtype=torch.float32, device=device)
        self._picked = Picked.empty(most, device)
        self._pages = PageRows(most, columns)
        self._staging = Staging(device)
        self._side = SideStream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Device bytes of what the graphs read and leave; GraphMemory counts the graphs."""
        fixed = (self._inputs, self._page_table, self._query_start, self._logits)
        return self._picked.nbytes + sum(tensor.nbytes for tensor in fixed)

    def holds(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether these rows are a step that was captured: one token each, and not too many. Steps
        for adapters with extras are captured here, when the first one comes.

        Not for the caller who wants log-probabilities of a prompt: those are taken from hidden
        states, which a graph does not keep.
        """
        if len(rows) > self._row_counts[-1] or rows[-1].length > 1:
            return False
        if self._record is not None and not self._builder.table.has_extras.any():
            return True
        key = self._key(self._slots(rows))
        if key not in self._graphs and self._record is not None:
            self._record_extras(*key[:2])
        return key in self._graphs

    @torch.inference_mode()
    def record_all(self, record: Record, progress: Progress) -> None:
        """Record every step, the largest first, so that smaller ones reuse its memory; `progress`
        is told how many are done, and of how many."""
        self._record = record
        keys = [(rows, kind) for rows in reversed(self._row_counts) for kind in self._kinds]
        for index, (rows, kind) in enumerate(keys):
            progress(index, len(keys))
            # A few layers launch every kernel, and take the host 2 ms instead of 30.
            with self._decoder.few_layers():
                self._warm_up(rows, kind)
            step = partial(self._run, rows, with_adapters=kind != BASE_KIND)
            self._graphs[rows, kind, False] = record(step)
        progress(len(keys), len(keys))
        self._builder.segments.build(np.zeros(1, dtype=np.int32))

    def _record_extras(self, rows: int, kind: StepKind) -> None:
        """Capture a step for adapters with extras (DoRA, biases, embedding, head) when the first
        one needs it: few fleets ever do, and it takes 0.1 s.

        Where that fails, for want of memory say, no other is captured: what has no graph is
        launched eagerly from then on, this step too.
        """
        record, self._record = self._record, None
        assert record is not None
        try:
            self._graphs[rows, kind, True] = self._captured_extras(record, rows, kind)
        except Exception:
            _log.exception("a step of %d rows with extras was not captured: it runs eagerly", rows)
        else:
            self._record = record

    def _captured_extras(self, record: Record, rows: int, kind: StepKind) -> Captured:
        # What the step before left would be computed again, and written to pages since given away.
        self._inputs.zero_()
        with self._decoder.few_layers():
            self._warm_up(rows, kind, extras=True)
        return record(partial(self._run, rows, with_adapters=True))

    @torch.inference_mode()
    def _warm_up(self, rows: int, kind: StepKind, *, extras: bool = False) -> None:
        """Run the step as it will be captured: kernels are compiled here, a capture must not."""
        segments, has_adapters = self._builder.segments, kind != BASE_KIND
        if has_adapters:
            segments.prepare_capture(
                self._builder.table, rows, kind.rank, groups=kind.groups, extras=extras
            )
        else:
            segments.build(np.zeros(rows, dtype=np.int32))
        self._run(rows, with_adapters=has_adapters)

    def _run(self, rows: int, *, with_adapters: bool) -> None:
        """One step from the fixed inputs to the first `rows` of logits and most likely tokens."""
        builder = self._builder
        fields = self._inputs[: _FIELDS * self._field].view(_FIELDS, self._field)
        token_ids, places, positions, slots, seq_lens, _ = fields[:, :rows].unbind(0)
        page_table = self._page_table[:rows]
        spread_rows(self._inputs[_FIELDS * self._field :], fields[-1, :1], page_table)
        attention = AttentionBatch(
            query_start=self._query_start[: rows + 1],
            seq_lens=seq_lens,
            page_table=page_table,
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=self._max_context,
        )
        context = builder.context(
            slots.long(), attention, with_adapters=with_adapters, side=self._side
        )
        tokens = late_tokens(token_ids, places, builder.sampled)
        hidden = self._decoder.forward(tokens, positions.long(), context)
        logits = self._decoder.logits(hidden, context.adapters, self._logits[:rows])
        pick_tokens(logits, None, self._picked.first(rows))

    def run(self, rows: Sequence[ScheduledRow]) -> CapturedStep:
        """Launch the step of `rows`; what it leaves is valid until the next one."""
        slots = self._slots(rows)
        key = padded, kind, _ = self._key(slots)
        if kind != BASE_KIND:
            self._builder.segments.build(slots)
        inputs = self._host_inputs(rows, padded)
        self._staging.upload(self._inputs[: len(inputs)], inputs)
        self._graphs[key].replay()
        count = len(rows)
        return CapturedStep(self._logits[:count], self._picked.first(count))

    def _slots(self, rows: Sequence[ScheduledRow]) -> npt.NDArray[np.int32]:
        """The slot of every row of the smallest step that has room; 0 for spare ones."""
        slots = np.zeros(next(size for size in self._row_counts if size >= len(rows)), np.int32)
        slots[: len(rows)] = [row.sequence.slot for row in rows]
        return slots

    def _key(self, slots: npt.NDArray[np.int32]) -> tuple[int, StepKind, bool]:
        """Which graph runs rows of these slots."""
        if not slots.any():
            return len(slots), BASE_KIND, False
        table = self._builder.table
        kind = step_kind(self._kinds, table.groups_of(slots))
        return len(slots), kind, bool(table.has_extras[slots].any())

    def _host_inputs(self, rows: Sequence[ScheduledRow], padded: int) -> npt.NDArray[np.int32]:
        """The fields of all rows, then their page table."""
        fields = np.zeros((_FIELDS, self._field), dtype=np.int32)
        fields[3] = -1  # a spare row writes nothing
        count = len(rows)
        fields[0, :count], fields[1, :count] = single_tokens(rows)
        positions = fields[2, :count]
        positions[:] = [row.start for row in rows]
        table = self._pages.update(rows, range(count), padded)
        pages = table[np.arange(count), positions // BLOCK_TOKENS]
        fields[3, :count] = pages * BLOCK_TOKENS + positions % BLOCK_TOKENS
        fields[4, :count] = positions + 1
        fields[5, 0] = table.shape[1]
        return np.concatenate([fields.reshape(-1), table.reshape(-1)])

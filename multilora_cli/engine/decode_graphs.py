"""Decode steps as CUDA graphs: one launch for the whole model instead of several hundred.

A step of R rows runs as the smallest captured one that has room; spare rows have no context,
write nowhere and are not read. Steps without adapters have graphs of their own, without LoRA
launches; steps with adapters are captured for a rank, which sizes the launches and nothing else:
work of higher ranks is walked in turns. Everything a graph reads is at a fixed address: the inputs
here, the page pool, the adapter table, and the work lists that `Segments.build` writes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from multilora_cli.engine.batch import BatchBuilder, late_tokens, page_table, single_tokens
from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.layers.context import StepContext
from multilora_cli.memory.kv_cache import pages_for
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS
from multilora_cli.models.decoder import Decoder
from multilora_cli.sizing.budget import graph_ranks
from multilora_kernels.paged_attention import AttentionBatch
from multilora_kernels.staging import Staging

Progress = Callable[[int, int], None]
Record = Callable[[Callable[[], None]], "Captured"]

_FIELDS = 5  # tokens, places, positions, slot mapping, sequence lengths


class Captured(Protocol):
    """A recorded piece of work."""

    def replay(self) -> None:
        """Launch it again, on the current stream."""
        ...


class _Memory:
    """What graphs allocate from: one pool for all, since steps do not overlap."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Captured:
        """Capture `work`."""
        graph = torch.cuda.CUDAGraph()
        # Loader threads may use the device meanwhile: only this thread's calls are watched.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph


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
        self._ranks = graph_ranks(max_rank)
        self._graphs: dict[tuple[int, int], Captured] = {}  # by rows and rank, 0 without adapters
        device = builder.pool.device
        most = self._row_counts[-1]
        # Kernels are compiled for pointers at multiples of 16 bytes, so every field begins at one.
        self._fields = torch.zeros(_FIELDS, -(-most // 4) * 4, dtype=torch.int32, device=device)
        self._page_table = torch.zeros(
            most, -(-pages_for(max_context) // 16) * 16, dtype=torch.int32, device=device
        )
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._pages = torch.empty(self._page_table.numel(), dtype=torch.int32, device=device)
        # All graphs leave their logits here: one each would take 1.3 GB for an 8B and 256 rows.
        vocab = decoder.geometry.vocab_size
        self._logits = torch.empty(most, vocab, dtype=torch.float32, device=device)
        self._staging = Staging(device)
        self.nbytes = 0  # of device memory that the graphs hold

    def holds(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether these rows are a step that was captured: one token each, and not too many.

        Log-probabilities of a prompt are taken from hidden states, which a graph does not keep.
        Steps in which an adapter has vectors (DoRA, trained biases) are launched eagerly.
        """
        vectors = self._builder.table.has_vectors
        return (
            len(rows) <= self._row_counts[-1]
            and rows[-1].length == 1
            and not any(vectors[row.sequence.slot] for row in rows)
            and not any(row.sequence.wants_prompt_logprobs for row in rows)
        )

    def capture(self, progress: Progress) -> None:
        """Capture every step; `progress` is told how many are done, and of how many."""
        device = self._builder.pool.device
        for rank in self._ranks:  # what an eager step allocates is the workspace's, not the graphs'
            self._warm_up(self._row_counts[-1], rank)
        free_before = torch.cuda.mem_get_info(device)[0]
        self.record_all(_Memory().record, progress)
        torch.cuda.synchronize(device)
        fixed = (self._fields, self._page_table, self._pages, self._query_start, self._logits)
        self.nbytes = sum(tensor.nbytes for tensor in fixed)
        self.nbytes += free_before - torch.cuda.mem_get_info(device)[0]

    @torch.inference_mode()
    def record_all(self, record: Record, progress: Progress) -> None:
        """Record every step, the largest first, so that smaller ones reuse its memory."""
        keys = [(rows, rank) for rows in reversed(self._row_counts) for rank in self._ranks]
        for index, (rows, rank) in enumerate(keys):
            progress(index, len(keys))
            self._warm_up(rows, rank)
            step = partial(self._run, rows, with_adapters=rank > 0)
            self._graphs[rows, rank] = record(step)
        progress(len(keys), len(keys))
        self._builder.segments.build(np.zeros(1, dtype=np.int32))

    @torch.inference_mode()
    def _warm_up(self, rows: int, rank: int) -> None:
        """Run the step as it will be captured: kernels are compiled here, a capture must not."""
        segments = self._builder.segments
        if rank:
            segments.prepare_capture(self._builder.table, rows, rank)
        else:
            segments.build(np.zeros(rows, dtype=np.int32))
        self._run(rows, with_adapters=rank > 0)

    def _run(self, rows: int, *, with_adapters: bool) -> None:
        """One step from the fixed inputs to the first `rows` of the logits."""
        builder = self._builder
        token_ids, places, positions, slots, seq_lens = self._fields[:, :rows].unbind(0)
        attention = AttentionBatch(
            query_start=self._query_start[: rows + 1],
            seq_lens=seq_lens,
            page_table=self._page_table[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=self._max_context,
        )
        context = StepContext(
            pool=builder.pool,
            slot_mapping=slots.long(),
            attention=attention,
            table=builder.table if with_adapters else None,
            segments=builder.segments if with_adapters else None,
            kv_dtype=builder.kv_dtype,
        )
        tokens = late_tokens(token_ids, places, builder.sampled)
        hidden = self._decoder.forward(tokens, positions.long(), context)
        self._decoder.logits(hidden, self._logits[:rows])

    def run(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        """Launch the step of `rows`: logits float32 [len(rows), vocab], valid until the next."""
        count = len(rows)
        padded = next(size for size in self._row_counts if size >= count)
        slots = np.zeros(padded, dtype=np.int32)
        slots[:count] = [row.sequence.slot for row in rows]
        segments, rank = self._builder.segments, 0
        if slots.any():
            segments.build(slots)
            rank = self._rank_for(self._builder.table.highest_rank(segments.seg_slots))
        self._fill(rows)
        self._graphs[padded, rank].replay()
        return self._logits[:count]

    def _fill(self, rows: Sequence[ScheduledRow]) -> None:
        """The step's inputs, in stream order behind the step before."""
        table, count = page_table(rows), len(rows)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        pages = table[np.arange(count), starts // BLOCK_TOKENS]
        fields = np.zeros(self._fields.shape, dtype=np.int32)
        fields[0, :count], fields[1, :count] = single_tokens(rows)
        fields[2, :count] = starts
        fields[3] = -1  # a spare row writes nothing
        fields[3, :count] = pages * BLOCK_TOKENS + starts % BLOCK_TOKENS
        fields[4, :count] = starts + 1
        self._staging.upload(self._fields, fields)
        staged = self._pages[: table.size]
        self._staging.upload(staged, table)
        self._page_table[:count, : table.shape[1]] = staged.view(table.shape)

    def _rank_for(self, rank: int) -> int:
        """What the captured step for adapters of up to `rank` is called."""
        sized = self._ranks[1:]
        return next((size for size in sized if size >= rank), sized[-1])

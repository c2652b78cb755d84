"""The tensors of one step, built once: token ids, positions, where K and V go, page tables."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.layers.context import StepContext
from multilora_cli.memory.kv_cache import pages_for
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS
from multilora_kernels.paged_attention import AttentionBatch
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepTensors:
    """What the decoder takes; `last_rows` is the host index of each row's last token row."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    context: StepContext
    last_rows: npt.NDArray[np.int64]  # [rows]


class BatchBuilder:
    """Turns scheduled rows into tensors on `device`."""

    def __init__(
        self, pool: torch.Tensor, table: AdapterTable, segments: Segments, kv_dtype: torch.dtype
    ) -> None:
        self._pool = pool
        self._kv_dtype = kv_dtype
        self._table = table
        self._segments = segments
        self._device = pool.device

    def build(self, rows: Rows[ScheduledRow]) -> StepTensors:
        """The step of `rows`; rows of one token come first."""
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(lengths)
        positions = _ranges(starts, lengths)
        token_ids = _token_ids(rows)
        page_table = _page_table(rows)
        owners = np.repeat(np.arange(len(rows)), lengths)
        pages = page_table[owners, positions // BLOCK_TOKENS]
        slot_mapping = pages.astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
        slots = np.array([row.sequence.slot for row in rows], dtype=np.int32)
        self._segments.build(np.repeat(slots, lengths))
        attention = AttentionBatch(
            query_start=self._on(np.concatenate([[0], ends]).astype(np.int32)),
            seq_lens=self._on((starts + lengths).astype(np.int32)),
            page_table=self._on(page_table),
            num_decodes=int((lengths == 1).sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int((starts + lengths).max()),
        )
        context = StepContext(
            pool=self._pool,
            slot_mapping=self._on(slot_mapping),
            attention=attention,
            table=self._table,
            segments=self._segments,
            kv_dtype=self._kv_dtype,
        )
        return StepTensors(self._on(token_ids), self._on(positions), context, ends - 1)

    def _on(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """`array` on the device, in stream order."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of every row, one after another."""
    offsets = np.cumsum(lengths) - lengths
    positions: npt.NDArray[np.int64] = np.repeat(starts - offsets, lengths)
    return positions + np.arange(len(positions))


def _token_ids(rows: Rows[ScheduledRow]) -> npt.NDArray[np.int64]:
    """The tokens of every row. Slices are copies: an exported array could not grow."""
    single = [row.sequence.tokens[row.start] for row in rows if row.length == 1]
    longer = [
        np.frombuffer(row.sequence.tokens[row.start : row.start + row.length], dtype=np.int32)
        for row in rows[len(single) :]
    ]
    return np.concatenate([np.array(single, dtype=np.int64), *longer])


def _page_table(rows: Rows[ScheduledRow]) -> Ints:
    """int32 [rows, most pages]; unused entries name the scratch page."""
    counts = [pages_for(row.start + row.length) for row in rows]
    table = np.zeros((len(rows), max(counts)), dtype=np.int32)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        table[index, :count] = np.frombuffer(row.pages[:count], dtype=np.int32)
    return table

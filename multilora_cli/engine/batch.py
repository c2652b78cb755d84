"""The tensors of one step, built once: token ids, positions, where K and V go, page tables.

Everything travels in one copy, as int32. Tokens that the step before sampled are not waited for:
a row names the place of its token among `sampled`, and the device looks it up.
"""

from collections.abc import Sequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.engine.page_rows import padded_columns
from multilora_cli.layers.context import RowAdapters, StepContext
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS
from multilora_cli.sizing.pages import pages_for_tokens
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.staging import Staging
from multilora_kernels.table import AdapterTable

Ints = npt.NDArray[np.int32]

# Logits of prompt tokens are taken in slices: 256 rows of a vocabulary of 128k are 134 MB.
PROMPT_ROWS = 256

_ALIGNED = 4  # int32: kernels are compiled for pointers and strides at multiples of 16 bytes


@dataclass(frozen=True)
class StepTensors:
    """What the decoder takes; `last_rows` is the host index of each row's last token row."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    context: StepContext
    last_rows: npt.NDArray[np.int64]  # [rows]


class BatchBuilder:
    """Turns scheduled rows into tensors on the pool's device.

    `sampled` int64 [most tokens that one step samples] is where the runner leaves a step's tokens.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        table: AdapterTable,
        segments: Segments,
        sampled: torch.Tensor,
        kv_dtype: torch.dtype,
    ) -> None:
        self.pool = pool
        self.table = table
        self.segments = segments
        self.sampled = sampled
        self.kv_dtype = kv_dtype
        # Logits are taken of a few rows, in an order of their own.
        self._head_segments = Segments(max(len(sampled), PROMPT_ROWS), pool.device)
        self._staging = Staging(pool.device)
        self._upload = torch.empty(0, dtype=torch.int32, device=pool.device)

    def build(self, rows: Rows[ScheduledRow]) -> StepTensors:
        """The step of `rows`; rows of one token come first."""
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(lengths)
        positions = _ranges(starts, lengths)
        token_ids, places = _tokens(rows)
        table = page_table(rows)
        owners = np.repeat(np.arange(len(rows)), lengths)
        slot_mapping = table[owners, positions // BLOCK_TOKENS] * BLOCK_TOKENS
        slot_mapping += positions % BLOCK_TOKENS
        slots = np.array([row.sequence.slot for row in rows], dtype=np.int32)
        self.segments.build(np.repeat(slots, lengths))
        query_start = np.concatenate([[0], ends])
        parts = self._to_device(
            token_ids, places, positions, slot_mapping, query_start, starts + lengths, table
        )
        token_ids_there, places_there, positions_there, mapping_there = parts[:4]
        if (places >= 0).any():
            token_ids_there = late_tokens(token_ids_there, places_there, self.sampled)
        attention = AttentionBatch(
            query_start=parts[4],
            seq_lens=parts[5],
            page_table=parts[6].view(len(rows), -1),
            num_decodes=int((lengths == 1).sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int((starts + lengths).max()),
        )
        context = self.context(mapping_there.long(), attention)
        return StepTensors(token_ids_there.long(), positions_there.long(), context, ends - 1)

    def context(
        self,
        slot_mapping: torch.Tensor,
        attention: AttentionBatch,
        *,
        with_adapters: bool = True,
        side: SideStream | None = None,
    ) -> StepContext:
        """What every layer of a step shares; its adapters are those `segments` was built for.

        `side` is for steps that are captured: where adapters' work may run beside the base's.
        """
        return StepContext(
            pool=self.pool,
            slot_mapping=slot_mapping,
            attention=attention,
            table=self.table if with_adapters else None,
            segments=self.segments if with_adapters else None,
            kv_dtype=self.kv_dtype,
            side=side,
        )

    def head_adapters(self, slots: Sequence[int]) -> RowAdapters | None:
        """The adapters of rows that logits are taken of; `slots` holds each row's slot."""
        if not self.table.has_extras[list(slots)].any():
            return None
        self._head_segments.build(slots)
        return RowAdapters(self.pool, self.table, self._head_segments)

    def _to_device(self, *arrays: npt.NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """The arrays flat, int32, each at an aligned address, in one copy in stream order."""
        sizes = [array.size for array in arrays]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        packed = np.zeros(sum(padded), dtype=np.int32)
        offsets = np.cumsum([0, *padded])
        for array, offset, size in zip(arrays, offsets, sizes, strict=False):
            packed[offset : offset + size] = array.reshape(-1)
        if self._upload.numel() < len(packed):
            size = 1 << (len(packed) - 1).bit_length()
            self._upload = torch.empty(size, dtype=torch.int32, device=self.pool.device)
        self._staging.upload(self._upload[: len(packed)], packed)
        return tuple(
            self._upload[offset : offset + size]
            for offset, size in zip(offsets, sizes, strict=False)
        )


def late_tokens(
    token_ids: torch.Tensor, places: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """int64 [T]: `sampled` at `places` where one is named, `token_ids` elsewhere (places -1)."""
    late = sampled[places.clamp(min=0).long()]
    return torch.where(places >= 0, late, token_ids.long())


def page_table(rows: Rows[ScheduledRow]) -> Ints:
    """int32 [rows, most pages, rounded up]; unused entries name the scratch page."""
    counts = [pages_for_tokens(row.start + row.length) for row in rows]
    table = np.zeros((len(rows), padded_columns(max(counts))), dtype=np.int32)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        table[index, :count] = np.frombuffer(row.pages, dtype=np.int32)[:count]
    return table


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of every row, one after another."""
    offsets = np.cumsum(lengths) - lengths
    positions: npt.NDArray[np.int64] = np.repeat(starts - offsets, lengths)
    return positions + np.arange(len(positions))


def single_tokens(rows: Rows[ScheduledRow]) -> tuple[list[int], list[int]]:
    """Of rows of one token: the token, and -1; or 0, and the place of a pending one."""
    tokens, places = [], []
    for row in rows:
        sequence = row.sequence
        if sequence.num_pending:
            tokens.append(0)
            places.append(sequence.pending_at)
        else:
            tokens.append(sequence.tokens[row.start])
            places.append(-1)
    return tokens, places


def _tokens(rows: Rows[ScheduledRow]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """The tokens of every row and their places. Slices are copies: an array on loan cannot grow."""
    short = [row for row in rows if row.length == 1]
    tokens, places = single_tokens(short)
    longer = [
        np.frombuffer(row.sequence.tokens[row.start : row.start + row.length], dtype=np.int32)
        for row in rows[len(short) :]
    ]
    known = np.full(sum(len(part) for part in longer), -1, dtype=np.int32)
    return (
        np.concatenate([np.array(tokens, dtype=np.int32), *longer]),
        np.concatenate([np.array(places, dtype=np.int32), known]),
    )

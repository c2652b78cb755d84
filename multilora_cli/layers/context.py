"""What every layer of one step shares."""

from dataclasses import dataclass

import torch

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.table import AdapterTable


@dataclass(frozen=True)
class RowAdapters:
    """Which adapter each row of some tensor uses, and where the adapters lie."""

    pool: torch.Tensor  # uint8 [num_pages, page_bytes]
    table: AdapterTable
    segments: Segments


@dataclass(frozen=True)
class StepContext:
    """The pool, where this step's keys and values go, and which adapter each token row uses."""

    pool: torch.Tensor  # uint8 [num_pages, page_bytes]: KV pages and adapter pages alike
    slot_mapping: torch.Tensor  # int64 [T]: page * 16 + offset of each token's K and V; -1: none
    attention: AttentionBatch
    table: AdapterTable | None = None  # None with segments None: no adapter in this step
    segments: Segments | None = None
    kv_dtype: torch.dtype | None = None  # how the pool holds K and V; None: in the compute dtype
    # Of a step that is captured: where adapters' work may run beside the base's; None: after it.
    side: SideStream | None = None

    @property
    def adapters(self) -> RowAdapters | None:
        """The adapters of all token rows; None: no adapter in this step."""
        if self.table is None or self.segments is None:
            return None
        return RowAdapters(self.pool, self.table, self.segments)

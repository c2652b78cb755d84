"""What every layer of one step shares."""

from dataclasses import dataclass

import torch

from multilora_kernels.paged_attention import AttentionBatch
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable


@dataclass(frozen=True)
class StepContext:
    """The pool, where this step's keys and values go, and which adapter each token row uses."""

    pool: torch.Tensor  # uint8 [num_pages, page_bytes]: KV pages and adapter pages alike
    slot_mapping: torch.Tensor  # int64 [T]: page * 16 + offset of each token's K and V; -1: none
    attention: AttentionBatch
    table: AdapterTable | None = None  # None with segments None: no adapter in this step
    segments: Segments | None = None
    kv_dtype: torch.dtype | None = None  # how the pool holds K and V; None: in the compute dtype

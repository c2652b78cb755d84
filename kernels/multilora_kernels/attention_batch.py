"""The sequences of a step as attention sees them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Which token rows belong to which sequence, and where their keys and values lie.

    Sequences with one query token come first (`num_decodes` of them). Under a captured graph the
    tensors are fixed buffers and the host integers are capacities.
    """

    query_start: torch.Tensor  # int32 [B + 1], first token row of each sequence
    seq_lens: torch.Tensor  # int32 [B], tokens of context, this step's included
    page_table: torch.Tensor  # int32 [B, max_pages]; entries past the context are never used
    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_sequences(self) -> int:
        """Rows of the page table."""
        return self.page_table.shape[0]

"""Segments: which rows of a step belong to which adapter, built once per step.

Rows are sorted by slot (stable); a segment is a run of rows with one slot. Rows of slot 0 are left
out altogether, so they cost nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Slots = Sequence[int] | npt.NDArray[np.integer]


class Segments:
    """The rows of the current step grouped by slot, on the host and in fixed device buffers.

    Buffers are written in place, so a captured CUDA graph replays with whatever the last `build`
    before the replay wrote.
    """

    def __init__(
        self, max_tokens: int, device: torch.device | str, max_segments: int | None = None
    ) -> None:
        self.max_tokens = max_tokens
        self.max_segments = max_tokens if max_segments is None else max_segments
        self.device = torch.device(device)
        self.num_tokens = 0
        self.permutation = np.empty(0, dtype=np.int32)  # rows with an adapter, sorted by slot
        self.seg_indptr = np.zeros(1, dtype=np.int32)  # segment i: permutation[indptr[i]:[i+1]]
        self.seg_slots = np.empty(0, dtype=np.int32)
        self._rows: list[tuple[int, torch.Tensor]] = []

    @property
    def num_segments(self) -> int:
        """Distinct adapters of the step."""
        return len(self.seg_slots)

    @property
    def has_adapters(self) -> bool:
        """Whether any row has one; if not, `add_lora` launches nothing."""
        return len(self.seg_slots) > 0

    def build(self, slots: Slots) -> None:
        """Group the rows of a step; `slots` holds the slot of every row, 0 for the base."""
        array = np.asarray(slots, dtype=np.int32)
        assert array.ndim == 1 and len(array) <= self.max_tokens
        self.num_tokens = len(array)
        order = np.argsort(array, kind="stable").astype(np.int32)
        order = order[array[order] > 0]
        by_slot = array[order]
        starts = np.flatnonzero(np.diff(by_slot, prepend=0)).astype(np.int32)
        assert len(starts) <= self.max_segments
        self.permutation = order
        self.seg_indptr = np.append(starts, np.int32(len(order))).astype(np.int32)
        self.seg_slots = by_slot[starts]
        self._rows = []

    def rows_by_slot(self, device: torch.device) -> list[tuple[int, torch.Tensor]]:
        """(slot, its row numbers as int64) of every segment: what the torch path walks."""
        if not self._rows and self.has_adapters:
            rows = torch.from_numpy(self.permutation.astype(np.int64)).to(device)
            lengths = np.diff(self.seg_indptr).tolist()
            self._rows = list(zip(self.seg_slots.tolist(), rows.split(lengths), strict=True))
        return self._rows

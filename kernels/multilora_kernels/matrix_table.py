"""Where the embedding's and the head's matrices of every slot lie: a part of the adapter table.

    heads    int32 [num_slots, matrices, 4]  first entry, log2 of the rows in a full block, row
                                             length, rows (0: the slot has no such matrix)
    entries  int64 [capacity]                element offset in the pool of every block, a matrix's
                                             blocks one after another

so row n of a matrix begins at pool element `entries[first + (n >> log2)] + (n & mask) * length`.
They are packed anew whenever a slot with matrices comes or goes: few adapters have any.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from multilora_kernels.layout import MATRICES, ImagePlan, MatrixName, matrix_rows
from multilora_kernels.staging import Staging

HEAD_FIELDS = 4


class MatrixTable:
    """The matrices of all slots; `capacity` is the number of their blocks, all together."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self.heads = torch.zeros(
            num_slots, len(MATRICES), HEAD_FIELDS, dtype=torch.int32, device=device
        )
        self.entries = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._heads = np.zeros(tuple(self.heads.shape), dtype=np.int32)
        self._blocks: dict[int, dict[MatrixName, npt.NDArray[np.int64]]] = {}
        self._staging = Staging(device)
        self._changed = False

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.heads.nbytes + self.entries.nbytes

    @property
    def num_blocks(self) -> int:
        """Blocks of all slots."""
        return sum(len(b) for matrices in self._blocks.values() for b in matrices.values())

    def can_hold(self, plan: ImagePlan) -> bool:
        """Whether there is room for the plan's matrices."""
        return self.num_blocks + len(plan.matrices) <= len(self.entries)

    def set(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None:
        """Enter the matrices of `plan`; image page i lies in pages[i]."""
        if not plan.matrices:
            return
        page_elements = plan.page_bytes // plan.itemsize
        found: dict[MatrixName, list[int]] = {}
        for block in plan.matrices:
            element = pages[block.page] * page_elements + block.offset // plan.itemsize
            found.setdefault(block.name, []).append(element)
        self._blocks[slot] = {name: np.array(e, dtype=np.int64) for name, e in found.items()}
        for name, rows, length in plan.extras.matrices:
            step = matrix_rows(length, plan.page_bytes, plan.itemsize)
            self._heads[slot, MATRICES.index(name)] = (0, step.bit_length() - 1, length, rows)
        self._changed = True

    def clear(self, slot: int) -> None:
        """Forget a slot's matrices."""
        if self._blocks.pop(slot, None) is not None:
            self._heads[slot] = 0
            self._changed = True

    def flush(self) -> None:
        """Upload in stream order what changed, all slots packed one after another."""
        if not self._changed:
            return
        self._changed = False
        packed, first = [], 0
        for slot, matrices in self._blocks.items():
            for name, elements in matrices.items():
                self._heads[slot, MATRICES.index(name), 0] = first
                packed.append(elements)
                first += len(elements)
        if packed:
            self._staging.upload(self.entries[:first], np.concatenate(packed))
        self._staging.upload(self.heads, self._heads)

    def matrix(self, slot: int, name: MatrixName, weights: torch.Tensor) -> torch.Tensor | None:
        """A copy of a whole matrix [rows, length] out of the flat pool; None: there is none."""
        elements = self._blocks.get(slot, {}).get(name)
        if elements is None:
            return None
        _, shift, length, rows = self._heads[slot, MATRICES.index(name)].tolist()
        sizes = [min(1 << shift, rows - (i << shift)) * length for i in range(len(elements))]
        runs = zip(elements.tolist(), sizes, strict=True)
        return torch.cat([weights[start : start + size] for start, size in runs]).view(rows, length)

    def rows(
        self, slot: int, name: MatrixName, weights: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor | None:
        """Rows `index` int64 [N] of a matrix, [N, length]; None: there is none."""
        elements = self._blocks.get(slot, {}).get(name)
        if elements is None:
            return None
        _, shift, length, _ = self._heads[slot, MATRICES.index(name)].tolist()
        first = torch.from_numpy(elements).to(index.device)[index >> shift]
        first += (index & ((1 << shift) - 1)) * length
        return weights[first[:, None] + torch.arange(length, device=index.device)]

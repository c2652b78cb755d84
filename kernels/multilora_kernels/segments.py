"""Segments: which rows of a step belong to which adapter, built once per step.

Rows are sorted by slot (stable); a segment is a run of rows with one slot. Rows of slot 0 are left
out altogether, so they cost nothing.

On a GPU `build` also writes the kernels' work lists (see `work_lists`), in place and in stream
order, for the table that `bind` or the first `add_lora` named. A captured CUDA graph replays with
whatever the last `build` wrote; building the same rows again costs nothing.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from multilora_kernels.launch import Chip, chip_of
from multilora_kernels.layout import GROUPS, MAX_RANK
from multilora_kernels.lora_choice import DECODE_TOKENS, Choose, choose, is_decode
from multilora_kernels.staging import Staging
from multilora_kernels.table import AdapterTable
from multilora_kernels.work_lists import WorkLists

Slots = Sequence[int] | npt.NDArray[np.integer]


class Segments:
    """The rows of the current step grouped by slot, on the host and in fixed device buffers."""

    def __init__(
        self,
        max_tokens: int,
        device: torch.device | str,
        max_segments: int | None = None,
        max_rank: int = MAX_RANK,
        choose: Choose = choose,
    ) -> None:
        """Args:
        max_segments: most distinct adapters of one step; default: one per row.
        max_rank: highest rank of any adapter; sizes the fixed buffers.
        choose: the launch choice, for tests and tuning.
        """
        self.max_tokens = max_tokens
        self.max_segments = max_tokens if max_segments is None else max_segments
        self.max_rank = max_rank
        self._choose = choose
        self.device = torch.device(device)
        self.num_tokens = 0
        self.permutation = np.empty(0, dtype=np.int32)  # rows with an adapter, sorted by slot
        self.seg_indptr = np.zeros(1, dtype=np.int32)  # segment i: permutation[indptr[i]:[i+1]]
        self.seg_slots = np.empty(0, dtype=np.int32)
        self._rows: list[tuple[int, torch.Tensor]] = []
        self._table: AdapterTable | None = None
        self._lists: dict[bool, WorkLists] = {}  # decode and prefill
        # What the lists were last written for; None before that.
        self._written: tuple[int, bytes, int] | None = None
        # Slot of every row, int32 [max_tokens]: written for steps with extras.
        self.row_slots = torch.zeros(max_tokens, dtype=torch.int32, device=self.device)
        self._slots = np.empty(0, dtype=np.int32)
        self._staging = Staging(self.device)
        self._has_extras: bool | None = None  # None until the step is known and asked about
        self._is_capture = False  # launch even where no row has an adapter
        self._is_sized_for_capture = False  # until the lists are written anew

    @property
    def num_segments(self) -> int:
        """Distinct adapters of the step."""
        return len(self.seg_slots)

    @property
    def nbytes(self) -> int:
        """Device bytes of the work lists written so far."""
        return self.row_slots.nbytes + sum(lists.nbytes for lists in self._lists.values())

    @property
    def has_adapters(self) -> bool:
        """Whether any row has one; if not, `add_lora` launches nothing."""
        return self._is_capture or len(self.seg_slots) > 0

    def has_extras(self, table: AdapterTable) -> bool:
        """Whether any row's adapter has more than factors of projections (`layout.Extras`).

        If not, `scale_shift` and `edge_lora` launch nothing. A step is captured in both ways, and
        this says which graph replays it.
        """
        if self._has_extras is None:
            found = bool(table.has_extras[self.seg_slots].any())
            if found:
                self._staging.upload(self.row_slots[: self.num_tokens], self._slots)
            self._has_extras = found
        return self._has_extras

    def build(self, slots: Slots) -> None:
        """Group the rows of a step; `slots` holds the slot of every row, 0 for the base."""
        array = np.asarray(slots, dtype=np.int32)
        assert array.ndim == 1 and len(array) <= self.max_tokens
        if self._is_current(array):
            return
        self._is_capture = False
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
        self._slots = array
        self._has_extras = None
        if self._table is not None:
            self._write(self._table)
            self.has_extras(self._table)

    def _is_current(self, slots: npt.NDArray[np.int32]) -> bool:
        """Whether the lists say just this already: most decode steps have the rows of the last."""
        table, written = self._table, self._written
        return (
            table is not None
            and written is not None
            and written[0] == table.version
            and self._has_extras is not None
            and not (self._is_capture or self._is_sized_for_capture)
            and np.array_equal(slots, self._slots)
        )

    def bind(self, table: AdapterTable) -> None:
        """Let `build` write work lists for `table`; allocates the fixed buffers at once."""
        if self._table is table:
            return
        self._table = table
        self._lists.clear()
        self._written = None
        if table.geometry is not None:
            self._lists_of(True)

    def reserve(self, table: AdapterTable) -> None:
        """`bind`, and allocate for the largest step with prompts too: serving takes no more, and
        steps with prompts may be captured."""
        self.bind(table)
        if not is_decode(self.max_tokens):
            self._lists_of(False).reserve_prompts(self.max_segments)

    def prepare_capture(
        self,
        table: AdapterTable,
        num_tokens: int,
        rank: int = 16,
        slots: Slots | None = None,
        *,
        groups: Collection[str] = tuple(GROUPS),
        extras: bool = False,
    ) -> None:
        """Size launches for `num_tokens` rows of distinct adapters of `rank`, whatever is listed.

        Call before capturing a graph: `add_lora` then launches although no row has an adapter.
        Replays with more work are walked in turns, those with less leave early: a step of rank 64
        through launches sized for rank 16 takes four turns, so give the highest rank in common
        use. `slots` are the rows that the captured step itself works on; default: the base alone.
        `groups`: those that replays have work for (`AdapterTable.groups_of`); a launch without
        work stands between its neighbours all the same, so the others have none.
        `extras`: capture what serves them too; without it the graph is for steps that have none.
        """
        assert num_tokens <= self.max_tokens
        self.build(np.zeros(num_tokens, dtype=np.int32) if slots is None else slots)
        self.lists(table).expect(num_tokens, rank, groups)
        self._is_capture = self._is_sized_for_capture = True
        self._has_extras = extras
        if extras:
            self._staging.upload(self.row_slots[:num_tokens], self._slots)

    def lists(self, table: AdapterTable) -> WorkLists:
        """Work lists of the current step, written if they are not yet."""
        self.bind(table)
        if not self._is_capture:
            self._write(table)
        return self._lists_of(is_decode(self.num_tokens))

    def rows_by_slot(self, device: torch.device) -> list[tuple[int, torch.Tensor]]:
        """(slot, its row numbers as int64) of every segment: what the torch path walks."""
        if not self._rows and len(self.seg_slots):
            rows = torch.from_numpy(self.permutation.astype(np.int64)).to(device)
            lengths = np.diff(self.seg_indptr).tolist()
            self._rows = list(zip(self.seg_slots.tolist(), rows.split(lengths), strict=True))
        return self._rows

    def _write(self, table: AdapterTable) -> None:
        if table.geometry is None:
            assert not len(self.seg_slots), "rows name slots of an empty table"
            return
        key = (
            table.version,
            self.seg_slots.tobytes() + self.seg_indptr.tobytes() + self.permutation.tobytes(),
            self.num_tokens,
        )
        if key != self._written or self._is_sized_for_capture:
            self._written = None  # what an update that fails leaves is nobody's
            lists = self._lists_of(is_decode(self.num_tokens))
            lists.update(self.permutation, self.seg_indptr, self.seg_slots, self.num_tokens)
            self._written = key
            self._is_sized_for_capture = False

    def _lists_of(self, decode: bool) -> WorkLists:
        lists = self._lists.get(decode)
        if lists is None:
            assert self._table is not None
            chip = _chip(self.device)
            lists = WorkLists(self._table, chip, self.max_tokens, self.max_rank, self._choose)
            if decode:
                lists.reserve(min(self.max_tokens, DECODE_TOKENS))
            self._lists[decode] = lists
        return lists


def _chip(device: torch.device) -> Chip:
    if device.type == "cuda":
        return chip_of(device.index or 0)
    return Chip("cpu", 0, 1)

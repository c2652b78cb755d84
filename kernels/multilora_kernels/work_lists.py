"""Work lists of the LoRA kernels: what every program of a step does, in fixed device buffers.

From the step's segments the host lists *runs* (one per segment and module, 16 integers); one small
kernel writes them out, in place, as

    tiles  int32 [.., 4]   cell, first row in `rows`, number of rows | part << 16, first row in the
                           planes; in decode a tile that several rows share stands here once for
                           each of the `row_splits` parts that its share of K is cut into
    tasks  int32 [.., 16]  first tile, tiles, first column of the module / 16, the module's column
                           in y / y_unit, first row, number of rows, first plane row, the module's
                           d_out / y_unit, cells of the first four tiles (-1: none), columns / 16,
                           0, 0, 0
    bands  int32 [.., 8]   first tile, tiles (all modules of one segment, SIDE_BY_SIDE at a time),
                           first row, number of rows, first plane row, 0, 0, 0
    counts int32 [4, 4]    tiles, tasks and bands of every group
    rows   int32 [tokens]  row numbers sorted by slot

with the tiles of a segment in a row, so entry t of it begins at plane row `first + t * rows`.
Nothing here depends on the layer: the same lists serve all of them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from multilora_kernels.launch import Chip
from multilora_kernels.layout import GROUPS, MODULES, TILE_RANKS, num_tiles
from multilora_kernels.list_capacity import (
    Capacity,
    decode_capacity,
    group_shapes,
    prompt_capacity,
)
from multilora_kernels.lora_choice import (
    SIDE_BY_SIDE,
    Choose,
    GroupShape,
    LoraChoice,
    choose,
)
from multilora_kernels.staging import Staging
from multilora_kernels.table import AdapterTable

RUN_FIELDS = 16
_WRITE = 32  # list entries that the writing kernel stores at a time
_COPY = 1024

IntArray = npt.NDArray[np.int32]


@triton.jit(do_not_specialize=["num_runs", "num_rows"])
def write_lists_kernel(
    runs_ptr, cells_ptr, source_rows_ptr, source_counts_ptr, tiles_ptr, tasks_ptr, bands_ptr,
    rows_ptr, counts_ptr, num_runs, num_rows, RUN_FIELDS: tl.constexpr, BAND: tl.constexpr,
    WRITE: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program >= num_runs:
        _copy_rows(
            source_rows_ptr, source_counts_ptr, rows_ptr, counts_ptr, program - num_runs, num_rows,
            COPY,
        )  # fmt: skip
    else:
        run = runs_ptr + program * RUN_FIELDS
        first_tile = tl.load(run + 1)
        num_tiles = tl.load(run + 2)
        start = tl.load(run + 4)
        rows = tl.load(run + 5)
        plane = tl.load(run + 6)
        index = tl.arange(0, WRITE)
        tile_out = tiles_ptr + tl.load(run + 0) * 4
        cell_in = cells_ptr + tl.load(run + 3)
        parts = tl.load(run + 15)
        for i in range(0, num_tiles * parts, WRITE):
            at = i + index
            mask = at < num_tiles * parts
            tl.store(tile_out + at * 4, tl.load(cell_in + at // parts, mask=mask), mask=mask)
            tl.store(tile_out + at * 4 + 1, at * 0 + start, mask=mask)
            tl.store(tile_out + at * 4 + 2, (at % parts) * 65536 + rows, mask=mask)
            tl.store(tile_out + at * 4 + 3, plane + at * rows, mask=mask)
        task_out = tasks_ptr + tl.load(run + 7) * 16
        num_tasks = tl.load(run + 8)
        columns = tl.load(run + 9)
        y_column = tl.load(run + 10)
        d_out = tl.load(run + 11)
        for i in range(0, num_tasks, WRITE):
            at = i + index
            mask = at < num_tasks
            to = task_out + at * 16
            tl.store(to, at * 0 + first_tile, mask=mask)
            tl.store(to + 1, at * 0 + num_tiles, mask=mask)
            tl.store(to + 2, at * columns, mask=mask)
            tl.store(to + 3, at * 0 + y_column, mask=mask)
            tl.store(to + 4, at * 0 + start, mask=mask)
            tl.store(to + 5, at * 0 + rows, mask=mask)
            tl.store(to + 6, at * 0 + plane, mask=mask)
            tl.store(to + 7, at * 0 + d_out, mask=mask)
            tl.store(to + 12, at * 0 + columns, mask=mask)
            for tile in tl.static_range(4):
                cell = tl.load(cell_in + tile, mask=tile < num_tiles, other=-1)
                tl.store(to + 8 + tile, at * 0 + cell, mask=mask)
        _write_bands(
            bands_ptr + tl.load(run + 12) * 8, tl.load(run + 13), tl.load(run + 14),
            first_tile, start, rows, plane, BAND, WRITE,
        )  # fmt: skip


@triton.jit
def _write_bands(
    bands_ptr, num_bands, num_tiles, first_tile, start, rows, plane, BAND: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    for i in range(0, num_bands, WRITE):
        at = i + tl.arange(0, WRITE)
        mask = at < num_bands
        first = at * BAND
        band = bands_ptr + at * 8
        tl.store(band, first_tile + first, mask=mask)
        tl.store(band + 1, tl.minimum(BAND, num_tiles - first), mask=mask)
        tl.store(band + 2, at * 0 + start, mask=mask)
        tl.store(band + 3, at * 0 + rows, mask=mask)
        tl.store(band + 4, plane + first * rows, mask=mask)


@triton.jit
def _copy_rows(
    source_rows_ptr, source_counts_ptr, rows_ptr, counts_ptr, block, num_rows, COPY: tl.constexpr,
):  # fmt: skip
    at = block * COPY + tl.arange(0, COPY)
    tl.store(rows_ptr + at, tl.load(source_rows_ptr + at, mask=at < num_rows), mask=at < num_rows)
    if block == 0:
        index = tl.arange(0, 16)
        tl.store(counts_ptr + index, tl.load(source_counts_ptr + index))


@dataclass(frozen=True)
class GroupLists:
    """One group's part of the lists, and how the kernels that walk them are launched."""

    index: int
    shape: GroupShape
    choice: LoraChoice
    tiles: torch.Tensor
    tasks: torch.Tensor
    bands: torch.Tensor
    counts: torch.Tensor
    num_tiles: int  # of this step, or of the step that a graph is captured for
    num_tasks: int
    num_bands: int
    plane_rows: int


def table_shapes(table: AdapterTable) -> dict[str, GroupShape]:
    """The launch groups whose modules the table knows."""
    geometry = table.geometry
    assert geometry is not None, "the table is empty"
    return group_shapes(table.shapes, geometry.page_bytes, geometry.itemsize)


def cut(indptr: IntArray, slots: IntArray, block_m: int) -> tuple[IntArray, IntArray, IntArray]:
    """Segments cut into even pieces of at most `block_m` rows: (slot, first row, rows) of each.

    Even, so that a row which shares its adapter is never left alone: one row takes another path.
    """
    lengths = np.diff(indptr)
    pieces = -(-lengths // block_m)
    owner = np.repeat(np.arange(len(slots)), pieces)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = ordinal * lengths[owner] // pieces[owner]
    stop = (ordinal + 1) * lengths[owner] // pieces[owner]
    first = indptr[:-1][owner] + start
    return slots[owner], first.astype(np.int32), (stop - start).astype(np.int32)


def _before(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Sum of all earlier entries, flat."""
    flat = values.reshape(-1).astype(np.int64)
    return np.cumsum(flat) - flat


@dataclass(frozen=True)
class _GroupRuns:
    """Runs of one group before its regions have a place: columns as in the module docstring."""

    runs: npt.NDArray[np.int64]
    cells: IntArray
    num_tiles: int
    num_tasks: int
    num_bands: int
    plane_rows: int


def list_runs(
    table: AdapterTable,
    shape: GroupShape,
    choice: LoraChoice,
    pieces: tuple[IntArray, IntArray, IntArray],
) -> _GroupRuns:
    """The runs of one group for the given pieces of segments."""
    slots, start, rows = pieces
    modules = [MODULES.index(module) for module in GROUPS[shape.name]]
    tiles = table.tiles[slots][:, modules]
    widest = int(tiles.max(initial=0))
    cells = table.cells[slots][:, modules, :widest]
    cells = cells[np.arange(widest) < tiles[:, :, None]]

    flat = tiles.reshape(-1).astype(np.int64)
    parts = np.repeat(np.where(rows == 1, 1, choice.row_splits), len(modules)).astype(np.int64)
    first_tile = _before(flat * parts)
    first_cell = _before(flat)
    d_out = np.tile(np.array(shape.d_outs, dtype=np.int64), len(slots))
    columns = np.full_like(flat, choice.block_n * choice.n_steps)
    if choice.is_decode:
        is_row = np.repeat(rows == 1, len(modules))
        kinds = range(SIDE_BY_SIDE + 2)
        alone = np.array([choice.columns(shape, count) for count in kinds])
        kind = np.minimum(flat, SIDE_BY_SIDE + 1)
        columns = _shared_columns(choice, kind, d_out, is_row)
        columns = np.where(is_row, alone[kind], columns)
    y_column = np.tile(_before(np.array(shape.d_outs)), len(slots))
    num_tasks = np.where(flat > 0, -(-d_out // columns), 0)
    plane_rows = flat * parts * np.repeat(rows, len(modules))
    seg_tiles = tiles.sum(axis=1)
    seg_bands = -(-seg_tiles // SIDE_BY_SIDE)
    # The first module that a segment has writes the bands of the whole segment.
    is_first = (tiles > 0) & (np.cumsum(tiles, axis=1) == tiles)
    bands = np.where(is_first, seg_bands[:, None], 0).reshape(-1)
    run = np.stack(
        [
            first_tile,
            first_tile,
            flat,
            first_cell,
            np.repeat(start, len(modules)),
            np.repeat(rows, len(modules)),
            _before(plane_rows),
            _before(num_tasks),
            num_tasks,
            columns // 16,
            y_column // shape.y_unit,
            d_out // shape.y_unit,
            _before(bands),
            bands,
            np.repeat(seg_tiles, len(modules)),
            parts,
        ],
        axis=1,
    )
    totals = ((flat * parts).sum(), num_tasks.sum(), bands.sum(), plane_rows.sum())
    return _GroupRuns(run[flat > 0], cells.astype(np.int32), *(int(total) for total in totals))


def _shared_columns(
    choice: LoraChoice,
    kind: npt.NDArray[np.int64],
    d_out: npt.NDArray[np.int64],
    is_row: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Columns of a task of each run whose rows share an adapter: as many blocks as leave enough
    tasks for the chip. `kind`: rank tiles, five for all that are more than four."""
    live = ~is_row & (kind > 0)
    blocks = choice.n_steps
    while True:
        widths = [choice.shared_columns(count, blocks) for count in range(SIDE_BY_SIDE + 2)]
        columns = np.array(widths)[kind]
        if blocks == 1 or int((-(-d_out // columns))[live].sum()) >= choice.wanted_tasks:
            return columns
        blocks //= 2


class WorkLists:
    """The lists of one table for steps of one kind, in buffers that never move once reserved."""

    def __init__(
        self,
        table: AdapterTable,
        chip: Chip,
        max_tokens: int,
        max_rank: int,
        choose: Choose = choose,
    ) -> None:
        self.table = table
        self._choose = choose
        self._is_fixed = False
        self.chip = chip
        self.shapes: Mapping[str, GroupShape] = table_shapes(table)
        self.max_tokens = max_tokens
        self.max_rank = max_rank
        self.groups: dict[str, GroupLists] = {}
        self._staging = Staging(table.device)
        self._upload = torch.empty(0, dtype=torch.int32, device=table.device)
        self._capacity: dict[str, Capacity] = {}
        self._counts = torch.zeros(4, 4, dtype=torch.int32, device=table.device)
        self.rows = torch.zeros(max(1, max_tokens), dtype=torch.int32, device=table.device)
        self._planes = torch.empty(0, dtype=torch.float32, device=table.device)
        self._tiles = torch.zeros(1, 4, dtype=torch.int32, device=table.device)
        self._tasks = torch.zeros(1, 16, dtype=torch.int32, device=table.device)
        self._bands = torch.zeros(1, 8, dtype=torch.int32, device=table.device)

    def reserve(self, max_tokens: int) -> None:
        """Allocate for any decode step of up to `max_tokens` rows; the buffers never move again.

        A captured graph keeps their addresses, so a step that would outgrow them is refused.
        """
        self._fix(decode_capacity(self.shapes, max_tokens, self.max_rank, self.chip, self._choose))

    def reserve_prompts(self, max_segments: int) -> None:
        """The same for any step above decode's size, of up to so many adapters."""
        limits = (self.max_tokens, max_segments, self.max_rank)
        self._fix(prompt_capacity(self.shapes, *limits, self.chip, self._choose))

    def _fix(self, capacity: tuple[Mapping[str, Capacity], int]) -> None:
        wanted, planes = capacity
        self._grow(wanted)
        self.planes(planes, 1)
        self._is_fixed = True

    @property
    def nbytes(self) -> int:
        """Device bytes of the lists and the planes."""
        buffers = (self._tiles, self._tasks, self._bands, self._counts, self.rows, self._planes)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def decode_grid(self, expected: int, choice: LoraChoice) -> int:
        """Programs of a decode launch that expects so much work.

        At least one a multiprocessor, for steps of higher rank than the graph was captured for
        (an idle program costs 0.6 ns); at most what the choice allows, the rest is walked in turns.
        """
        sms = self.chip.num_sms
        return max(sms, min(expected, choice.programs_per_sm * sms))

    def planes(self, num_rows: int, splits: int) -> torch.Tensor:
        """Flat fp32 scratch for `num_rows` x `splits` partial sums of 16 ranks."""
        needed = num_rows * splits * TILE_RANKS
        if self._planes.numel() < needed:
            assert not self._is_fixed, "a rank above Segments' max_rank"
            self._planes = torch.empty(needed, dtype=torch.float32, device=self.table.device)
        return self._planes

    def expect(self, num_tokens: int, rank: int, groups: Collection[str]) -> None:
        """Size the coming launches for `num_tokens` rows of as many adapters of `rank`, with
        modules of `groups`; the other groups launch nothing.

        The lists stay as they are: a launch walks whatever it finds there.
        """
        for name, group in self.groups.items():
            if name not in groups:
                self.groups[name] = replace(group, num_tiles=0, num_tasks=0)
            elif group.choice.is_decode:
                self.groups[name] = self._expect_rows(group, num_tokens, -(-rank // TILE_RANKS))
            else:
                self.groups[name] = self._expect_prompts(group, num_tokens, -(-rank // TILE_RANKS))

    def _expect_rows(self, group: GroupLists, num_tokens: int, tiles: int) -> GroupLists:
        """Programs read a record before they know whether it is one, so there are no more of them
        than records."""
        columns = group.choice.columns(group.shape, tiles)
        tasks = num_tokens * sum(-(-d_out // columns) for d_out in group.shape.d_outs)
        # Rows that share an adapter take narrower columns, and their share of K is cut once more:
        # three to an adapter, as many programs as run at once.
        width = group.choice.shared_columns(tiles, 1)
        shared = sum(-(-d_out // width) for d_out in group.shape.d_outs)
        shared = min(num_tokens // 3 * shared, 4 * self.chip.num_sms)
        parts = max(num_tokens, num_tokens // 3 * group.choice.row_splits)
        room = self._capacity[group.shape.name]
        return replace(
            group,
            num_tiles=min(parts * tiles * len(group.shape.d_outs), room.tiles),
            num_tasks=min(max(tasks, shared), room.tasks),
        )

    def _expect_prompts(self, group: GroupLists, num_tokens: int, tiles: int) -> GroupLists:
        """Twice the pieces of a single adapter, and as many programs as run at once; planes as far
        apart as the highest rank wants them."""
        choice, shape = group.choice, group.shape
        at_once = 4 * self.chip.num_sms
        pieces = 2 * -(-num_tokens // choice.block_m)
        columns = choice.block_n * choice.n_steps
        tasks = pieces * sum(-(-d_out // columns) for d_out in shape.d_outs)
        bands = pieces * -(-tiles * len(shape.d_outs) // SIDE_BY_SIDE)
        return replace(
            group,
            num_tiles=pieces * tiles * len(shape.d_outs),
            num_tasks=max(tasks, at_once),
            num_bands=max(bands, -(-at_once // choice.splits(shape.d_in))),
            plane_rows=num_tokens * len(shape.d_outs) * num_tiles(self.max_rank),
        )

    def _grow(self, wanted: Mapping[str, Capacity]) -> None:
        device = self.table.device
        if not all(
            name in self._capacity and self._capacity[name].covers(need)
            for name, need in wanted.items()
        ):
            assert not self._is_fixed, "a rank above Segments' max_rank"
            self._capacity = dict(wanted)
            caps = list(wanted.values())
            margin = self.chip.num_sms  # the smallest grid reads that many records
            self._tiles = torch.zeros(
                sum(c.tiles for c in caps) + margin, 4, dtype=torch.int32, device=device
            )
            self._tasks = torch.zeros(
                sum(c.tasks for c in caps) + margin, 16, dtype=torch.int32, device=device
            )
            self._bands = torch.zeros(
                sum(c.bands for c in caps) + margin, 8, dtype=torch.int32, device=device
            )

    def update(
        self, permutation: IntArray, indptr: IntArray, slots: IntArray, num_tokens: int
    ) -> None:
        """Write the lists of a step, in stream order."""
        choices = {n: self._choose(s, num_tokens, self.chip) for n, s in self.shapes.items()}
        found = {}
        for name, shape in self.shapes.items():
            pieces = cut(indptr, slots, choices[name].block_m)
            found[name] = list_runs(self.table, shape, choices[name], pieces)
        self._grow({n: Capacity(f.num_tiles, f.num_tasks, f.num_bands) for n, f in found.items()})
        for name, runs in found.items():
            self.planes(runs.plane_rows, choices[name].splits(self.shapes[name].d_in))
        self._set_groups(choices, found)
        self._write(found, permutation)

    def _set_groups(
        self, choices: Mapping[str, LoraChoice], found: Mapping[str, _GroupRuns]
    ) -> None:
        base = Capacity(0, 0, 0)
        for index, (name, runs) in enumerate(found.items()):
            size = self._capacity[name]
            self.groups[name] = GroupLists(
                index,
                self.shapes[name],
                choices[name],
                self._tiles[base.tiles : base.tiles + size.tiles + 1],
                self._tasks[base.tasks : base.tasks + size.tasks + 1],
                self._bands[base.bands : base.bands + size.bands + 1],
                self._counts[index],
                runs.num_tiles,
                runs.num_tasks,
                runs.num_bands,
                runs.plane_rows,
            )
            runs.runs[:, 0] += base.tiles
            runs.runs[:, 7] += base.tasks
            runs.runs[:, 12] += base.bands
            base = Capacity(
                base.tiles + size.tiles, base.tasks + size.tasks, base.bands + size.bands
            )

    def _write(self, found: Mapping[str, _GroupRuns], permutation: IntArray) -> None:
        """One upload, one launch."""
        counts = np.zeros((4, 4), dtype=np.int32)
        cells_before = 0
        for index, runs in enumerate(found.values()):
            counts[index, :3] = (runs.num_tiles, runs.num_tasks, runs.num_bands)
            runs.runs[:, 3] += cells_before
            cells_before += len(runs.cells)
        runs_flat = np.concatenate([runs.runs for runs in found.values()]).astype(np.int32)
        cells = np.concatenate([runs.cells for runs in found.values()])
        # Every part begins at a multiple of 16 bytes, as Triton takes pointers to do.
        rows = np.pad(permutation, (0, -len(permutation) % 4))
        parts = [counts.reshape(-1), runs_flat.reshape(-1), rows, cells]
        packed = np.concatenate(parts)
        if self._upload.numel() < len(packed):
            size = 1 << (len(packed) - 1).bit_length()
            self._upload = torch.empty(size, dtype=torch.int32, device=self.table.device)
        upload = self._upload[: len(packed)]
        self._staging.upload(upload, packed)
        sizes = [len(part) for part in parts]
        source_counts, source_runs, source_rows, source_cells = upload.split(sizes)
        grid = (len(runs_flat) + max(1, -(-len(permutation) // _COPY)),)
        write_lists_kernel[grid](
            source_runs, source_cells, source_rows, source_counts,
            self._tiles, self._tasks, self._bands, self.rows, self._counts,
            len(runs_flat), len(permutation),
            RUN_FIELDS=RUN_FIELDS, BAND=SIDE_BY_SIDE, WRITE=_WRITE, COPY=_COPY, num_warps=1,
        )  # fmt: skip

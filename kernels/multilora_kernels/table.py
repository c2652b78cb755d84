"""The adapter table: from a slot to the pool offsets of its weights.

Device side, `offsets` int64 [num_layers, num_cells, cell_width]. A *cell* belongs to one rank tile
of one module of one slot and holds, per layer, the places of that tile's blocks: first the chunks
of A, then those of B. Cells have one size and come from a free list, so slots of any rank come and
go without fragmentation, and work lists that name cells serve all layers.

An entry is the block's element offset in the pool; bit 0 marks a tile that is 8 ranks wide (blocks
start at multiples of 128 bytes, so the low bits are free), and -1 a tile absent from that layer.

Vectors of one module of one slot have a cell of their own: first the pieces of "scale", then those
of "shift", as float32 element offsets, -1 where there is none. `vector_cells` int32
[num_slots, modules] names it, -1 where a slot has no vectors.

Host side the same entries, plus plan and pages of every slot, which the torch path reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from multilora_kernels.layout import (
    GROUPS,
    MAX_RANK,
    MODULES,
    NO_EXTRAS,
    TILE_RANKS,
    VECTOR_ITEMSIZE,
    Block,
    ImagePlan,
    VectorBlock,
    VectorKind,
    chunk_length,
    vector_chunk,
)
from multilora_kernels.matrix_table import MatrixTable
from multilora_kernels.staging import Staging

_ABSENT = -1
TILES_PER_MODULE = MAX_RANK // TILE_RANKS


@dataclass(frozen=True)
class PlacedBlock:
    """A block of one slot and where it starts in the flat pool, in elements."""

    block: Block
    element: int


@dataclass(frozen=True)
class PlacedRun:
    """Neighbouring blocks of one tile, equally long and equally far apart in the pool.

    `count` blocks of `length` elements along the long side, the first at `start` and pool element
    `element`, the next ones `step` elements on. Most tiles are one run.
    """

    matrix: str
    rank_start: int
    rank_width: int
    start: int
    length: int
    count: int
    element: int
    step: int


@dataclass(frozen=True)
class CellGeometry:
    """How one cell is laid out: the same for every slot of a pool."""

    page_bytes: int
    itemsize: int
    chunk: int  # elements along the long side of a full block
    a_chunks: Mapping[str, int]  # chunks of A by module; B's follow in the cell
    width: int  # entries of one layer in a cell
    vector_chunk: int  # elements of a full piece of a vector


@dataclass
class _Slot:
    """Host record of an occupied slot."""

    plan: ImagePlan
    pages: tuple[int, ...]
    cells: npt.NDArray[np.int32]
    blocks: dict[tuple[int, str], tuple[PlacedBlock, ...]] = field(default_factory=dict)
    runs: dict[tuple[int, str], tuple[PlacedRun, ...]] = field(default_factory=dict)
    vectors: dict[tuple[int, str, VectorKind], tuple[tuple[VectorBlock, int], ...]] = field(
        default_factory=dict
    )


class AdapterTable:
    """Maps slots to the blocks of their adapters, on the device and on the host.

    Slot 0 is the base model: rank 0 everywhere. Capacity is fixed at construction: `max_blocks` is
    the number of blocks of all adapters that may be hot together, counted as if an adapter that
    leaves out some layers had them all.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        shapes: Mapping[str, tuple[int, int]],
        max_blocks: int,
        device: torch.device | str,
    ) -> None:
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.shapes = dict(shapes)
        self.device = torch.device(device)
        self.version = 0  # changes with every set and clear
        self.geometry: CellGeometry | None = None
        # Tiles of different modules have different block counts but share one cell size (factor
        # 3), and a small adapter in every slot must fit whatever `max_blocks` says.
        entries = 3 * (max_blocks + num_layers * len(MODULES) * num_slots)
        self._entries = torch.full((entries,), _ABSENT, dtype=torch.int64, device=self.device)
        self._staging = Staging(self.device)
        # Tiles by (slot, module), and the cell of each.
        self.tiles = np.zeros((num_slots, len(MODULES)), dtype=np.int32)
        self.cells = np.full((num_slots, len(MODULES), TILES_PER_MODULE), _ABSENT, dtype=np.int32)
        self._vector_cells = np.full((num_slots, len(MODULES)), _ABSENT, dtype=np.int32)
        self.vector_cells = torch.full(
            (num_slots, len(MODULES)), _ABSENT, dtype=torch.int32, device=self.device
        )
        # The embedding's and the head's matrices of all slots.
        self.matrices = MatrixTable(num_slots, max_blocks, self.device)
        self.has_extras = np.zeros(num_slots, dtype=np.bool_)
        self._vectors_changed = False
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        self._offsets_cpu = np.empty((0, 0, 0), dtype=np.int64)
        self._dirty: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Device bytes of the table."""
        return self._entries.nbytes + self.vector_cells.nbytes + self.matrices.nbytes

    @property
    def offsets(self) -> torch.Tensor:
        """Device entries, int64 [num_layers, num_cells, cell_width]."""
        shape = self._offsets_cpu.shape
        return self._entries[: self._offsets_cpu.size].view(shape)

    @property
    def num_cells(self) -> int:
        """Rank tiles that all slots together may hold."""
        return self._offsets_cpu.shape[1]

    @property
    def cell_width(self) -> int:
        """Entries that one layer has in a cell."""
        return self._offsets_cpu.shape[2]

    def can_hold(self, plan: ImagePlan) -> bool:
        """Whether the cells for `plan` are free."""
        self.settle(plan.page_bytes, plan.itemsize)
        needed = sum(plan.tiles.values()) + len(plan.vector_modules)
        return needed <= len(self._free) and self.matrices.can_hold(plan)

    def set(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None:
        """Let `slot` stand for the image laid out by `plan`; pages[i] holds image page i."""
        assert 0 < slot < self.num_slots and len(pages) == plan.num_pages
        self.clear(slot)
        self.settle(plan.page_bytes, plan.itemsize)
        tiles = plan.tiles
        with_vectors = plan.vector_modules
        needed = sum(tiles.values()) + len(with_vectors)
        if needed > len(self._free):
            raise RuntimeError(
                f"the adapter table is full: {needed} rank tiles needed, {len(self._free)} free"
            )
        taken = [self._free.pop() for _ in range(needed)]
        position = 0
        for module, count in tiles.items():
            index = MODULES.index(module)
            self.tiles[slot, index] = count
            self.cells[slot, index, :count] = taken[position : position + count]
            position += count
        for module, cell in zip(with_vectors, taken[position:], strict=True):
            self._vector_cells[slot, MODULES.index(module)] = cell
        self.has_extras[slot] = plan.extras != NO_EXTRAS
        self._vectors_changed |= bool(with_vectors)
        cells = np.array(taken, dtype=np.int32)
        self._slots[slot] = _Slot(plan, tuple(pages), cells)
        self._write_entries(slot, plan, pages)
        self.matrices.set(slot, plan, pages)
        self._touch(cells)

    def clear(self, slot: int) -> None:
        """Empty `slot`: no rows may use it any more."""
        record = self._slots.pop(slot, None)
        if record is None:
            return
        self.tiles[slot] = 0
        self.cells[slot] = _ABSENT
        self._vectors_changed |= bool((self._vector_cells[slot] != _ABSENT).any())
        self._vector_cells[slot] = _ABSENT
        self.has_extras[slot] = False
        self.matrices.clear(slot)
        self._offsets_cpu[:, record.cells] = _ABSENT
        self._free.extend(record.cells.tolist())
        self._touch(record.cells)

    def flush(self) -> None:
        """Upload what `set` and `clear` changed, in stream order. Call between steps."""
        if self._vectors_changed:
            self._staging.upload(self.vector_cells, self._vector_cells)
            self._vectors_changed = False
        self.matrices.flush()
        if not self._dirty:
            return
        cells = np.array(sorted(self._dirty), dtype=np.int64)
        self._dirty.clear()
        changed = self._offsets_cpu[:, cells]
        if len(cells) == self.num_cells:
            self._staging.upload(self.offsets, changed)
            return
        both = torch.empty(cells.size + changed.size, dtype=torch.int64, device=self.device)
        self._staging.upload(both, np.concatenate((cells, changed.reshape(-1))))
        index, values = both[: cells.size], both[cells.size :].view(changed.shape)
        self.offsets.index_copy_(1, index, values)

    def blocks(self, slot: int, layer: int, module: str) -> tuple[PlacedBlock, ...]:
        """Blocks of one module of one layer of `slot`, from the host mirror; empty for rank 0."""
        record = self._slots.get(slot)
        if record is None:
            return ()
        if not record.blocks:
            record.blocks.update(_place(record.plan, record.pages))
        return record.blocks.get((layer, module), ())

    def runs(self, slot: int, layer: int, module: str) -> tuple[PlacedRun, ...]:
        """The same blocks joined to runs: what the torch path reads; empty for rank 0."""
        record = self._slots.get(slot)
        if record is None:
            return ()
        key = (layer, module)
        if key not in record.runs:
            record.runs[key] = _join(self.blocks(slot, layer, module))
        return record.runs[key]

    def groups_of(self, slots: Sequence[int] | npt.NDArray[np.integer]) -> tuple[str, ...]:
        """The groups of projections in which any of `slots` has a module, in GROUPS' order."""
        used = (self.tiles[np.asarray(slots)] > 0).any(axis=0)
        found = {module for module, is_used in zip(MODULES, used, strict=True) if is_used}
        return tuple(name for name, modules in GROUPS.items() if found.intersection(modules))

    def vectors(
        self, slot: int, layer: int, module: str, kind: VectorKind
    ) -> tuple[tuple[VectorBlock, int], ...]:
        """Pieces of one vector and their float32 elements in the flat pool; empty for none."""
        record = self._slots.get(slot)
        if record is None:
            return ()
        if not record.vectors:
            record.vectors.update(_place_vectors(record.plan, record.pages))
        return record.vectors.get((layer, module, kind), ())

    def rank(self, slot: int, layer: int, module: str) -> int:
        """True rank of one module of one layer of `slot`."""
        record = self._slots.get(slot)
        return record.plan.ranks.get((layer, module), 0) if record else 0

    def settle(self, page_bytes: int, itemsize: int) -> None:
        """Fix the layout of the cells. The first plan does; a graph is captured before it."""
        if self.geometry is not None:
            assert self.geometry.page_bytes == page_bytes
            assert self.geometry.itemsize == itemsize
            return
        chunk = chunk_length(page_bytes, itemsize)
        chunks = {
            module: (-(-d_in // chunk), -(-d_out // chunk))
            for module, (d_in, d_out) in self.shapes.items()
        }
        width = max(sum(pair) for pair in chunks.values())
        self.geometry = CellGeometry(
            page_bytes,
            itemsize,
            chunk,
            {module: pair[0] for module, pair in chunks.items()},
            width,
            vector_chunk(page_bytes, itemsize),
        )
        # Kernels look one record ahead and may read (never use) entries of one cell past the last.
        num_cells = (self._entries.numel() - width) // (self.num_layers * width)
        self._offsets_cpu = np.full((self.num_layers, num_cells, width), _ABSENT, dtype=np.int64)
        self._free = list(range(num_cells - 1, -1, -1))

    def _write_entries(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None:
        geometry, blocks = self.geometry, plan.columns
        assert geometry is not None
        a_chunks = np.array([geometry.a_chunks.get(m, 0) for m in MODULES], dtype=np.int64)
        cell = self.cells[slot][blocks.module, blocks.tile]
        column = blocks.start // geometry.chunk + blocks.is_b * a_chunks[blocks.module]
        page_elements = plan.page_bytes // plan.itemsize
        first = np.asarray(pages, dtype=np.int64)[blocks.page] * page_elements
        self._offsets_cpu[blocks.layer, cell, column] = (first + blocks.element) | blocks.is_narrow

        if plan.vectors:
            self._write_vectors(slot, plan, pages)

    def _write_vectors(self, slot: int, plan: ImagePlan, pages: Sequence[int]) -> None:
        """Two vectors never take more than a cell: a piece is as long as eight rows of blocks."""
        assert self.geometry is not None
        pieces = plan.vector_columns
        lengths = [self.shapes[m][1] if m in self.shapes else 0 for m in MODULES]
        per_vector = -(-np.array(lengths) // self.geometry.vector_chunk)
        column = pieces.kind * per_vector[pieces.module] + pieces.ordinal
        cell = self._vector_cells[slot][pieces.module]
        first = np.asarray(pages, dtype=np.int64)[pieces.page]
        element = first * (plan.page_bytes // VECTOR_ITEMSIZE) + pieces.element
        self._offsets_cpu[pieces.layer, cell, column] = element

    def _touch(self, cells: npt.NDArray[np.int32]) -> None:
        self._dirty.update(cells.tolist())
        self.version += 1


def _place_vectors(
    plan: ImagePlan, pages: Sequence[int]
) -> dict[tuple[int, str, VectorKind], tuple[tuple[VectorBlock, int], ...]]:
    """Pieces of vectors with their pool positions, by (layer, module, kind)."""
    placed: dict[tuple[int, str, VectorKind], list[tuple[VectorBlock, int]]] = {}
    for vector in plan.vectors:
        element = (pages[vector.page] * plan.page_bytes + vector.offset) // VECTOR_ITEMSIZE
        key = (vector.layer, vector.module, vector.kind)
        placed.setdefault(key, []).append((vector, element))
    return {key: tuple(pieces) for key, pieces in placed.items()}


def _place(plan: ImagePlan, pages: Sequence[int]) -> dict[tuple[int, str], tuple[PlacedBlock, ...]]:
    """Blocks with their pool positions, by (layer, module)."""
    placed: dict[tuple[int, str], list[PlacedBlock]] = {}
    page_elements = plan.page_bytes // plan.itemsize
    for block in plan.blocks:
        element = pages[block.page] * page_elements + block.offset // plan.itemsize
        placed.setdefault((block.layer, block.module), []).append(PlacedBlock(block, element))
    return {key: tuple(blocks) for key, blocks in placed.items()}


def _join(blocks: tuple[PlacedBlock, ...]) -> tuple[PlacedRun, ...]:
    """Blocks in canonical order as runs: same tile, same length, same distance in the pool."""
    runs: list[PlacedRun] = []
    for place in blocks:
        block = place.block
        last = runs[-1] if runs else None
        if last is not None and _continues(last, place):
            step = place.element - last.element if last.count == 1 else last.step
            runs[-1] = replace(last, count=last.count + 1, step=step)
        else:
            tile = (block.matrix, block.rank_start, block.rank_width)
            runs.append(PlacedRun(*tile, block.start, block.length, 1, place.element, 0))
    return tuple(runs)


def _continues(run: PlacedRun, place: PlacedBlock) -> bool:
    block = place.block
    return (
        (block.matrix, block.rank_start) == (run.matrix, run.rank_start)
        and (block.length, block.start) == (run.length, run.start + run.count * run.length)
        and place.element > run.element
        and (run.count == 1 or place.element == run.element + run.count * run.step)
    )

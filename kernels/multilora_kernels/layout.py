"""Byte layout of adapter weights in pool pages. Torch-free: sizing and adapters import it too.

The weights of one adapter are cut twice:

* into *tiles* of 16 ranks of one matrix of one layer, A as [16][d_in] and B as [d_out][16]. The
  last tile is 8 wide where 8 ranks or fewer remain: padding ends at the next multiple of 8;
* along their long side into *blocks* of `chunk_length` elements (a power of two, the same for every
  module), at most an eighth of a page, so that the block of any row or column follows from a shift.

Vectors over a module's outputs (`Extras`) are float32 whatever the weights are, cut into pieces of
the size of a full block. Matrices of the embedding and the head are cut into runs of whole rows.
All of them are packed into whole pages of the pool by best fit over the entire image.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TOKENS_PER_PAGE = 16
TILE_RANKS = 16
MAX_RANK = 512
# Every block starts at a multiple of this many bytes: one cache line, 16-byte vector loads.
BLOCK_ALIGNMENT = 128

VECTOR_ITEMSIZE = 4  # float32

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, kv_itemsize: int) -> int:
    """Bytes of one pool page: K and V of 16 tokens for all layers."""
    return num_layers * 2 * num_kv_heads * TOKENS_PER_PAGE * head_dim * kv_itemsize


def num_tiles(rank: int) -> int:
    """Tiles of 16 ranks that a matrix of `rank` takes; 0 for a missing module."""
    return -(-rank // TILE_RANKS)


def tile_width(rank: int, rank_start: int) -> int:
    """Ranks stored by the tile that begins at `rank_start`: 16, or 8 where 8 or fewer remain."""
    return 8 if rank - rank_start <= 8 else TILE_RANKS


def chunk_length(page_bytes: int, itemsize: int) -> int:
    """Elements along the long side of a full block: a power of two, at least 16.

    Raises ValueError when a page cannot hold one block of 16 x 16 elements.
    """
    smallest = TILE_RANKS * TILE_RANKS * itemsize
    if page_bytes < smallest:
        raise ValueError(f"a page of {page_bytes} bytes cannot hold a block of {smallest} bytes")
    elements = max(page_bytes // 8, smallest) // (TILE_RANKS * itemsize)
    return 1 << (elements.bit_length() - 1)


def num_chunks(length: int, page_bytes: int, itemsize: int) -> int:
    """Blocks that a tile of `length` elements along its long side is cut into."""
    return -(-length // chunk_length(page_bytes, itemsize))


@dataclass(frozen=True, slots=True)
class Block:
    """One contiguous piece of an adapter image.

    An "a" block holds A[rank_start:+rank_width, start:start+length] as [rank_width][length], a "b"
    block B[start:start+length, rank_start:+rank_width] as [length][rank_width]. Ranks beyond the
    true rank are zero. `offset` is in bytes within image page `page`.
    """

    layer: int
    module: str
    matrix: str  # "a" or "b"
    rank_start: int
    rank_width: int  # 8 or 16
    start: int
    length: int
    page: int
    offset: int


class BlockColumns(NamedTuple):
    """The blocks of a plan column by column, int64 [num_blocks] each."""

    layer: "npt.NDArray[np.int64]"
    module: "npt.NDArray[np.int64]"  # index in MODULES
    is_b: "npt.NDArray[np.int64]"
    tile: "npt.NDArray[np.int64]"
    is_narrow: "npt.NDArray[np.int64]"  # 1 where the tile is 8 ranks wide
    start: "npt.NDArray[np.int64]"
    page: "npt.NDArray[np.int64]"
    element: "npt.NDArray[np.int64]"  # offset within the page


class VectorColumns(NamedTuple):
    """The pieces of a plan's vectors column by column, int64 [number of pieces] each."""

    layer: "npt.NDArray[np.int64]"
    module: "npt.NDArray[np.int64]"  # index in MODULES
    kind: "npt.NDArray[np.int64]"  # index in VECTOR_KINDS
    ordinal: "npt.NDArray[np.int64]"  # within its vector
    page: "npt.NDArray[np.int64]"
    element: "npt.NDArray[np.int64]"  # offset within the page, in float32


VectorKind = Literal["scale", "shift"]
VECTOR_KINDS: tuple[VectorKind, ...] = ("scale", "shift")


MatrixName = Literal[
    "embed_tokens.a", "embed_tokens.b", "embed_tokens.weight",
    "lm_head.a", "lm_head.b", "lm_head.weight",
]  # fmt: skip
# Factors of LoRA, the embedding's A transposed so that a token's is one row: [vocab, r] and
# [hidden, r], [r, hidden] and [vocab, r]; whole matrices [vocab, hidden] in place of the base's.
MATRICES: tuple[MatrixName, ...] = (
    "embed_tokens.a", "embed_tokens.b", "embed_tokens.weight",
    "lm_head.a", "lm_head.b", "lm_head.weight",
)  # fmt: skip


@dataclass(frozen=True)
class Extras:
    """What an adapter holds beside its factors.

    `vectors` are (layer, module, kind): outputs of that module are multiplied by a "scale" (DoRA),
    then a "shift" is added (biases). A module may have vectors and no factors. `matrices` belong to
    the embedding and the head, see MATRICES.
    """

    vectors: frozenset[tuple[int, str, VectorKind]] = frozenset()
    matrices: frozenset[tuple[MatrixName, int, int]] = frozenset()  # name, rows, row length


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """One contiguous piece of a vector: elements [start : start + length] in float32.

    `offset` is in bytes within image page `page`.
    """

    layer: int
    module: str
    kind: VectorKind
    start: int
    length: int
    page: int
    offset: int


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """Whole rows [start : start + num_rows] of a matrix, in the dtype of the weights.

    `offset` is in bytes within image page `page`.
    """

    name: MatrixName
    start: int
    num_rows: int
    page: int
    offset: int


class ImageSections(NamedTuple):
    """Where a flat image is cut so that every block is a section of its own."""

    sizes: Sequence[int]  # elements, from the first page to the last
    of_matrix: Mapping[tuple[int, str, str], int]  # of those that are one block
    gaps: Sequence[int]  # sections that no block of factors covers


@dataclass(frozen=True)
class ImagePlan:
    """Where every block of one adapter lies in the pages of its image."""

    num_pages: int
    page_bytes: int
    itemsize: int
    blocks: tuple[Block, ...]  # by layer, module, matrix, rank, start
    ranks: Mapping[tuple[int, str], int]  # true rank by (layer, module)
    used_bytes: int
    extras: Extras = NO_EXTRAS
    vectors: tuple[VectorBlock, ...] = ()  # by layer, module, kind, start
    matrices: tuple[MatrixBlock, ...] = ()  # by name, start

    @property
    def wasted_bytes(self) -> int:
        """Bytes of the image's pages that hold nothing."""
        return self.num_pages * self.page_bytes - self.used_bytes

    @cached_property
    def blocks_by_matrix(self) -> Mapping[tuple[int, str, str], Sequence[Block]]:
        """The blocks of every matrix by (layer, module, "a" or "b")."""
        found: dict[tuple[int, str, str], list[Block]] = {}
        for block in self.blocks:
            found.setdefault((block.layer, block.module, block.matrix), []).append(block)
        return found

    @cached_property
    def sections(self) -> ImageSections:
        """The flat image cut at every block."""
        sizes: list[int] = []
        of_matrix: dict[tuple[int, str, str], int] = {}
        gaps: list[int] = []
        position = 0
        for block in sorted(self.blocks, key=lambda b: (b.page, b.offset)):
            at = (block.page * self.page_bytes + block.offset) // self.itemsize
            if at > position:
                gaps.append(len(sizes))
                sizes.append(at - position)
            key = (block.layer, block.module, block.matrix)
            if len(self.blocks_by_matrix[key]) == 1:
                of_matrix[key] = len(sizes)
            sizes.append(block.rank_width * block.length)
            position = at + sizes[-1]
        end = self.num_pages * self.page_bytes // self.itemsize
        if end > position:
            gaps.append(len(sizes))
            sizes.append(end - position)
        return ImageSections(sizes, of_matrix, gaps)

    @cached_property
    def tiles(self) -> Mapping[str, int]:
        """Rank tiles by module, at the layer where the module's rank is largest."""
        tiles: dict[str, int] = {}
        for (_, module), rank in self.ranks.items():
            tiles[module] = max(tiles.get(module, 0), num_tiles(rank))
        return tiles

    @cached_property
    def vector_modules(self) -> tuple[str, ...]:
        """Modules that have vectors in any layer, in the order of MODULES."""
        present = {module for _, module, _ in self.extras.vectors}
        return tuple(module for module in MODULES if module in present)

    @cached_property
    def vector_columns(self) -> VectorColumns:
        """The pieces of vectors as arrays, like `columns`."""
        import numpy as np

        chunk = vector_chunk(self.page_bytes, self.itemsize)
        rows = [
            (
                vector.layer,
                MODULES.index(vector.module),
                VECTOR_KINDS.index(vector.kind),
                vector.start // chunk,
                vector.page,
                vector.offset // VECTOR_ITEMSIZE,
            )
            for vector in self.vectors
        ]
        return VectorColumns(*np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy())

    @cached_property
    def columns(self) -> BlockColumns:
        """The blocks as arrays: 1 ms for 2,000 of them, once, on the thread that made the plan."""
        import numpy as np  # `mlora plan` makes plans without it

        rows = [
            (
                block.layer,
                MODULES.index(block.module),
                block.matrix == "b",
                block.rank_start // TILE_RANKS,
                block.rank_width == 8,
                block.start,
                block.page,
                block.offset // self.itemsize,
            )
            for block in self.blocks
        ]
        return BlockColumns(*np.array(rows, dtype=np.int64).reshape(-1, 8).T.copy())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block before it has a place."""

    layer: int
    module: str
    matrix: str
    rank_start: int
    rank_width: int
    start: int
    length: int


def vector_chunk(page_bytes: int, itemsize: int) -> int:
    """Elements of a full piece of a vector: as many bytes as a full block, a power of two."""
    return chunk_length(page_bytes, itemsize) * TILE_RANKS * itemsize // VECTOR_ITEMSIZE


def plan_image(
    ranks: Mapping[tuple[int, str], int],
    shapes: Mapping[str, tuple[int, int]],
    page_bytes: int,
    itemsize: int,
    extras: Extras = NO_EXTRAS,
) -> ImagePlan:
    """Cut an adapter into blocks and pack them into pages.

    Args:
        ranks: true rank by (layer, module); missing or 0 where the adapter has no delta.
        shapes: (d_in, d_out) by module.
        page_bytes: size of one pool page.
        itemsize: bytes per weight.
        extras: what there is beside the factors.
    """
    present = {key: rank for key, rank in ranks.items() if rank}
    for (layer, module), rank in present.items():
        if module not in shapes or not 0 < rank <= MAX_RANK:
            raise ValueError(f"layer {layer} {module}: rank {rank} outside 1..{MAX_RANK}")
    chunk = chunk_length(page_bytes, itemsize)
    pieces = list(_cut(present, shapes, chunk))
    parts = list(_cut_vectors(extras, shapes, vector_chunk(page_bytes, itemsize)))
    sizes = [_aligned(piece.rank_width * piece.length * itemsize) for piece in pieces]
    sizes += [_aligned(length * VECTOR_ITEMSIZE) for *_, length in parts]
    rows = list(_cut_matrices(extras, page_bytes, itemsize))
    sizes += [_aligned(num_rows * width * itemsize) for *_, num_rows, width in rows]
    places, num_pages = _pack(sizes, page_bytes)
    blocks = tuple(
        Block(p.layer, p.module, p.matrix, p.rank_start, p.rank_width, p.start, p.length, *place)
        for p, place in zip(pieces, places, strict=False)
    )
    vectors = tuple(
        VectorBlock(*part, *place)
        for part, place in zip(parts, places[len(pieces) :], strict=False)
    )
    matrices = tuple(
        MatrixBlock(name, start, num_rows, *place)
        for (name, start, num_rows, _), place in zip(
            rows, places[len(pieces) + len(parts) :], strict=True
        )
    )
    return ImagePlan(
        num_pages, page_bytes, itemsize, blocks, present, sum(sizes), extras, vectors, matrices
    )


def matrix_rows(width: int, page_bytes: int, itemsize: int) -> int:
    """Rows of `width` elements in a full block: a power of two, an eighth of a page where it can.

    Raises ValueError when a page cannot hold one row.
    """
    size = width * itemsize
    if size > page_bytes:
        raise ValueError(f"a page of {page_bytes} bytes cannot hold a row of {size} bytes")
    return 1 << (max(page_bytes // 8 // size, 1).bit_length() - 1)


def _cut_matrices(
    extras: Extras, page_bytes: int, itemsize: int
) -> Iterator[tuple[MatrixName, int, int, int]]:
    """(name, first row, rows, row length) of every block, in canonical order."""
    for name, num_rows, width in sorted(extras.matrices, key=lambda m: MATRICES.index(m[0])):
        step = matrix_rows(width, page_bytes, itemsize)
        for start in range(0, num_rows, step):
            yield name, start, min(step, num_rows - start), width


def _cut_vectors(
    extras: Extras, shapes: Mapping[str, tuple[int, int]], chunk: int
) -> Iterator[tuple[int, str, VectorKind, int, int]]:
    """(layer, module, kind, start, length) of every piece, in canonical order."""
    order = {module: index for index, module in enumerate(MODULES)}
    for layer, module, kind in sorted(
        extras.vectors, key=lambda key: (key[0], order[key[1]], VECTOR_KINDS.index(key[2]))
    ):
        d_out = shapes[module][1]
        for start in range(0, d_out, chunk):
            yield layer, module, kind, start, min(chunk, d_out - start)


def _aligned(size: int) -> int:
    return -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _cut(
    ranks: Mapping[tuple[int, str], int], shapes: Mapping[str, tuple[int, int]], chunk: int
) -> Iterator[_Piece]:
    """Every block of the adapter, in canonical order."""
    for layer, module in sorted(ranks, key=lambda key: (key[0], MODULES.index(key[1]))):
        rank = ranks[layer, module]
        for matrix, length in zip("ab", shapes[module], strict=True):
            for rank_start in range(0, rank, TILE_RANKS):
                width = tile_width(rank, rank_start)
                for start in range(0, length, chunk):
                    size = min(chunk, length - start)
                    yield _Piece(layer, module, matrix, rank_start, width, start, size)


def _pack(sizes: list[int], page_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Best fit, largest first: (page, offset) of every size, and the number of pages."""
    places = [(0, 0)] * len(sizes)
    gaps: list[tuple[int, int]] = []  # (free bytes, page), sorted
    num_pages = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        position = bisect_left(gaps, (size, -1))
        if position < len(gaps):
            free, page = gaps.pop(position)
        else:
            free, page = page_bytes, num_pages
            num_pages += 1
        places[index] = (page, page_bytes - free)
        if free > size:
            insort(gaps, (free - size, page))
    return places, num_pages

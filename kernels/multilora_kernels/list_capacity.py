"""How large the work lists may get: entries and bytes, from shapes and limits alone. Torch-free.

`work_lists` allocates by it, and whoever plans a device's memory asks it beforehand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from multilora_kernels.chip import Chip
from multilora_kernels.layout import GROUPS, TILE_RANKS, chunk_length, num_tiles
from multilora_kernels.lora_choice import (
    DECODE_BUCKETS,
    DECODE_TOKENS,
    SIDE_BY_SIDE,
    Choose,
    GroupShape,
    choose,
)

TILE_FIELDS, TASK_FIELDS, BAND_FIELDS = 4, 16, 8  # int32 each
_COUNT_BYTES = 64
_PLANE_ROW_BYTES = TILE_RANKS * 4
# Steps of these many rows are where a prompt's share of K is cut most finely.
_PROMPT_BUCKETS = (DECODE_TOKENS + 1, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Capacity:
    """Entries that one group's regions of the buffers hold."""

    tiles: int
    tasks: int
    bands: int

    def covers(self, other: "Capacity") -> bool:
        """Whether the regions of `other` would fit."""
        return self.tiles >= other.tiles and self.tasks >= other.tasks and self.bands >= other.bands

    @property
    def nbytes(self) -> int:
        """Bytes of the three regions."""
        fields = self.tiles * TILE_FIELDS + self.tasks * TASK_FIELDS + self.bands * BAND_FIELDS
        return 4 * fields


def group_shapes(
    shapes: Mapping[str, tuple[int, int]], page_bytes: int, itemsize: int
) -> dict[str, GroupShape]:
    """The launch groups of a model with these modules, (d_in, d_out) each."""
    chunk = chunk_length(page_bytes, itemsize)
    return {
        name: GroupShape(
            name,
            shapes[modules[0]][0],
            tuple(shapes[module][1] for module in modules),
            itemsize,
            chunk,
        )
        for name, modules in GROUPS.items()
        if all(module in shapes for module in modules)
    }


def decode_capacity(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> tuple[dict[str, Capacity], int]:
    """Regions of every group, and rows of the planes, for any decode step of `max_tokens` rows."""
    wanted, planes = {}, 0
    for name, shape in shapes.items():
        choices = [choose(shape, rows, chip) for rows in (*DECODE_BUCKETS, max_tokens)]
        tiles = len(shape.d_outs) * num_tiles(max_rank)
        ranks = range(1, num_tiles(max_rank) + 1)
        shared = [c.shared_columns(count, c.n_steps) for c in choices for count in ranks]
        narrow = min(*shared, *(choice.block_n for choice in choices))
        tasks = sum(-(-d_out // narrow) for d_out in shape.d_outs)
        # Where these are fewer than wanted, they are halved until they are not.
        halved = 2 * max(c.wanted_tasks if c.n_steps > 1 else 0 for c in choices)
        bands = -(-tiles // SIDE_BY_SIDE)
        parts = max(choice.row_splits for choice in choices)
        # A tile that is listed `parts` times is shared by two rows or more.
        listed = max_tokens * tiles * max(2, parts) // 2
        wanted[name] = Capacity(listed, max_tokens * tasks + halved, max_tokens * bands)
        splits = max(choice.splits(shape.d_in) * choice.row_splits for choice in choices)
        planes = max(planes, max_tokens * tiles * splits)
    return wanted, planes


def list_bytes(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> int:
    """Device bytes of `Segments` once decode steps and prompts of every size were run.

    The lists of prompts are counted for one adapter in all rows: others add pieces of less than
    64 rows, some hundred bytes for each.
    """
    decode_tokens = min(max_tokens, DECODE_TOKENS)
    wanted, planes = decode_capacity(shapes, decode_tokens, max_rank, chip, choose)
    margin = 4 * (TILE_FIELDS + TASK_FIELDS + BAND_FIELDS) * chip.num_sms
    decode = sum(capacity.nbytes for capacity in wanted.values()) + margin + _COUNT_BYTES
    prompt_planes = prompt_plane_rows(shapes, max_tokens, max_rank, chip, choose)
    prompts = 0
    if max_tokens > DECODE_TOKENS:
        prompts = prompt_list_bytes(shapes, max_tokens, max_rank, chip, choose)
        prompts += margin + _COUNT_BYTES
    row_numbers = 3 * 4 * max_tokens  # of decode steps, of prompts, and the slot of every row
    return decode + prompts + (planes + prompt_planes) * _PLANE_ROW_BYTES + row_numbers


def prompt_list_bytes(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> int:
    """Bytes of the entries of a step above decode's size whose rows share one adapter."""
    total = 0
    for shape in shapes.values():
        choice = choose(shape, max_tokens, chip)
        pieces, tiles = -(-max_tokens // choice.block_m), len(shape.d_outs) * num_tiles(max_rank)
        columns = choice.block_n * choice.n_steps
        tasks = sum(-(-d_out // columns) for d_out in shape.d_outs)
        bands = -(-tiles // SIDE_BY_SIDE)
        total += Capacity(pieces * tiles, pieces * tasks, pieces * bands).nbytes
    return total


def prompt_plane_rows(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> int:
    """Rows of the planes for any step above decode's size, of up to `max_tokens` rows."""
    planes = 0
    for shape in shapes.values():
        tiles = len(shape.d_outs) * num_tiles(max_rank)
        for rows in {*(rows for rows in _PROMPT_BUCKETS if rows <= max_tokens), max_tokens}:
            if rows > DECODE_TOKENS:
                planes = max(planes, rows * tiles * choose(shape, rows, chip).splits(shape.d_in))
    return planes

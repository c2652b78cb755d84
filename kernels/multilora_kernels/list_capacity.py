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
# Launch choices of prompts change at multiples of so many rows.
_PROMPT_ROWS = 64


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


def prompt_capacity(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_segments: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> tuple[dict[str, Capacity], int]:
    """The same for any step above decode's size, of up to `max_tokens` rows of `max_segments`
    adapters."""
    wanted, planes = {}, 0
    steps = range(DECODE_TOKENS + 1, max_tokens + 1, _PROMPT_ROWS)
    for name, shape in shapes.items():
        tiles = len(shape.d_outs) * num_tiles(max_rank)
        pieces = tasks = 0
        # The largest step of every choice.
        for rows in (min(rows + _PROMPT_ROWS - 1, max_tokens) for rows in steps):
            choice = choose(shape, rows, chip)
            planes = max(planes, rows * tiles * choice.splits(shape.d_in))
            cut = max_tokens // choice.block_m + max_segments
            columns = choice.block_n * choice.n_steps
            each = sum(-(-d_out // columns) for d_out in shape.d_outs)
            pieces, tasks = max(pieces, cut), max(tasks, cut * each)
        wanted[name] = Capacity(pieces * tiles, tasks, pieces * -(-tiles // SIDE_BY_SIDE))
    return wanted, planes


def list_bytes(
    shapes: Mapping[str, GroupShape],
    max_tokens: int,
    max_segments: int,
    max_rank: int,
    chip: Chip,
    choose: Choose = choose,
) -> int:
    """Device bytes of `Segments` for steps of up to `max_tokens` rows of `max_segments` adapters,
    once all of it is reserved."""
    found = [decode_capacity(shapes, min(max_tokens, DECODE_TOKENS), max_rank, chip, choose)]
    if max_tokens > DECODE_TOKENS:
        found.append(prompt_capacity(shapes, max_tokens, max_segments, max_rank, chip, choose))
    margin = 4 * (TILE_FIELDS + TASK_FIELDS + BAND_FIELDS) * chip.num_sms
    row_numbers = 4 * max_tokens  # of each kind of step, and the slot of every row
    total = row_numbers
    for wanted, planes in found:
        total += sum(capacity.nbytes for capacity in wanted.values()) + margin + _COUNT_BYTES
        total += planes * _PLANE_ROW_BYTES + row_numbers
    return total

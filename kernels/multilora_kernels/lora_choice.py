"""Launch choices of the LoRA kernels: pure functions of shape, tokens and chip.

`choose(group, num_tokens, chip)` looks the shape up in the chip's tuned table and falls back on
the heuristics below. What decides the order of a sum (how K is split, the number of warps) is
the same for all decode steps, so a row's result does not depend on how many rows stand beside it;
the rest may be tuned by the number of rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multilora_kernels.chip import Chip, tuned_table

# Steps of at most this many rows use the decode kernels and fixed buffers (CUDA graphs); longer
# ones are prefill.
DECODE_TOKENS = 512
# Rows of one adapter that share a decode tile: the smallest tile of the matrix units.
DECODE_ROWS = 16
# Rank tiles that one expand program reads side by side.
SIDE_BY_SIDE = 4
# Numbers of rows that decode steps are tuned at.
DECODE_BUCKETS = (4, 16, 64, 256)
_ORDER_FIELDS = ("block_k", "k_steps", "shrink_warps", "expand_warps")


@dataclass(frozen=True)
class GroupShape:
    """The projections of one launch: d_in, every d_out, and how tiles are cut into chunks."""

    name: str
    d_in: int
    d_outs: tuple[int, ...]
    itemsize: int
    chunk: int

    @property
    def y_unit(self) -> int:
        """Every module begins at a multiple of this many columns of y."""
        return 8 if all(d_out % 8 == 0 for d_out in self.d_outs) else 1

    @property
    def key(self) -> str:
        """Name of this shape in tuned tables."""
        return f"{self.d_in}>{'+'.join(map(str, self.d_outs))}x{self.itemsize}"


@dataclass(frozen=True)
class LoraChoice:
    """Tiles, warps and grid of one group. A program's share of K is block_k * k_steps."""

    block_m: int  # rows of a segment tile
    block_k: int
    k_steps: int
    shrink_warps: int
    shrink_stages: int
    dot_k: int  # decode, where rows share an adapter: K that one matrix multiply takes
    row_splits: int  # decode, likewise: programs that a program's share of K is cut into once more
    block_n: int  # columns of an expand program where it reads four rank tiles side by side
    # Prefill, and decode where rows share an adapter: blocks of columns that one expand program
    # walks, B of them under way in `expand_stages` - 1 blocks ahead.
    n_steps: int
    expand_stages: int
    # Decode, likewise: so many programs before one of them walks several blocks.
    wanted_tasks: int
    rows_n: int  # decode, where rows share an adapter: columns of a block of one rank tile
    expand_warps: int
    shrink_registers: int | None  # cap per thread; None leaves it to the compiler
    expand_registers: int | None
    programs_per_sm: int  # cap on a decode grid; more work than that is walked in turns
    pdl: bool
    # Captured steps: priority of the stream on which the shrink runs beside the base multiply, 0 or
    # -1 (first); None: after the multiply, on the same stream.
    side_priority: int | None

    @property
    def is_decode(self) -> bool:
        """Whether this is for the decode kernels."""
        return self.block_m == DECODE_ROWS

    @property
    def span(self) -> int:
        """Elements of K that one program reduces."""
        return self.block_k * self.k_steps

    def splits(self, d_in: int) -> int:
        """Programs that share one rank tile's K."""
        return -(-d_in // self.span)

    def columns(self, group: GroupShape, num_tiles: int) -> int:
        """Columns of a decode expand program for a row of `num_tiles` rank tiles, in one chunk."""
        side = SIDE_BY_SIDE if num_tiles > 2 else max(1, num_tiles)
        return min(self.block_n * SIDE_BY_SIDE // side, group.chunk)

    def shared_columns(self, num_tiles: int, blocks: int) -> int:
        """Columns of a decode expand program of `blocks`, rows that share an adapter of
        `num_tiles`."""
        if self.n_steps == 1 or num_tiles > SIDE_BY_SIDE:
            return self.rows_n
        side = SIDE_BY_SIDE if num_tiles > 2 else max(1, num_tiles)
        return self.rows_n * blocks // side


Choose = Callable[[GroupShape, int, Chip], LoraChoice]


def is_decode(num_tokens: int) -> bool:
    """Whether a step of `num_tokens` rows runs the decode kernels."""
    return num_tokens <= DECODE_TOKENS


def choose(group: GroupShape, num_tokens: int, chip: Chip) -> LoraChoice:
    """The launch choice of one group for a step of `num_tokens` rows."""
    table = tuned_table(chip, "lora")
    if is_decode(num_tokens):
        order = table.get(f"{group.key} decode", {})
        neutral = table.get(f"{group.key} decode {decode_bucket(num_tokens)}", {})
        wanted = {**neutral, **{name: order[name] for name in _ORDER_FIELDS if name in order}}
        choice = _decode(num_tokens, chip)
    else:
        wanted = table.get(f"{group.key} prefill {prefill_bucket(num_tokens)}", {})
        choice = _prefill(group, num_tokens, chip)
    return clamp(with_tuned(choice, wanted), group)


def with_tuned(choice: LoraChoice, tuned: Mapping[str, Any]) -> LoraChoice:
    """`choice` with the fields that a tuned entry names."""
    return replace(choice, **tuned)


def decode_bucket(num_tokens: int) -> int:
    """The tuned number of rows that serves a decode step of `num_tokens`."""
    return next((rows for rows in DECODE_BUCKETS if num_tokens <= rows), DECODE_BUCKETS[-1])


def clamp(choice: LoraChoice, group: GroupShape) -> LoraChoice:
    """Tiles no larger than the chunks that weights are cut into, nor than the matrices."""
    block_k = max(16, min(choice.block_k, group.chunk, _power(group.d_in)))
    k_steps = max(1, min(choice.k_steps, group.chunk // block_k, _power(group.d_in) // block_k))
    block_n = max(16, min(choice.block_n, group.chunk, _power(max(group.d_outs))))
    widest = _power(max(group.d_outs))
    row_splits = max(1, min(choice.row_splits, block_k * k_steps // 16))
    rows_n = max(16, min(choice.rows_n, group.chunk, widest))
    block = rows_n if choice.is_decode else block_n
    # Of four rank tiles a block of rows_n is a quarter as wide, and a matrix tile is 16.
    n_steps = 1 if choice.is_decode and rows_n < 16 * SIDE_BY_SIDE else choice.n_steps
    return replace(
        choice,
        block_k=block_k,
        k_steps=k_steps,
        dot_k=min(choice.dot_k, block_k * k_steps // row_splits),
        row_splits=row_splits,
        block_n=block_n,
        n_steps=max(1, min(n_steps, group.chunk // block, widest // block)),
        rows_n=rows_n,
    )


def _power(value: int) -> int:
    return 1 << max(0, (value - 1).bit_length())


def prefill_bucket(num_tokens: int) -> int:
    """Prefill steps are tuned at 2,048 and 8,192 rows; the nearer on a log scale serves."""
    return 2048 if num_tokens <= 4096 else 8192


def _decode(num_tokens: int, chip: Chip) -> LoraChoice:
    """16 x 1024 of A and 16 or 32 KiB of B per program in flight.

    Registers are capped for the sake of rows alone on their adapter: the paths for shared rows take
    130 to 168 if left to themselves, room for three programs a multiprocessor instead of six.
    """
    few, many = num_tokens <= DECODE_BUCKETS[0], num_tokens > DECODE_BUCKETS[2]
    return LoraChoice(
        block_m=DECODE_ROWS,
        block_k=1024,
        k_steps=1,
        shrink_warps=4,
        # Shared rows: with three, one step of 8 KiB is under way while another is multiplied.
        shrink_stages=4 if many else 3,
        dot_k=128,
        row_splits=2 if many else 4,
        block_n=256 if many else 128,
        n_steps=4 if many else 1,
        expand_stages=3,
        wanted_tasks=2 * chip.num_sms,
        rows_n=256 if many else 128,
        expand_warps=4,
        shrink_registers=80,
        expand_registers=128,
        # As many expand programs as run at once: all of them begin while the multiply ends.
        programs_per_sm=16 if many else 4,
        pdl=chip.has_pdl,
        # The multiply of a few rows has thousands of short programs, and behind them a shrink would
        # begin when they end: 4.60 ms a step instead of 4.45 at one row. A library's multiply fills
        # the chip at once and leaves room. Not measured on chips without early launch.
        side_priority=(-1 if few else 0) if chip.has_pdl else None,
    )


def _prefill(group: GroupShape, num_tokens: int, chip: Chip) -> LoraChoice:
    """Row tiles of 64; K split until about two programs a multiprocessor have work."""
    block_m, block_k = 64, 64
    row_tiles = -(-num_tokens // block_m)
    splits = max(1, min(16, 2 * chip.num_sms // row_tiles))
    k_steps = max(1, _power(group.d_in // splits) // block_k)
    return LoraChoice(
        block_m=block_m,
        block_k=block_k,
        k_steps=k_steps,
        shrink_warps=4,
        shrink_stages=3,
        dot_k=0,
        row_splits=1,
        block_n=64,
        n_steps=8,
        expand_stages=4,
        wanted_tasks=0,
        rows_n=128,
        expand_warps=4,
        shrink_registers=None,
        expand_registers=None,
        programs_per_sm=32,
        pdl=chip.has_pdl,
        side_priority=None,
    )

"""How `awq_hopper` is launched: the tile, and how many programs share its K. Torch-free."""

from dataclasses import dataclass, replace
from functools import lru_cache

from multilora_kernels.chip import Chip, tuned_table
from multilora_kernels.split_choice import BLOCK_K

OP = "awq_hopper"
# Fewer rows keep the order of sums that `awq_gemm` promises for them.
MIN_ROWS = 65
# For more rows weights are widened once and multiplied by the library: above 256 where they then
# fit an L2, above 512 where they do not (at 512 gate_up of an 8B takes 224 us instead of 241, and
# down 106 instead of 117, but qkv 54 instead of 52).
_MAX_ROWS, _MAX_ROWS_LARGE = 256, 512
_LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class HopperLaunch:
    """The outputs and rows of a program, and how many programs share their K.

    block_n counts outputs: a strip of 128, two of them (256), or with half the rows of a strip
    that two neighbours share: one and a half (192), three and a half in two turns (448; K whole).
    `second_launch`: a launch adds the splits, instead of the programs among themselves.
    """

    block_n: int = 256
    block_m: int = 128
    split_k: int = 1
    num_stages: int = 4
    second_launch: bool = False

    def grid(self, m: int, n_padded: int) -> tuple[int, int, int]:
        """Programs: tiles of rows, which share weights, then tiles of outputs, then splits."""
        if self.block_n in (192, 448):
            programs = 2 * -(-n_padded // (2 * self.block_n))
        else:
            programs = -(-n_padded // self.block_n)
        return -(-m // self.block_m), programs, self.split_k

    def partial_bytes(self, m: int, n_padded: int) -> int:
        """Bytes of the fp32 sums that programs with a share of K leave for others."""
        tiles_m, tiles_n, split = self.grid(m, n_padded)
        planes = split if self.second_launch and split > 1 else split - 1
        return 4 * tiles_m * self.block_m * tiles_n * self.block_n * planes


# Tiles, and the microseconds of one of their steps of 128 inputs (H200, every multiprocessor busy).
_FORMS = (
    (HopperLaunch(second_launch=True), 1.72),
    (HopperLaunch(block_n=128, num_stages=5, second_launch=True), 1.03),
)
# Microseconds: filling the pipeline and writing the product; the second launch that adds
# partials, and each MB of them.
_START, _SUM, _SUM_MB = 1.5, 2.0, 0.6


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip) -> HopperLaunch | None:
    """Launch of x [m, k] times weights [n, k]; None where it does not run or another way is
    faster."""
    max_rows = _MAX_ROWS_LARGE if 2 * n * k > _LARGE_BYTES else _MAX_ROWS
    if chip.sm != 90 or n <= 128 or k % BLOCK_K or not MIN_ROWS <= m <= max_rows:
        return None
    tuned = tuned_table(chip, OP).get(f"n{n}-k{k}-m{1 << (m - 1).bit_length()}")
    if tuned is not None:
        return HopperLaunch(**tuned)

    def cost(choice: tuple[HopperLaunch, float]) -> float:
        launch, step_us = choice
        rows, outputs, split = launch.grid(m, n)
        turns = -(-rows * outputs * split // chip.num_sms)
        steps = -(-(k // BLOCK_K) // split)
        sums = _SUM + _SUM_MB * launch.partial_bytes(m, n) / 1e6 if split > 1 else 0.0
        return turns * (steps * step_us + _START) + sums

    splits = range(1, min(8, k // BLOCK_K) + 1)
    return min(
        ((replace(form, split_k=split), us) for form, us in _FORMS for split in splits), key=cost
    )[0]

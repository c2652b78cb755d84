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

    block_n: 128 outputs, 256, or (K whole) 448: two turns, of 256 and of 128 with half the rows of
    128 more, which two neighbours share.
    """

    block_n: int = 256
    block_m: int = 128
    split_k: int = 1
    num_stages: int = 4

    def grid(self, m: int, n_padded: int) -> tuple[int, int, int]:
        """Programs: tiles of rows, which share weights, then tiles of outputs, then splits."""
        pairs = 2 if self.block_n == 448 else 1
        programs = pairs * -(-n_padded // (pairs * self.block_n))
        return -(-m // self.block_m), programs, self.split_k

    def partial_bytes(self, m: int, n_padded: int) -> int:
        """Bytes of the fp32 sums that programs with a share of K leave for a second launch."""
        tiles_m, tiles_n, split = self.grid(m, n_padded)
        return 4 * tiles_m * self.block_m * tiles_n * self.block_n * split if split > 1 else 0


# Tiles, and the microseconds of one of their steps of 128 inputs (H200, every multiprocessor busy).
_FORMS = (
    (HopperLaunch(), 1.70),
    (HopperLaunch(block_n=128, num_stages=5), 0.93),
    (HopperLaunch(block_n=448), 3.29),
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
    choices = (
        (replace(form, split_k=split), us)
        for form, us in _FORMS
        for split in (splits if form.block_n != 448 else (1,))
    )
    return min(choices, key=cost)[0]

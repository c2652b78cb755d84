"""How `fp8_hopper` is launched: tiles, and how many programs share their K. Torch-free."""

from dataclasses import dataclass, replace
from functools import lru_cache

from multilora_kernels.chip import Chip

BLOCK_K = 128


@dataclass(frozen=True)
class Fp8HopperLaunch:
    """One or two tiles of 128 x 128 of a product, and how many programs share their K (1, 2, 4)."""

    block_m: int = 256
    block_n: int = 128
    split_k: int = 1
    num_stages: int = 4

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Programs: tiles of rows, which share weights, then tiles of outputs, then splits."""
        return -(-m // self.block_m), -(-n // self.block_n), self.split_k

    def partial_bytes(self, m: int, n: int) -> int:
        """Bytes of the fp32 sums that programs with a share of K leave for others."""
        tiles_m, tiles_n, split = self.grid(m, n)
        return 4 * tiles_m * self.block_m * tiles_n * self.block_n * (split - 1)


# Tiles, and the microseconds of one of their steps of 128 inputs.
_FORMS = (
    (Fp8HopperLaunch(), 1.25),
    (Fp8HopperLaunch(block_m=128, num_stages=6), 0.85),
)
# Microseconds: filling the pipeline and writing the product; one exchange of sums.
_START, _EXCHANGE = 2.0, 3.0
# More rows are tiles enough.
_MAX_SPLIT_ROWS = 512


@lru_cache(maxsize=4096)  # 5 to 11 us of Python for each multiply of a step
def choose_launch(m: int, n: int, k: int, chip: Chip) -> Fp8HopperLaunch | None:
    """Launch of x [m, k] times weights [n, k]; None where it does not run."""
    if chip.sm != 90 or k % BLOCK_K:
        return None
    if m > _MAX_SPLIT_ROWS:
        return Fp8HopperLaunch()
    m = 1 << (m - 1).bit_length()  # few classes of sizes: what is launched is compiled at the start

    def cost(choice: tuple[Fp8HopperLaunch, float]) -> float:
        launch, step_us = choice
        rows, outputs, split = launch.grid(m, n)
        turns = -(-rows * outputs * split // chip.num_sms)
        exchanges = split.bit_length() - 1
        return turns * (-(-(k // BLOCK_K) // split) * step_us + _START) + exchanges * _EXCHANGE

    splits = [split for split in (1, 2, 4) if split <= k // BLOCK_K]
    return min(
        ((replace(form, split_k=split), us) for form, us in _FORMS for split in splits), key=cost
    )[0]

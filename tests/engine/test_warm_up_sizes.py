"""The steps that a start runs, against every step that is served: no multiply is launched in a form
(which is compiled) that no step of the start had."""

from collections.abc import Callable

import pytest

from multilora_cli.models.warm_up import step_sizes
from multilora_kernels import awq_gemm, fp8_gemm, fp8_weight_only
from multilora_kernels.chip import H200, RTX_4090, Chip

# Outputs and inputs: down and qkv of 8B, 70B, 13B and 7B models, gate_up and o of the 8B.
SHAPES = [
    (4096, 14336), (6144, 4096), (28672, 4096), (4096, 4096), (10240, 8192), (8192, 28672),
    (5120, 13824), (3584, 18944),
]  # fmt: skip
MOST = [7, 100, 300, 384, 500, 512, 2048]


def _awq(m: int, n: int, k: int, chip: Chip) -> object:
    return awq_gemm.choose_launch(m, n, k, chip)


def _fp8(m: int, n: int, k: int, chip: Chip) -> object:
    return fp8_gemm.choose_launch(m, n, k, chip, blockwise=False)


def _fp8_blocks(m: int, n: int, k: int, chip: Chip) -> object:
    return fp8_gemm.choose_launch(m, n, k, chip, blockwise=True)


def _fp8_weight_only(m: int, n: int, k: int, chip: Chip) -> object:
    return fp8_weight_only.choose_launch(m, n, k, chip)


@pytest.mark.parametrize("chip", [H200, RTX_4090], ids=lambda chip: chip.key)
@pytest.mark.parametrize("choose", [_awq, _fp8, _fp8_blocks, _fp8_weight_only])
def test_every_launch_of_a_multiply_has_been_in_a_step_of_the_start(
    choose: Callable[[int, int, int, Chip], object], chip: Chip
) -> None:
    for n, k in SHAPES:
        served = [choose(m, n, k, chip) for m in range(1, max(MOST) + 1)]
        for most in MOST:
            known = [served[size - 1] for size in step_sizes(most)]
            assert not [m for m in range(1, most + 1) if served[m - 1] not in known], (n, k, most)

"""bf16_gemv against its reference."""

import pytest
import torch

from multilora_kernels.bf16_gemv import (
    MAX_ROWS,
    GemvLaunch,
    bf16_gemv,
    bf16_gemv_ref,
    choose_launch,
    run_gemv,
)
from multilora_kernels.launch import H200, RTX_4090, Chip

SEED = 3


def random_pair(
    m: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(m, k, generator=generator).to(dtype).to(device)
    return x, torch.randn(n, k, generator=generator).to(dtype).to(device)


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("chip", [H200, RTX_4090])
def test_only_a_single_row_leaves_cublas(chip: Chip) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (576, 576)):
        launch = choose_launch(1, n, k, chip)
        assert launch is not None and launch.pdl == (chip is H200)
        assert choose_launch(MAX_ROWS + 1, n, k, chip) is None


def test_any_number_of_rows_on_the_cpu() -> None:
    for m in (0, 1, 4, 9):
        x, w = random_pair(m, 24, 40, torch.bfloat16)
        assert torch.equal(bf16_gemv(x, w), torch.nn.functional.linear(x, w))
        wide = bf16_gemv(x, w, torch.float32)
        assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), bf16_gemv(x, w))


@pytest.mark.interpreter
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(10, 256), (9, 200)])
def test_kernel_matches_reference(m: int, n: int, k: int) -> None:
    x, w = random_pair(m, n, k, torch.float16)
    y = run_gemv(x, w, GemvLaunch(block_n=4, block_k=64))
    exact = bf16_gemv_ref(x.double(), w.double())
    assert relative_error(y, exact) < 1e-3
    wide = run_gemv(x, w, GemvLaunch(block_n=4, block_k=64), torch.float32)
    assert wide.dtype == torch.float32 and relative_error(wide, exact) < 1e-6
    for row in range(m):
        alone = run_gemv(x[row : row + 1], w, GemvLaunch(block_n=4, block_k=64))
        assert torch.equal(alone[0], y[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (577, 576), (33, 1000)])
def test_device_matches_fp64_and_rows_are_independent(n: int, k: int, dtype: torch.dtype) -> None:
    x, w = random_pair(4, n, k, dtype, "cuda")
    launch = choose_launch(1, n, k, H200)
    assert launch is not None
    whole = run_gemv(x, w, launch)
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    exact = bf16_gemv_ref(x.double(), w.double())
    assert relative_error(whole, exact) < limit
    assert relative_error(bf16_gemv(x[:1], w), exact[:1]) < limit
    for m in (1, 4):  # the kernel and the library, their sums not rounded to 16 bits
        wide = bf16_gemv(x[:m], w, torch.float32)
        assert wide.dtype == torch.float32 and relative_error(wide, exact[:m]) < 1e-5
    for m in (1, 2, 3):
        assert torch.equal(run_gemv(x[:m], w, launch), whole[:m])
    x[1] = float("nan")
    poisoned = run_gemv(x, w, launch)
    assert torch.equal(poisoned[[0, 2, 3]], whole[[0, 2, 3]])

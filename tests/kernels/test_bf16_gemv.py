"""bf16_gemv and bf16_rows against their reference."""

import pytest
import torch

from multilora_kernels import bf16_rows
from multilora_kernels.bf16_gemv import (
    MAX_ROWS,
    GemvLaunch,
    bf16_gemv,
    bf16_gemv_ref,
    choose_launch,
    run_gemv,
)
from multilora_kernels.bf16_rows import RowsLaunch, run_rows
from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.split_k import Tile

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
def test_the_kernel_for_few_rows_takes_a_single_one(chip: Chip) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (576, 576)):
        launch = choose_launch(1, n, k, chip)
        assert launch is not None and launch.pdl == (chip is H200)
        assert choose_launch(MAX_ROWS + 1, n, k, chip) is None


def test_what_was_measured_leaves_the_library() -> None:
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        launches = [bf16_rows.choose_launch(m, n, k, H200) for m in range(2, 33)]
        assert all(launches)
        # Up to 32 rows the order of a row's sum is that of the shape.
        assert len({launch.tile.split_k for launch in launches if launch}) == 1
        assert bf16_rows.choose_launch(65, n, k, H200) is None
    assert bf16_rows.choose_launch(16, 576, 576, H200) is None
    assert bf16_rows.choose_launch(16, 6144, 4096, RTX_4090) is None


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


@pytest.mark.interpreter
@pytest.mark.parametrize("m", [2, 7, 17])
@pytest.mark.parametrize(("n", "k", "split_k"), [(10, 256, 1), (70, 200, 2), (64, 512, 3)])
def test_rows_kernel_matches_reference(m: int, n: int, k: int, split_k: int) -> None:
    x, w = random_pair(m, n, k, torch.float16)
    launch = RowsLaunch(Tile(block_n=64, block_m=16, split_k=split_k), block_k=64)
    y = run_rows(x, w, launch)
    exact = bf16_gemv_ref(x.double(), w.double())
    assert relative_error(y, exact) < 1e-3
    wide = run_rows(x, w, launch, torch.float32)
    assert wide.dtype == torch.float32 and relative_error(wide, exact) < 1e-6
    assert torch.equal(run_rows(x[1:2], w, launch)[0], y[1])
    x[0] = float("nan")
    poisoned = run_rows(x, w, launch)
    assert torch.equal(poisoned[1:], y[1:]) and bool(poisoned[0].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_device_rows_match_fp64_and_are_independent(n: int, k: int, dtype: torch.dtype) -> None:
    x, w = random_pair(64, n, k, dtype, "cuda")
    exact = bf16_gemv_ref(x.double(), w.double())
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    for m in (2, 3, 16, 17, 32, 33, 64):
        y = bf16_gemv(x[:m], w)
        assert relative_error(y, exact[:m]) < limit, f"M={m}"
        assert torch.equal(y, bf16_gemv(x[:m], w)), f"M={m}"
        wide = torch.empty((m, n), device="cuda")
        assert bf16_gemv(x[:m], w, torch.float32, wide) is wide
        assert relative_error(wide, exact[:m]) < 1e-5, f"M={m}"
    whole = bf16_gemv(x[:32], w)
    for m in (2, 5, 16, 17):
        assert torch.equal(bf16_gemv(x[:m], w), whole[:m]), f"M={m}"
    x[1] = float("nan")
    poisoned = bf16_gemv(x[:32], w)
    assert torch.equal(poisoned[2:], whole[2:]) and torch.equal(poisoned[:1], whole[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(577, 576), (33, 1000)])
def test_device_rows_of_odd_shapes(n: int, k: int) -> None:
    x, w = random_pair(20, n, k, torch.bfloat16, "cuda")
    exact = bf16_gemv_ref(x.double(), w.double())
    for split_k in (1, 3):
        launch = RowsLaunch(Tile(block_n=64, block_m=32, split_k=split_k, pdl=True))
        assert relative_error(run_rows(x, w, launch), exact) < 4e-3


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

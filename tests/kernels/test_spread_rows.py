"""spread_rows: against indexing, interpreted, compiled, and on a device."""

import pytest
import torch

from multilora_kernels.spread_rows import spread_rows, spread_rows_kernel
from tests.kernels.aot import ARCHITECTURES, assert_fits

CASES = [(1, 1, 1), (3, 5, 16), (4, 16, 16), (2, 300, 512), (5, 0, 8), (7, 513, 515)]


def check(rows: int, width: int, columns: int, device: str) -> None:
    packed = torch.arange(rows * width + 3, dtype=torch.int32, device=device)
    table = torch.full((rows + 1, columns), -1, dtype=torch.int32, device=device)
    spread_rows(packed, torch.tensor([width], dtype=torch.int32, device=device), table[:rows])
    for row in range(rows):
        assert table[row, :width].tolist() == list(range(row * width, (row + 1) * width))
        assert (table[row, width:] == -1).all(), "entries past the width are left alone"
    assert (table[rows] == -1).all()


@pytest.mark.parametrize("case", CASES)
def test_on_cpu(case: tuple[int, int, int]) -> None:
    check(*case, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: tuple[int, int, int]) -> None:
    check(*case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_the_device(case: tuple[int, int, int]) -> None:
    check(*case, "cuda")


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_compiles(sm: int) -> None:
    pointers = dict.fromkeys(("packed_ptr", "width_ptr", "table_ptr"), "*i32")
    assert_fits(spread_rows_kernel, {**pointers, "stride": "i32"}, {"BLOCK": 256}, sm, num_warps=2)

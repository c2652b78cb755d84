"""The scale_shift kernel under Triton's interpreter, on the smallest pages."""

import pytest
import torch
from scale_shift_cases import check, vector_fleet

from multilora_kernels.layout import GROUPS

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("group", GROUPS)
def test_it_reaches_fp64(group: str) -> None:
    check(vector_fleet(torch.float32), group, torch.float32)


def test_half_precision() -> None:
    check(vector_fleet(torch.float16), "gate_up", torch.float16)


def test_vectors_in_several_pieces() -> None:
    """Modules wider than a piece, the last one cut short."""
    shapes = {"o_proj": (48, 700), "down_proj": (100, 48)}
    fleet = vector_fleet(torch.float32)
    shapes = {**fleet.shapes, **shapes}
    check(vector_fleet(torch.float32, shapes=shapes), "o", torch.float32)

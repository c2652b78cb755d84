"""The embedding and head kernels under Triton's interpreter."""

import pytest
import torch
from edge_cases import check_embedding, check_head, edge_fleet

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_they_reach_fp64(dtype: torch.dtype) -> None:
    fleet = edge_fleet(dtype)
    check_embedding(fleet, dtype)
    check_head(fleet, dtype)

"""The torch path of paged attention against dense fp64 attention, and its independence of rows."""

import pytest
import torch

from multilora_kernels.paged_attention import paged_attention_ref
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_oracle,
)

MIXED = [(1, 1), (1, 16), (1, 17), (1, 40), (1, 40), (5, 5), (7, 20), (33, 49)]


def run(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    return paged_attention_ref(case.q, case.kv, case.batch, case.scale, sliding_window)


@pytest.mark.parametrize("window", [None, 1, 8, 16, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ref_matches_dense(dtype: torch.dtype, window: int | None) -> None:
    case = attention_case(MIXED, dtype=dtype)
    difference = (run(case, window).double() - attention_oracle(case, window)).abs().max()
    assert difference < TOLERANCE[dtype]  # NaN fails too


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ref_on_fp8_pages(dtype: torch.dtype, window: int | None) -> None:
    """The oracle sees the rounded keys: only the arithmetic is compared."""
    case = attention_case(MIXED, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    difference = (run(case, window).double() - attention_oracle(case, window)).abs().max()
    assert difference < TOLERANCE[dtype]  # NaN fails too


@pytest.mark.parametrize("head_dim", [16, 48, 80, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8)], ids=str)
def test_ref_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    case = attention_case([(1, 21), (4, 30)], heads=heads, head_dim=head_dim)
    difference = (run(case).double() - attention_oracle(case)).abs().max()
    assert difference < TOLERANCE[torch.float32]


def test_ref_row_alone_is_bit_equal() -> None:
    case = attention_case(MIXED, heads=(8, 2), head_dim=64)
    together, start = run(case), 0
    for index, query_len in enumerate(case.query_lens):
        alone = run(case.row(index))
        assert torch.equal(alone, together[start : start + query_len]), index
        start += query_len


def test_ref_empty_sequence_is_zero() -> None:
    case = attention_case([(1, 0), (1, 5)])
    out = run(case)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and not out.isnan().any()

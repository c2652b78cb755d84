"""Decode attention under the interpreter: both ways over a tile, any division over programs."""

from typing import Any

import pytest
import torch

from multilora_kernels.decode_attention import paged_decode
from multilora_kernels.kv_pages import FP8
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_oracle,
)

pytestmark = pytest.mark.interpreter

SMALL = {"MAX_SPLITS": 8, "slots": 16, "num_warps": 4, "num_stages": 2}
CHOICES = [
    {**SMALL, "BLOCK_N": 16, "min_split": 32},
    {**SMALL, "BLOCK_N": 32, "min_split": 32},
    {**SMALL, "BLOCK_N": 16, "min_split": 32, "by_page": 1},
    {**SMALL, "BLOCK_N": 32, "min_split": 64, "by_page": 1},
    {**SMALL, "BLOCK_N": 64, "min_split": 64, "by_page": 1},
    {**SMALL, "BLOCK_N": 16, "min_split": 32, "by_page": 2},
    {**SMALL, "BLOCK_N": 64, "min_split": 64, "by_page": 2},
    {**SMALL, "BLOCK_N": 128, "min_split": 128, "by_page": 2},
]


def run(case: AttentionCase, choice: dict[str, Any], window: int | None = None) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan"))
    paged_decode(case.q, case.kv, case.batch, case.scale, window, out, choice)
    return out


def check(case: AttentionCase, out: torch.Tensor, window: int | None = None) -> None:
    difference = (out.double() - attention_oracle(case, window)).abs().max()
    assert difference < TOLERANCE[case.q.dtype]  # NaN fails too


@pytest.mark.parametrize(
    ("choice", "window"),
    [*((each, None) for each in CHOICES), *((each, 37) for each in CHOICES[4::2])],
)
def test_decode_interpreted(choice: dict[str, Any], window: int | None) -> None:
    """Contexts of no and one token, of whole and broken pages, of one split and of many."""
    case = attention_case([(1, n) for n in (1, 0, 16, 33, 150)])
    together = run(case, choice, window)
    check(case, together, window)
    for slots in (2, 40):
        assert torch.equal(run(case, {**choice, "slots": slots}, window), together), slots
    for index in (2, 4):
        assert torch.equal(run(case.row(index), choice, window)[0], together[index]), index


@pytest.mark.parametrize("choice", CHOICES[4::2], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 48), ((20, 1), 80), ((8, 8), 256)])
def test_head_shapes_interpreted(
    choice: dict[str, Any], heads: tuple[int, int], head_dim: int
) -> None:
    case = attention_case([(1, 21), (1, 70)], heads=heads, head_dim=head_dim)
    check(case, run(case, choice))


@pytest.mark.parametrize("choice", CHOICES[4::2], ids=str)
def test_fp8_interpreted(choice: dict[str, Any]) -> None:
    case = attention_case([(1, 1), (1, 33), (1, 150)], dtype=torch.bfloat16, kv_dtype=FP8)
    check(case, run(case, choice))

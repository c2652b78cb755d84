"""Every launch choice that the search of decode attention tries, against fp64 on a device."""

from typing import Any

import pytest
import torch

from multilora_kernels.bench.attention import DECODE_CHOICES, DECODE_CHOICES_FP8
from multilora_kernels.decode_attention import paged_decode
from multilora_kernels.kv_pages import FP8
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_oracle,
)

pytestmark = pytest.mark.gpu

CASES: list[tuple[dict[str, Any], torch.dtype | None]] = [
    *((choice, None) for choice in DECODE_CHOICES),
    *((choice, FP8) for choice in DECODE_CHOICES_FP8),
]
LENS = (1, 15, 16, 17, 192, 255, 256, 257, 300, 1000, 0, 4097, 9000)


def run(case: AttentionCase, choice: dict[str, Any], window: int | None) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan"))
    paged_decode(case.q, case.kv, case.batch, case.scale, window, out, choice)
    return out


@pytest.mark.parametrize(("choice", "kv_dtype"), CASES, ids=str)
def test_decode_choice_gpu(choice: dict[str, Any], kv_dtype: torch.dtype | None) -> None:
    """fp64; repeats, rows alone, and any division over programs: the same bits."""
    lens = [(1, n) for n in LENS]
    case = attention_case(lens, (32, 8), 128, torch.bfloat16, "cuda", kv_dtype=kv_dtype)
    for window in (None, 100) if choice["num_stages"] == 3 else (None,):
        together = run(case, choice, window)
        difference = (together.double() - attention_oracle(case, window)).abs().max()
        assert difference < TOLERANCE[torch.bfloat16]  # NaN fails too
        for _ in range(5):
            assert torch.equal(run(case, choice, window), together)
        for slots in (8, 60, 2000):
            other = run(case, {**choice, "slots": slots}, window)
            assert torch.equal(other, together), slots
        for index in range(len(LENS)):
            alone = run(case.row(index), choice, window)[0]
            assert torch.equal(alone, together[index]), LENS[index]

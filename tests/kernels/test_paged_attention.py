"""The attention kernels under the interpreter: dense fp64 attention, NaN pages, odd shapes."""

from dataclasses import replace

import pytest
import torch

from multilora_kernels.launch import H200, RTX_4090
from multilora_kernels.paged_attention import paged_attention
from multilora_kernels.paged_decode import decode_choice, paged_decode
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_oracle,
)

# A small cut, so that short contexts have several splits, capped ones too.
CHOICE = {
    "BLOCK_N": 16,
    "min_split": 32,
    "MAX_SPLITS": 8,
    "slots": 16,
    "num_stages": 2,
}
# Windows in fp32, the other dtypes without and with one: the interpreter is slow.
WINDOWS: list[tuple[torch.dtype, int | None]] = [
    (torch.float32, None),
    (torch.float32, 1),
    (torch.float32, 16),
    (torch.float32, 37),
    (torch.float16, 300),
    (torch.bfloat16, None),
    (torch.bfloat16, 37),
]
HEADS = [((1, 1), 16), ((6, 2), 48), ((7, 1), 80), ((20, 1), 128), ((8, 8), 256)]


def run(case: AttentionCase, window: int | None = None) -> torch.Tensor:
    return paged_attention(case.q, case.kv, case.batch, case.scale, window)


def run_decode(case: AttentionCase, window: int | None = None, **fields: int) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan"))
    arguments = (case.q, case.kv, case.batch, case.scale)
    paged_decode(*arguments, window, out, {**CHOICE, **fields})
    return out


def check(case: AttentionCase, out: torch.Tensor, window: int | None = None) -> None:
    difference = (out.double() - attention_oracle(case, window)).abs().max()
    assert difference < TOLERANCE[case.q.dtype]  # NaN fails too


@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "window"), WINDOWS, ids=str)
def test_decode_interpreted(dtype: torch.dtype, window: int | None) -> None:
    """Contexts of one token, of whole and broken pages, of one split and of the capped number."""
    case = attention_case([(1, n) for n in (1, 16, 33, 64, 150)], dtype=dtype)
    check(case, run_decode(case, window), window)


@pytest.mark.interpreter
@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
def test_decode_head_shapes_interpreted(heads: tuple[int, int], head_dim: int) -> None:
    case = attention_case([(1, 21), (1, 70)], heads=heads, head_dim=head_dim)
    check(case, run_decode(case, BLOCK_N=32))


@pytest.mark.interpreter
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [None, 37])
def test_decode_warps_interpreted(warps: int, window: int | None) -> None:
    """A page to each warp: tiles with pages that nobody sees, rows without a token among others."""
    case = attention_case([(1, n) for n in (1, 0, 33, 150)])
    fields = {"BLOCK_N": 16 * warps, "min_split": max(32, 16 * warps)}
    together = run_decode(case, window, **fields)
    check(case, together, window)
    assert torch.equal(run_decode(case, window, **fields, slots=2), together)


@pytest.mark.interpreter
def test_decode_rows_alone_and_lanes_interpreted() -> None:
    """A row alone, and any division of a row's splits over programs: the same bits."""
    case = attention_case([(1, n) for n in (33, 0, 300)])
    together = run_decode(case)
    assert torch.equal(together[1], torch.zeros_like(together[1]))
    for index in (0, 2):
        assert torch.equal(run_decode(case.row(index))[0], together[index]), index
    for slots in (1, 5):
        assert torch.equal(run_decode(case, slots=slots), together), slots
    assert torch.equal(run_decode(case), together)  # the counters were left at zero


@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "window"), WINDOWS, ids=str)
def test_mixed_batch_interpreted(dtype: torch.dtype, window: int | None) -> None:
    """Decode rows, first chunks and chunks against a cached prefix in one batch."""
    lens = [(1, 30), (5, 5), (7, 20), (40, 40), (33, 120)]
    case = attention_case(lens, dtype=dtype)
    check(case, run(case, window), window)


@pytest.mark.interpreter
@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
def test_prefill_head_shapes_interpreted(heads: tuple[int, int], head_dim: int) -> None:
    case = attention_case([(21, 21), (4, 70)], heads=heads, head_dim=head_dim)
    check(case, run(case))


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 32), (torch.float32, 80)])
def test_fp8_pages_interpreted(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Codes widened by integers, as on cards without e4m3; the oracle sees the rounded keys."""
    lens = [(1, 1), (1, 33), (1, 150), (7, 20), (33, 60)]
    case = attention_case(lens, head_dim=head_dim, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    check(case, run(case, window), window)
    decodes = attention_case([(1, 16), (1, 70)], dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    check(decodes, run_decode(decodes, window), window)
    assert torch.equal(run_decode(decodes.row(1))[0], run_decode(decodes)[1])


@pytest.mark.interpreter
def test_prefill_rows_alone_interpreted() -> None:
    case = attention_case([(1, 30), (20, 20), (9, 80)])
    together, start = run(case), 0
    for index, query_len in enumerate(case.query_lens):
        assert torch.equal(run(case.row(index)), together[start : start + query_len]), index
        start += query_len


@pytest.mark.interpreter
def test_capacity_beyond_lengths_interpreted() -> None:
    """Host integers are capacities under a captured graph: larger ones change nothing."""
    case = attention_case([(1, 30), (1, 100), (9, 80)])
    large = replace(case.batch, max_query_len=200, max_seq_len=5000)
    assert torch.equal(run(replace(case, batch=large)), run(case))


@pytest.mark.interpreter
def test_query_slice_of_packed_projection_interpreted() -> None:
    """q may be a slice of the packed qkv rows."""
    case = attention_case([(1, 30), (9, 30)])
    packed = torch.randn(10, case.q.shape[1] + 4, case.q.shape[2])
    packed[:, : case.q.shape[1]] = case.q
    check(case, run(replace(case, q=packed[:, : case.q.shape[1]])))


@pytest.mark.interpreter
def test_crowded_launches_keep_the_order_of_sums() -> None:
    case = attention_case([(1, 33)])
    for field in ("BLOCK_N", "min_split", "MAX_SPLITS"):
        with pytest.raises(AssertionError, match="changes a row's bits"):
            paged_decode(
                case.q, case.kv, case.batch, case.scale, None, case.q, {"crowded": {field: 64}}
            )


def test_decode_choice_is_a_function_of_shapes() -> None:
    """Every head size up to 256 gets tiles that hold at least one page."""
    for chip in (H200, RTX_4090):
        for head_dim in range(16, 257, 16):
            for itemsize in (1, 2, 4):
                choice = decode_choice(chip, head_dim, 4, itemsize)
                assert choice["BLOCK_N"] in (16, 32, 64, 128)
                assert choice["min_split"] % choice["BLOCK_N"] == 0

"""The attention kernels on a device: fp64, NaN pages, far offsets, repeats, captured graphs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.kv_pages import FP8, KvLayer
from multilora_kernels.launch import H200, RTX_4090, Chip, force_chip
from multilora_kernels.paged_attention import paged_attention
from multilora_kernels.paged_decode import decode_choice, paged_decode
from multilora_kernels.rope_store_kv import rope_store_kv
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_oracle,
)

pytestmark = pytest.mark.gpu

DECODES = [(1, n) for n in (1, 15, 16, 17, 255, 256, 257, 300, 1000, 4097, 9000)]
CHUNKS = [(5, 5), (128, 128), (33, 700), (130, 131), (200, 3000), (1, 64), (64, 64)]


@pytest.fixture(params=["own", "rtx-4090"])
def chip(request: pytest.FixtureRequest) -> Iterator[None]:
    """This device's launch choices, then those of a card with 99 KB of shared memory."""
    if request.param == "rtx-4090":
        force_chip(RTX_4090)
    yield
    force_chip(None)


def run(case: AttentionCase, window: int | None = None) -> torch.Tensor:
    return paged_attention(case.q, case.kv, case.batch, case.scale, window)


def check(case: AttentionCase, out: torch.Tensor, window: int | None = None) -> None:
    difference = (out.double() - attention_oracle(case, window)).abs().max()
    assert difference < TOLERANCE[case.q.dtype]  # NaN fails too


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mixed_batch_gpu(dtype: torch.dtype, window: int | None) -> None:
    case = attention_case(DECODES + CHUNKS, (8, 2), 128, dtype, "cuda")
    check(case, run(case, window), window)


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_head_dims_gpu(head_dim: int) -> None:
    lens = [(1, 40), (1, 700), (1, 1), (70, 70), (20, 400)]
    case = attention_case(lens, (6, 2), head_dim, torch.bfloat16, "cuda")
    check(case, run(case))


@pytest.mark.parametrize("card", [None, RTX_4090, Chip("A100", 80, 108)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_pages_gpu(dtype: torch.dtype, card: Chip | None) -> None:
    """Native casts, and integer arithmetic as on cards without e4m3: the same bits."""
    case = attention_case(DECODES + CHUNKS, (8, 2), 128, dtype, "cuda", kv_dtype=FP8)
    force_chip(card)
    try:
        check(case, run(case, 100), 100)
        out, start = run(case), 0
        check(case, out)
        for index, query_len in enumerate(case.query_lens):
            assert torch.equal(run(case.row(index)), out[start : start + query_len]), index
            start += query_len
    finally:
        force_chip(None)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_fp8_head_dims_gpu(head_dim: int) -> None:
    lens = [(1, 40), (1, 700), (1, 1), (70, 70), (20, 400)]
    case = attention_case(lens, (6, 2), head_dim, torch.bfloat16, "cuda", kv_dtype=FP8)
    check(case, run(case))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (28, 4), (32, 32), (20, 1), (64, 8)], ids=str)
def test_heads_gpu(heads: tuple[int, int]) -> None:
    lens = [(1, 40), (1, 700), (70, 70), (20, 400)]
    case = attention_case(lens, heads, 64, torch.bfloat16, "cuda")
    check(case, run(case))


@pytest.mark.parametrize("window", [None, 100])
def test_rows_alone_and_repeats_are_bit_equal_gpu(window: int | None) -> None:
    """Ten repeats, and every sequence alone, give the same bits; the launch is a crowded one."""
    case = attention_case(DECODES * 4 + CHUNKS, (32, 8), 128, torch.bfloat16, "cuda")
    together, start = run(case, window), 0
    for _ in range(10):
        assert torch.equal(run(case, window), together)
    for index, query_len in enumerate(case.query_lens):
        alone = run(case.row(index), window)
        assert torch.equal(alone, together[start : start + query_len]), index
        start += query_len


@pytest.mark.parametrize("block_n", [None, 16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 3000])
def test_division_over_programs_keeps_the_bits_gpu(window: int | None, block_n: int | None) -> None:
    """Whole rows, several splits, single splits to a program, of any tile: the same bits."""
    case = attention_case(DECODES, (32, 8), 128, torch.bfloat16, "cuda")
    choice = decode_choice(H200, 128, 4, 2)
    if block_n is not None:
        choice |= {"BLOCK_N": block_n, "num_stages": 2}
    arguments = (case.q, case.kv, case.batch, case.scale)
    expected = torch.empty_like(case.q)
    paged_decode(*arguments, window, expected, {**choice, "slots": 1})
    check(case, expected, window)
    for slots in (7, 60, 132, 264, 500, 2000, 100_000):
        out = torch.full_like(case.q, float("nan"))
        paged_decode(*arguments, window, out, {**choice, "slots": slots})
        assert torch.equal(out, expected), slots


def test_captured_graph_replays_other_lengths_gpu() -> None:
    """One graph at capacity serves any lengths, an empty padding row included."""
    lens = [(1, 900), (1, 1), (1, 5000), (1, 17)]
    case = attention_case(lens, (8, 2), 128, torch.bfloat16, "cuda")
    fixed = replace(
        case.batch,
        seq_lens=case.batch.seq_lens.clone(),
        page_table=case.batch.page_table.clone(),
        max_seq_len=16 * case.batch.page_table.shape[1],
    )
    captured = replace(case, batch=fixed)
    run(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(captured)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [1, 1, 1, 2]):
        fixed.seq_lens.copy_(case.batch.seq_lens[order])
        fixed.page_table.copy_(case.batch.page_table[order])
        graph.replay()
        now = replace(
            captured,
            keys=[case.keys[index] for index in order],
            values=[case.values[index] for index in order],
        )
        check(now, out)
    fixed.seq_lens.zero_()
    graph.replay()
    assert torch.equal(out, torch.zeros_like(out))


def test_offsets_past_two_to_the_31_gpu() -> None:
    """Pages at the end of a pool of 2^31 + 2^28 elements (4.5 GiB of bf16)."""
    layers, heads, head_dim, lens = 4, 8, 128, [(1, 300), (40, 40)]
    page_elements = layers * 2 * heads * 16 * head_dim
    pages = (2**31 + 2**28) // page_elements
    pool = torch.full((pages, page_elements), float("nan"), dtype=torch.bfloat16, device="cuda")
    pool = pool.view(torch.uint8)
    case = attention_case(lens, (32, heads), head_dim, torch.bfloat16, "cuda", spread=1)
    own = case.kv.pool.shape[0]
    # attention_case makes two layers; its layer 1 becomes layer 3 of the last pages.
    wide = pool.view(torch.bfloat16).view(pages, layers, -1)
    wide[-own:, 3] = case.kv.pool.view(torch.bfloat16).view(own, 2, -1)[:, 1]
    table = torch.where(case.batch.page_table < own, case.batch.page_table + pages - own, 2**30)
    kv = replace(case.kv, pool=pool, layer=3)
    moved = replace(case, kv=kv, batch=replace(case.batch, page_table=table.int()))
    check(moved, run(moved))
    slots = torch.tensor([pages * 16 - 1, -1, pages * 16 - 20], device="cuda")
    packed = torch.randn(3, 3 * heads, head_dim, device="cuda").bfloat16()
    ones = torch.ones(3, 1, head_dim // 2, device="cuda")
    rope_store_kv(packed, (ones, 0 * ones), replace(kv, layer=2), slots)
    k, v = packed[:, heads : 2 * heads], packed[:, 2 * heads :]
    view = pool.view(torch.bfloat16).view(pages, layers, 2, heads, 16, head_dim)
    assert torch.equal(view[-1, 2, 0, :, 15], k[0]) and torch.equal(view[-2, 2, 1, :, 12], v[2])


def test_long_context_alone_gpu() -> None:
    """A context of 100,000 tokens: as many splits as a row may have, each longer than usual."""
    tokens, heads, head_dim = 100_000, 2, 128
    pages = -(-tokens // 16)
    pool = torch.randn(pages, 2 * heads * 16 * head_dim, device="cuda").bfloat16()
    table = torch.randperm(pages, device="cuda").int()[None]
    view = pool.view(pages, 2, heads, 16, head_dim)[table[0].long()]
    keys, values = view.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]
    q = torch.randn(1, 8, head_dim, device="cuda").bfloat16()
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    batch = AttentionBatch(starts, lens, table, 1, 1, tokens)
    scale = head_dim**-0.5
    kv = KvLayer(pool.view(torch.uint8), 0, heads, head_dim, torch.bfloat16)
    case = AttentionCase(q, kv, batch, scale, [keys], [values], [1])
    difference = (run(case).double() - attention_oracle(case)).abs().max()
    assert difference < 1e-3  # outputs are of order 0.005 here

"""Adapters of embedding and head on a CPU, compiled for cards that are not here, on a device."""

import pytest
import torch
from aot import ARCHITECTURES, assert_fits
from edge_cases import HIDDEN, SLOTS, VOCAB, check_embedding, check_head, edge_fleet
from lora_cases import PAGE_BYTES, SHAPES

from multilora_kernels import edge_lora
from multilora_kernels.layout import MAX_RANK, Extras, matrix_rows, plan_image
from multilora_kernels.segments import Segments
from multilora_kernels.testing import LLAMA3_8B

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_references_reach_fp64(dtype: torch.dtype) -> None:
    fleet = edge_fleet(dtype)
    check_embedding(fleet, dtype)
    check_head(fleet, dtype)


def test_slots_come_and_go() -> None:
    """Entries are packed anew: what stays is found where it now lies."""
    fleet = edge_fleet(torch.float32)
    before = fleet.table.matrices.num_blocks
    fleet.table.clear(2)
    fleet.table.clear(5)
    fleet.table.flush()
    assert fleet.table.matrices.num_blocks < before
    assert not fleet.table.has_extras[[2, 5]].any()
    slots = [slot if slot not in (2, 5) else 0 for slot in SLOTS]
    check_embedding(fleet, torch.float32, slots)
    check_head(fleet, torch.float32, slots)


def test_a_step_without_is_left_alone() -> None:
    fleet = edge_fleet(torch.float32)
    segments = Segments(2, "cpu")
    segments.build([0, 1])
    edge_lora.head_lora(torch.empty(0, 0), torch.empty(0), fleet.pool, fleet.table, segments)


def test_matrices_cost_what_they_hold() -> None:
    """A saved Llama-3 head: 1,050,673,152 bytes, 501 pages; LoRA of rank 16 on it, 2 and a bit."""
    page = 2 << 20
    saved = Extras(matrices=frozenset({("lm_head.weight", 128256, 4096)}))
    plan = plan_image({}, LLAMA3_8B, page, 2, saved)
    assert plan.used_bytes == 128256 * 4096 * 2 == 1_050_673_152 and plan.num_pages == 501
    factors = Extras(matrices=frozenset({("lm_head.a", 16, 4096), ("lm_head.b", 128256, 16)}))
    plan = plan_image({}, LLAMA3_8B, page, 2, factors)
    assert plan.used_bytes == (4096 + 128256) * 16 * 2 and plan.num_pages == 3
    assert matrix_rows(HIDDEN, PAGE_BYTES, 4) * HIDDEN * 4 <= PAGE_BYTES // 8
    with pytest.raises(ValueError, match="cannot hold a row"):
        plan_image({}, SHAPES, PAGE_BYTES, 4,
                   Extras(matrices=frozenset({("lm_head.weight", 4, 4096)})))  # fmt: skip


COMMON = {"weights_ptr": "*bf16", "row_slots_ptr": "*i32", "heads_ptr": "*i32",
          "entries_ptr": "*i64", "hidden": "i32:16"}  # fmt: skip


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_they_compile(sm: int) -> None:
    assert_fits(
        edge_lora.embed_lora_kernel, {**COMMON, "x_ptr": "*bf16", "tokens_ptr": "*i64"},
        {"SLOT": 24, "WEIGHT": 8, "A": 0, "B": 4, "BLOCK": 128}, sm,
    )  # fmt: skip
    strided = {**COMMON, "hidden_ptr": "*bf16", "shrunk_ptr": "*fp32", "stride_hm": "i32:16"}
    assert_fits(
        edge_lora.head_shrink_kernel, strided,
        {"SLOT": 24, "A": 12, "MAX_RANK": MAX_RANK, "BLOCK_K": 512}, sm,
    )  # fmt: skip
    assert_fits(
        edge_lora.head_expand_kernel,
        {**strided, "logits_ptr": "*fp32", "stride_lm": "i32:16", "vocab": "i32"},
        {"SLOT": 24, "WEIGHT": 20, "B": 16, "MAX_RANK": MAX_RANK, "BLOCK": 256, "BLOCK_K": 64}, sm,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_reaches_fp64(dtype: torch.dtype) -> None:
    fleet = edge_fleet(dtype, "cuda")
    check_embedding(fleet, dtype)
    check_head(fleet, dtype)
    check_embedding(fleet, dtype, SLOTS * 50)
    check_head(fleet, dtype, SLOTS * 20)


@pytest.mark.gpu
def test_a_graph_replays_other_rows() -> None:
    """Captured on base rows: a replay does what the last build wrote."""
    fleet = edge_fleet(torch.bfloat16, "cuda")
    segments = Segments(16, "cuda")
    hidden = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    logits = torch.zeros(8, VOCAB, device="cuda")
    segments.prepare_capture(fleet.table, 8, extras=True)
    arguments = (fleet.pool, fleet.table, segments)
    edge_lora.head_lora(logits, hidden, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        edge_lora.head_lora(logits, hidden, *arguments)
    for slots in ([3, 4, 6, 0, 1, 2, 3, 4], [0, 0, 0, 6, 0, 0, 0, 0]):
        segments.build(slots)
        assert segments.has_extras(fleet.table)
        logits.zero_()
        graph.replay()
        wanted = torch.zeros_like(logits)
        edge_lora.head_lora_ref(wanted, hidden, *arguments)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)

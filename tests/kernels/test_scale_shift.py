"""scale_shift on a CPU, compiled for cards that are not here, and on a device."""

import pytest
import torch
from aot import ARCHITECTURES, assert_fits
from lora_cases import LAYERS, PAGE_BYTES, SHAPES
from scale_shift_cases import EXTRAS, SLOTS, check, vector_fleet

from multilora_kernels.layout import GROUPS, MODULES, NO_EXTRAS, Extras, plan_image
from multilora_kernels.scale_shift import launch_choice, scale_shift, scale_shift_kernel
from multilora_kernels.segments import Segments
from multilora_kernels.testing import LLAMA3_8B

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_the_reference_reaches_fp64(group: str, dtype: torch.dtype) -> None:
    check(vector_fleet(dtype), group, dtype)


def test_a_step_without_vectors_is_left_alone() -> None:
    """The host knows before the step: base rows and plain LoRA rows launch nothing."""
    fleet = vector_fleet(torch.float32)
    segments = Segments(3, "cpu")
    segments.build([0, 1, 1])
    assert not segments.has_extras(fleet.table)
    scale_shift(torch.empty(0), fleet.pool, fleet.table, segments, 0, "qkv")  # not even looked at
    segments.build([0, 1, 3])
    assert segments.has_extras(fleet.table)


def test_slots_lose_their_vectors() -> None:
    """Cleared and reused slots: nothing of the earlier adapter stays, all cells come back."""
    fleet = vector_fleet(torch.float32)
    table = fleet.table
    free = len(table._free)
    cells = {slot: int((table._vector_cells[slot] >= 0).sum()) for slot in range(1, 6)}
    assert cells == {1: 0, 2: 7, 3: 7, 4: 6, 5: 3}
    for slot in range(1, 6):
        table.clear(slot)
    table.flush()
    assert not table.has_extras.any() and (table.vector_cells == -1).all()
    assert (table.offsets == -1).all()
    assert len(table._free) == free + sum(cells.values()) + 2 * 7


def test_vectors_cost_what_they_hold() -> None:
    """Page bytes: nothing for adapters without, whole cache lines for those with."""
    ranks = {(layer, module): 8 for layer in range(LAYERS) for module in MODULES}
    plain = plan_image(ranks, SHAPES, PAGE_BYTES, 4)
    assert plan_image(ranks, SHAPES, PAGE_BYTES, 4, NO_EXTRAS) == plain
    more = plan_image(ranks, SHAPES, PAGE_BYTES, 4, EXTRAS[1])
    lines = sum(-(-SHAPES[module][1] * 4 // 128) for module in MODULES)
    assert more.used_bytes - plain.used_bytes == LAYERS * 2 * lines * 128
    assert more.blocks == plain.blocks or more.num_pages > plain.num_pages
    # Llama-3-8B, DoRA on all seven modules: 43,008 numbers a layer, 5.5 MB beside 84 MB.
    scales = frozenset((layer, module, "scale") for layer in range(32) for module in MODULES)
    ranks = {(layer, module): 16 for layer in range(32) for module in MODULES}
    large = plan_image(ranks, LLAMA3_8B, 2 << 20, 2, Extras(scales))
    assert large.used_bytes == 83_886_080 + 32 * 43_008 * 4 and large.num_pages == 43


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("element", ["*bf16", "*fp32"])
def test_it_compiles(sm: int, element: str) -> None:
    d_outs = (4096, 1024, 1024)
    choice = launch_choice(d_outs, 65536)
    signature = {
        "y_ptr": element, "pool_ptr": "*fp32", "row_slots_ptr": "*i32", "cells_ptr": "*i32",
        "offsets_ptr": "*i64", "layer_start": "i32", "stride_ym": "i32:16",
    }  # fmt: skip
    constants = {
        "FIRST": 0, "MODULES": 7, "D0": d_outs[0], "D1": d_outs[1], "D2": d_outs[2], "CELL": 3,
        "CHUNK": 65536, "BLOCK": choice["BLOCK"],
    }  # fmt: skip
    assert_fits(scale_shift_kernel, signature, constants, sm, choice["num_warps"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_a_device_reaches_fp64(group: str, dtype: torch.dtype) -> None:
    check(vector_fleet(dtype, "cuda"), group, dtype)
    check(vector_fleet(dtype, "cuda"), group, dtype, SLOTS * 200)


@pytest.mark.gpu
def test_a_graph_replays_other_rows() -> None:
    """Captured once on base rows: a replay does what the last build wrote, stale rows nothing."""
    fleet = vector_fleet(torch.bfloat16, "cuda")
    segments = Segments(16, "cuda")
    y = torch.randn(8, 80, device="cuda").bfloat16()
    segments.prepare_capture(fleet.table, 8, extras=True)
    scale_shift(y, fleet.pool, fleet.table, segments, 0, "qkv")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_shift(y, fleet.pool, fleet.table, segments, 0, "qkv")
    for slots in ([2, 2, 3, 4, 5, 0, 1, 2], [0, 0, 3, 0, 0, 0, 0, 0]):
        y.copy_(torch.randn(8, 80))
        wanted = y.clone()
        segments.build(slots)
        assert segments.has_extras(fleet.table)
        graph.replay()
        other = Segments(16, "cuda")
        other.build(slots)
        scale_shift(wanted, fleet.pool, fleet.table, other, 0, "qkv")
        assert torch.equal(y, wanted)

"""add_lora on a CPU: the torch path against dense B @ A @ x, and what it must never mix."""

import pytest
import torch
from lora_cases import LAYERS, PAGE_BYTES, SHAPES, check, dense, run, small_fleet

from multilora_kernels.add_lora import add_lora
from multilora_kernels.layout import GROUPS, MODULES
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable
from multilora_kernels.testing import make_fleet

SLOTS = [0, 3, 11, 3, 1, 7, 2, 0, 4, 5, 6, 8, 9, 10, 3, 11]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_gets_its_own_adapters_delta(dtype: torch.dtype) -> None:
    fleet = small_fleet(dtype, seed=1)
    for group in GROUPS:
        check(fleet, SLOTS, group, 5, range(LAYERS))


def test_a_nan_adapter_leaves_other_rows_bit_identical() -> None:
    fleet = small_fleet(torch.float32, seed=2)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    slots = [3, 1, 0, 3, 4]
    clean = torch.zeros(5, 80)
    run(fleet, x, clean, slots, "qkv")
    for layer in range(LAYERS):
        for module in MODULES:
            for place in fleet.table.blocks(3, layer, module):
                size = place.block.rank_width * place.block.length
                fleet.pool.view(-1).view(torch.float32)[place.element :][:size] = torch.nan
    spoiled = torch.zeros(5, 80)
    run(fleet, x, spoiled, slots, "qkv")
    assert torch.isnan(spoiled[[0, 3]]).all()
    assert torch.equal(spoiled[[1, 2, 4]], clean[[1, 2, 4]])


def test_a_row_does_not_depend_on_other_rows_adapters() -> None:
    fleet = small_fleet(torch.float32, seed=3)
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    together, alone = torch.zeros(6, 48), torch.zeros(6, 48)
    run(fleet, x, together, [1, 2, 5, 6, 7, 8], "o")
    for row, slot in enumerate([1, 2, 5, 6, 7, 8]):
        run(fleet, x[row : row + 1], alone[row : row + 1], [slot], "o")
    assert torch.equal(together, alone)


def test_a_slot_can_be_cleared_and_taken_by_another_adapter() -> None:
    fleet = small_fleet(torch.float32, seed=4)
    table = fleet.table
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(1))
    pages = table._slots[5].pages
    plan = table._slots[5].plan
    table.clear(5)
    table.flush()
    y = torch.zeros(1, 80)
    run(fleet, x, y, [5], "qkv")
    assert not y.any() and table.rank(5, 0, "q_proj") == 0
    table.set(2, plan, pages)
    run(fleet, x, y, [2], "qkv")
    expected = sum(dense(fleet, x, [5], layer, "qkv") for layer in range(LAYERS))
    assert torch.allclose(y.double(), expected, atol=1e-4)
    assert table.rank(2, 0, "q_proj") == 24


def test_the_device_table_mirrors_the_host_and_says_when_it_is_full() -> None:
    fleet = small_fleet(torch.float32, seed=5)
    table = fleet.table
    assert torch.equal(table.offsets, torch.from_numpy(table._offsets_cpu))
    big = {(layer, m): 512 for layer in range(LAYERS) for m in MODULES}
    plan = make_fleet([big], SHAPES, LAYERS, PAGE_BYTES, torch.float32).table._slots[1].plan
    small = AdapterTable(3, LAYERS, SHAPES, 10, "cpu")
    assert not small.can_hold(plan)
    with pytest.raises(RuntimeError, match="table is full: 224 rank tiles needed"):
        small.set(1, plan, range(plan.num_pages))
    blocks = sum(len(table._slots[slot].plan.blocks) for slot in table._slots)
    vectors = table.vector_cells.nbytes + table.matrices.nbytes
    assert table.nbytes == 8 * 3 * (blocks + LAYERS * 7 * 12) + vectors


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    fleet = small_fleet(torch.float32, seed=6)
    segments = Segments(2, "cpu")
    segments.build([1, 2])
    with pytest.raises(AssertionError):
        add_lora(
            torch.zeros(2, 80), torch.zeros(3, 48), fleet.pool, fleet.table, segments, 0, "qkv"
        )


def test_rows_of_the_base_alone_cost_nothing() -> None:
    segments = Segments(2, "cpu")
    segments.build([0, 0])
    table = AdapterTable(2, 1, SHAPES, 10, "cpu")
    # Nothing is even looked at: tensors of the wrong shape pass.
    add_lora(torch.zeros(0), torch.zeros(0), torch.zeros(0), table, segments, 0, "qkv")

"""The adapter table: what lies on the device is what the blocks of each plan say."""

import random

import numpy as np
import pytest
import torch

from multilora_kernels.layout import MODULES, TILE_RANKS, ImagePlan, plan_image
from multilora_kernels.table import AdapterTable

LAYERS, PAGE = 3, 8192
SHAPES = {
    "q_proj": (96, 96), "k_proj": (96, 32), "v_proj": (96, 32), "o_proj": (96, 96),
    "gate_proj": (96, 200), "up_proj": (96, 200), "down_proj": (200, 96),
}  # fmt: skip


def _plan(choose: random.Random) -> ImagePlan:
    """Some modules of some layers, each of a rank of its own."""
    keys = [(layer, module) for layer in range(LAYERS) for module in MODULES]
    ranks = {key: choose.choice((1, 7, 8, 9, 16, 33)) for key in keys if choose.random() < 0.6}
    return plan_image(ranks or {keys[0]: 4}, SHAPES, PAGE, 2)


def _expected(table: AdapterTable, slots: dict[int, tuple[ImagePlan, list[int]]]) -> np.ndarray:
    """Entry by entry, from the blocks."""
    geometry = table.geometry
    assert geometry is not None
    entries = np.full(tuple(table.offsets.shape), -1, dtype=np.int64)
    for slot, (plan, pages) in slots.items():
        for block in plan.blocks:
            cell = table.cells[slot, MODULES.index(block.module), block.rank_start // TILE_RANKS]
            column = block.start // geometry.chunk
            column += geometry.a_chunks[block.module] if block.matrix == "b" else 0
            element = (pages[block.page] * PAGE + block.offset) // 2
            entries[block.layer, cell, column] = element + (block.rank_width == 8)
    return entries


@pytest.mark.parametrize("seed", range(3))
def test_entries_follow_the_blocks_through_set_clear_and_flush(seed: int) -> None:
    choose = random.Random(seed)
    table = AdapterTable(6, LAYERS, SHAPES, 2_000, "cpu")
    slots: dict[int, tuple[ImagePlan, list[int]]] = {}
    for _ in range(40):
        for _ in range(choose.randrange(1, 4)):
            slot = choose.randrange(1, 6)
            if slot in slots and choose.random() < 0.4:
                table.clear(slot)
                del slots[slot]
                continue
            plan = _plan(choose)
            pages = choose.sample(range(1000), plan.num_pages)
            table.set(slot, plan, pages)
            slots[slot] = (plan, pages)
        table.flush()
        assert np.array_equal(table.offsets.numpy(), _expected(table, slots))


def test_a_flush_is_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AdapterTable(4, LAYERS, SHAPES, 2_000, "cpu")
    uploads: list[int] = []
    upload = table._staging.upload

    def spy(destination: torch.Tensor, source: np.ndarray) -> None:
        uploads.append(source.nbytes)
        upload(destination, source)

    monkeypatch.setattr(table._staging, "upload", spy)
    plan = _plan(random.Random(5))
    table.set(1, plan, range(plan.num_pages))
    table.clear(1)
    table.set(2, plan, range(plan.num_pages))
    table.flush()
    table.flush()
    assert len(uploads) == 1


def test_groups_of_slots_are_those_of_their_modules() -> None:
    table = AdapterTable(5, LAYERS, SHAPES, 2_000, "cpu")
    modules = {1: ("v_proj",), 2: ("q_proj", "o_proj"), 3: ("up_proj",), 4: ("down_proj",)}
    first = 0
    for slot, own in modules.items():
        plan = plan_image({(1, module): 4 for module in own}, SHAPES, PAGE, 2)
        table.set(slot, plan, range(first, first + plan.num_pages))
        first += plan.num_pages
    assert table.groups_of([0, 0]) == ()
    assert table.groups_of([1, 0]) == ("qkv",) and table.groups_of([2, 1]) == ("qkv", "o")
    assert table.groups_of(np.array([4, 3, 3])) == ("gate_up", "down")
    table.clear(3)
    assert table.groups_of([3]) == ()

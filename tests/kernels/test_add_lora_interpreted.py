"""The LoRA kernels under Triton's interpreter, on the smallest pages and odd sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from lora_cases import LAYERS, PAGE_BYTES, SHAPES, adapters, check, inputs, run, small_fleet

from multilora_kernels import add_lora as add_lora_module
from multilora_kernels import list_capacity, lora_choice
from multilora_kernels.add_lora import add_lora, add_lora_ref
from multilora_kernels.launch import Chip
from multilora_kernels.layout import GROUPS
from multilora_kernels.lora_choice import Choose, GroupShape, LoraChoice
from multilora_kernels.segments import Segments
from multilora_kernels.sgmv_expand import sgmv_expand
from multilora_kernels.sgmv_shrink import sgmv_shrink
from multilora_kernels.testing import Fleet, make_fleet

pytestmark = pytest.mark.interpreter
SLOTS = [0, 3, 11, 3, 1, 7, 2, 0, 4, 5, 6, 8, 9, 10, 3, 11]
# Rank 72 takes five tiles, one more than an expand program reads side by side.
RANKS = (1, 8, 16, 17, 24, 40, 72, 3)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return small_fleet(torch.float32, seed=1, ranks=RANKS)


@pytest.mark.parametrize("group", GROUPS)
def test_decode_reaches_fp64_for_every_rank_and_shared_segments(fleet: Fleet, group: str) -> None:
    # Every adapter and both layers through one group; the others differ in their shapes only.
    slots, layers = (SLOTS, (0, 1)) if group == "qkv" else (SLOTS[1:9], (1,))
    check(fleet, slots, group, 5, layers)


@pytest.mark.parametrize("group", GROUPS)
def test_prefill_reaches_fp64(fleet: Fleet, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_choice, "DECODE_TOKENS", 8)
    check(fleet, [3, 11, 7, 0, 8, 9] + [3] * 70 + [6] * 3, group, 6, [1])


def test_half_precision(fleet: Fleet) -> None:
    check(small_fleet(torch.float16, seed=3, ranks=RANKS), SLOTS, "qkv", 7, [0])


def test_a_segment_of_more_rows_than_a_tile_is_cut(fleet: Fleet) -> None:
    check(fleet, [4] * 19 + [7] * 2 + [0], "down", 8, [1])


@pytest.mark.parametrize("row_splits", [2, 4])
def test_shared_rows_in_parts_of_a_share_of_k(
    row_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages with room for chunks of 64, so that a share of K can be cut; one to five rank tiles."""
    decode = lora_choice._decode
    monkeypatch.setattr(
        lora_choice, "_decode", lambda *given: replace(decode(*given), row_splits=row_splits)
    )
    fleet = make_fleet(adapters(RANKS), SHAPES, LAYERS, 8 * PAGE_BYTES, torch.float32, seed=4)
    segments = Segments(11, "cpu")
    segments.build([3] * 2 + [7] * 5 + [4] * 3 + [1])
    choice = segments.lists(fleet.table).groups["down"].choice
    assert (choice.row_splits, choice.span, choice.dot_k) == (row_splits, 64, 64 // row_splits)
    check(fleet, [3] * 2 + [7] * 5 + [4] * 3 + [1], "down", 9, [1])
    check(fleet, [7, 3, 0, 7, 3, 6, 6], "qkv", 10, [0])


@pytest.mark.parametrize("wanted", [1, 1000])
def test_shared_rows_in_several_blocks_of_columns(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to five rank tiles; the last block of a task and the last task are cut by the matrix.
    Where more tasks are wanted than there are, each has one block."""
    decode = lora_choice._decode
    wide = {"rows_n": 64, "n_steps": 2, "row_splits": 2, "wanted_tasks": wanted}
    monkeypatch.setattr(lora_choice, "_decode", lambda *given: replace(decode(*given), **wide))
    fleet = make_fleet(adapters(RANKS), SHAPES, LAYERS, 32 * PAGE_BYTES, torch.float32, seed=4)
    slots = [3] * 2 + [7] * 5 + [4] * 3 + [1] + [6] * 2 + [5] * 2 + [2, 2]
    segments = Segments(len(slots), "cpu")
    segments.build(slots)
    choice = segments.lists(fleet.table).groups["gate_up"].choice
    assert (choice.rows_n, choice.n_steps) == (64, 2)
    tasks = segments.lists(fleet.table).groups["gate_up"].tasks
    # Rows of slot 3 share an adapter of one rank tile.
    (width,) = {int(task[12]) * 16 for task in tasks if task[1] == 1 and task[5] == 2}
    assert width == (128 if wanted == 1 else 64)
    check(fleet, slots, "gate_up", 9, [1])


def test_prompts_in_several_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_choice, "DECODE_TOKENS", 8)
    prefill = lora_choice._prefill
    monkeypatch.setattr(
        lora_choice, "_prefill", lambda *given: replace(prefill(*given), block_n=16, n_steps=4)
    )
    fleet = make_fleet(adapters(RANKS), SHAPES, LAYERS, 32 * PAGE_BYTES, torch.float32, seed=4)
    check(fleet, [3] * 2 + [7] * 5 + [4] * 66 + [0, 6, 6], "gate_up", 9, [1])


@pytest.mark.parametrize("group", ["qkv", "down"])
@pytest.mark.parametrize(
    "slots", [[3] * 70 + [7] * 9 + [11, 0, 4, 9], [0] * 83], ids=["many", "none"]
)
def test_a_captured_step_with_prompts_replays_with_any_work(
    fleet: Fleet, slots: list[int], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches sized for other steps walk what is listed in turns, or wait and leave."""
    for module in (lora_choice, list_capacity):
        monkeypatch.setattr(module, "DECODE_TOKENS", 8)
    waits: list[None] = []
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: waits.append(None))
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)
    choose = partial(_with_early_launch, lora_choice.choose)
    segments = Segments(len(slots), "cpu", max_segments=6, max_rank=72, choose=choose)
    segments.reserve(fleet.table)
    before = segments.nbytes
    segments.prepare_capture(fleet.table, len(slots), 8)
    captured = segments.lists(fleet.table).groups[group]
    assert not captured.choice.is_decode
    segments.build(slots)
    lists = segments.lists(fleet.table)
    if any(slots):
        assert captured.num_tasks < lists.groups[group].num_tasks
    assert segments.nbytes == before

    x, y = inputs(fleet, len(slots), group, 1)
    expected = y.clone()
    add_lora_ref(expected, x, fleet.pool, fleet.table, segments, 1, group)
    where = (fleet.pool.view(-1).view(x.dtype), fleet.table, lists, captured, 1)
    sgmv_expand(y, sgmv_shrink(x, *where), *where)
    torch.testing.assert_close(y, expected)
    assert waits


def test_a_share_of_k_that_ends_beyond_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 16 to a program and 48 inputs: every step is whole, the last share is not."""
    decode = lora_choice._decode
    monkeypatch.setattr(
        lora_choice, "_decode", lambda *given: replace(decode(*given), block_k=16, k_steps=2)
    )
    fleet = make_fleet(adapters(RANKS), SHAPES, LAYERS, 8 * PAGE_BYTES, torch.float32, seed=4)
    segments = Segments(3, "cpu")
    segments.build([1, 7, 3])
    assert segments.lists(fleet.table).groups["qkv"].choice.span == 32
    check(fleet, [1, 7, 3, 7], "qkv", 11, [0, 1])


@pytest.mark.parametrize(("slots", "group"), [([9, 0], "qkv"), ([9, 9], "down"), ([0, 0], "down")])
def test_an_expand_never_ends_before_what_it_was_launched_behind(
    fleet: Fleet, slots: list[int], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 9 has q and v alone. What follows an expand waits for it, and for nothing before it."""
    waits: list[None] = []
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: waits.append(None))
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)
    early = partial(_with_early_launch, lora_choice.choose)
    segments = Segments(len(slots), "cpu", choose=early)
    segments.prepare_capture(fleet.table, len(slots), 16, slots)
    x, y = inputs(fleet, len(slots), group, 1)
    work = segments.lists(fleet.table).groups[group]
    assert work.choice.pdl
    weights = fleet.pool.view(-1).view(x.dtype)
    where = (weights, fleet.table, segments.lists(fleet.table), work, 0)
    planes = sgmv_shrink(x, *where)
    assert not waits, "it is not launched early"
    sgmv_expand(y, planes, *where)
    assert waits


def test_a_capture_launches_the_groups_it_has_work_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 9 has q and v alone; slots may change to others of the kind, or to the base."""
    launches: list[str] = []
    for kernel in (add_lora_module.sgmv_shrink, add_lora_module.sgmv_expand):
        monkeypatch.setattr(add_lora_module, kernel.__name__, _counted(kernel, launches))
    segments = Segments(3, "cpu")
    for group in GROUPS:
        x, y = inputs(fleet, 3, group, 1)
        before = y.clone()
        segments.prepare_capture(fleet.table, 3, 16, [9, 0, 9], groups=("qkv", "o"))
        add_lora(y, x, fleet.pool, fleet.table, segments, 0, group)
        assert torch.equal(y, before) == (group != "qkv")
    assert launches == ["sgmv_shrink", "sgmv_expand"] * 2


def _counted(kernel: Callable[..., Any], launches: list[str]) -> Callable[..., Any]:
    def launch(*given: Any) -> Any:
        launches.append(kernel.__name__)
        return kernel(*given)

    return launch


def _with_early_launch(
    choose: Choose, shape: GroupShape, num_tokens: int, chip: Chip
) -> LoraChoice:
    return replace(choose(shape, num_tokens, chip), pdl=True)


def test_a_nan_adapter_leaves_other_rows_bit_identical() -> None:
    fleet = small_fleet(torch.float32, seed=2, ranks=RANKS)
    slots = [3, 1, 0, 3, 4]
    x, y = inputs(fleet, len(slots), "qkv", 1)
    spoiled = y.clone()
    run(fleet, x, y, slots, "qkv")
    for layer in range(2):
        for place in fleet.table.blocks(3, layer, "q_proj"):
            size = place.block.rank_width * place.block.length
            fleet.pool.view(-1).view(torch.float32)[place.element :][:size] = torch.nan
    run(fleet, x, spoiled, slots, "qkv")
    assert torch.isnan(spoiled[[0, 3], : SHAPES["q_proj"][1]]).all()
    assert torch.equal(spoiled[[1, 2, 4]], y[[1, 2, 4]])


def test_buffers_are_written_in_place_and_follow_every_build(fleet: Fleet) -> None:
    """What a captured graph relies on: same buffers, other rows, no stale entry (CASES: replay)."""
    segments = Segments(16, "cpu")
    segments.prepare_capture(fleet.table, 6)
    lists = segments.lists(fleet.table)
    sizes = {name: (group.num_tiles, group.num_tasks) for name, group in lists.groups.items()}
    # One tile a module; in pages this small a chunk, and so a task, has 16 columns.
    assert sizes["qkv"] == (18, 30) and sizes["down"] == (6, 18)
    buffers = [
        lists.groups["o"].tiles.data_ptr(),
        lists.rows.data_ptr(),
        lists._planes.data_ptr(),
    ]
    captured = lists.groups["o"]
    x, y = inputs(fleet, 6, "o", 3)
    before = y.clone()
    add_lora(y, x, fleet.pool, fleet.table, segments, 0, "o")
    assert torch.equal(y, before)
    for slots in ([7, 6, 6, 5, 0, 1], [0, 0, 0, 2, 0, 0], [0] * 6):
        segments.build(slots)
        assert segments.lists(fleet.table) is lists
        again = lists.groups["o"]
        assert [again.tiles.data_ptr(), lists.rows.data_ptr(), lists._planes.data_ptr()] == buffers
        # Replay: the launch sizes of the capture, the contents of this build.
        lists.groups["o"] = captured
        y, expected = before.clone(), before.clone()
        segments._is_capture = True
        add_lora(y, x, fleet.pool, fleet.table, segments, 0, "o")
        run(fleet, x, expected, slots, "o", [0])
        assert torch.equal(y, expected)


def test_building_the_same_rows_again_writes_nothing(fleet: Fleet) -> None:
    segments = Segments(4, "cpu")
    segments.build([1, 2, 0, 1])
    lists = segments.lists(fleet.table)
    lists.rows.fill_(-7)
    segments.build([1, 2, 0, 1])
    assert segments.lists(fleet.table).rows[0] == -7
    segments.build([1, 2, 0, 2])
    assert segments.lists(fleet.table).rows[:3].tolist() == [0, 1, 3]


def test_fixed_buffers_hold_the_worst_step_and_refuse_more(fleet: Fleet) -> None:
    """Every row its own adapter of the highest rank: nothing may move under a captured graph."""
    segments = Segments(8, "cpu", max_rank=16)
    segments.build([2, 3, 2, 3, 2, 3, 2, 3])
    lists = segments.lists(fleet.table)
    places = [lists._tiles.data_ptr(), lists._tasks.data_ptr(), lists._planes.data_ptr()]
    segments.build([2, 3, 0, 0, 0, 0, 0, 0])
    now = segments.lists(fleet.table)
    assert [now._tiles.data_ptr(), now._tasks.data_ptr(), now._planes.data_ptr()] == places
    with pytest.raises(AssertionError, match="max_rank"):
        segments.build([7] * 8)


def test_bands_of_small_segments_fit_the_fixed_buffers() -> None:
    """A segment takes whole bands, however few tiles it has."""
    fleet = make_fleet(
        [{(0, "o_proj"): 8}] * 6, SHAPES, LAYERS, PAGE_BYTES, torch.float32, "cpu", 4
    )
    segments = Segments(6, "cpu", max_rank=8)
    segments.build([1, 2, 3, 4, 5, 6])
    assert segments.lists(fleet.table).groups["o"].num_bands == 6

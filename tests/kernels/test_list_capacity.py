"""What is planned for the work lists is what they allocate."""

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
import torch

from multilora_cli.sizing.budget import step_kinds
from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.layout import MODULES, page_bytes, plan_image
from multilora_kernels.list_capacity import (
    decode_capacity,
    group_shapes,
    list_bytes,
    prompt_capacity,
)
from multilora_kernels.lora_choice import choose
from multilora_kernels.table import AdapterTable
from multilora_kernels.work_lists import WorkLists

SHAPES = {
    "q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024),
    "o_proj": (4096, 4096), "gate_proj": (4096, 14336), "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}  # fmt: skip
PAGE = page_bytes(2, 8, 128, 2)


def lists_of(chip: Chip, max_tokens: int, max_rank: int, rank: int = 8) -> WorkLists:
    """Lists of an 8B's layer, before any step; slot 1 has an adapter."""
    table = AdapterTable(3, 2, SHAPES, 4096, torch.device("cpu"))
    plan = plan_image({(0, module): rank for module in MODULES}, SHAPES, PAGE, 2)
    table.set(1, plan, list(range(plan.num_pages)))
    return WorkLists(table, chip, max_tokens, max_rank)


@pytest.mark.parametrize("chip", [H200, RTX_4090], ids=lambda chip: chip.name)
@pytest.mark.parametrize("max_rank", [8, 64, 512])
def test_the_fixed_buffers_are_what_was_planned(chip: Chip, max_rank: int) -> None:
    for max_tokens in (16, 512):
        lists = lists_of(chip, max_tokens, max_rank)
        lists.reserve(max_tokens)
        shapes = group_shapes(SHAPES, PAGE, 2)
        assert lists.shapes == shapes
        # Up to 512 rows there are no prompts' lists: the rest is the slot of every row.
        planned = list_bytes(shapes, max_tokens, max_tokens, max_rank, chip)
        assert planned - lists.nbytes == 4 * max_tokens


@pytest.mark.parametrize("chip", [H200, RTX_4090, Chip("small", 90, 8)], ids=lambda chip: chip.name)
@pytest.mark.parametrize("max_rank", [16, 64])
def test_the_buffers_of_prompts_are_what_was_planned_and_hold_every_step(
    chip: Chip, max_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter in all rows, one in every row as far as there may be, and unequal shares."""
    monkeypatch.setattr(WorkLists, "_write", lambda *_: None)  # a kernel's part
    shapes, max_tokens, most = group_shapes(SHAPES, PAGE, 2), 4500, 40
    lists = lists_of(chip, max_tokens, max_rank, rank=max_rank)
    lists.reserve_prompts(most)
    decode = lists_of(chip, max_tokens, max_rank)
    decode.reserve(512)
    row_slots = 4 * max_tokens  # of Segments
    both = lists.nbytes + decode.nbytes + row_slots
    assert both == list_bytes(shapes, max_tokens, most, max_rank, chip)
    for rows in (513, 640, 1023, 1024, 1088, 1280, 2112, 2113, 4096, 4097, 4500):
        for lengths in ([rows], [1] * (most - 1) + [rows - most + 1], [65] * 7 + [rows - 455]):
            indptr = np.cumsum([0, *lengths]).astype(np.int32)
            slots = np.ones(len(lengths), np.int32)
            lists.update(np.arange(rows, dtype=np.int32), indptr, slots, rows)
            lists.expect(rows, 64, ("qkv", "down"))
            for group in lists.groups.values():  # a captured step's planes
                lists.planes(group.plane_rows, group.choice.splits(group.shape.d_in))
    assert lists.nbytes + decode.nbytes + row_slots == both


NARROW = dict.fromkeys(MODULES, (16, 16))  # what a program sums is not cut for shared rows


@pytest.mark.parametrize("chip", [H200, RTX_4090, Chip("small", 90, 8)], ids=lambda chip: chip.name)
@pytest.mark.parametrize(("shapes", "page"), [(SHAPES, PAGE), (NARROW, 1024)], ids=["8b", "narrow"])
@pytest.mark.parametrize("max_rank", [1, 16, 17, 48, 64, 512])
def test_programs_of_a_captured_step_find_a_record_each(
    chip: Chip, shapes: Mapping[str, tuple[int, int]], page: int, max_rank: int
) -> None:
    """They read one before they know how many there are, and look its cell up: beyond the buffer
    that is whatever lies there. Captured for ranks that no adapter here may have."""
    for max_tokens in (1, 8, 264, 512):
        table = AdapterTable(3, 2, shapes, 64, torch.device("cpu"))
        table.settle(page, 2)
        lists = WorkLists(table, chip, max_tokens, max_rank)
        lists._write = lambda *_: None  # type: ignore[method-assign]
        lists.reserve(max_tokens)
        nothing = np.zeros(0, np.int32)
        for rows, kind in product((1, 8, 72, 264, 512), step_kinds(max_rank)[1:]):
            if rows > max_tokens:
                continue
            lists.update(nothing, np.zeros(1, np.int32), nothing, rows)
            lists.expect(rows, kind.rank, kind.groups)
            for group in lists.groups.values():
                splits = group.choice.splits(group.shape.d_in)
                tiles = (lists.decode_grid(group.num_tiles * splits, group.choice) - 1) // splits
                tasks = lists.decode_grid(group.num_tasks, group.choice) - 1
                for buffer, region, last in (
                    (lists._tiles, group.tiles, tiles), (lists._tasks, group.tasks, tasks)
                ):  # fmt: skip
                    begin = (region.data_ptr() - buffer.data_ptr()) // region[0].nbytes
                    assert begin + last < len(buffer), (group.shape.name, max_tokens, rows)


def test_a_captured_step_has_a_program_for_all_work_of_skewed_rows() -> None:
    """What several rows share is cut more finely than what rows have to themselves."""
    lists = lists_of(H200, 16, 64, rank=16)
    lists._write = lambda *_: None  # type: ignore[method-assign]
    lists.reserve(16)
    indptr = np.cumsum([0, 1, 1, 2, 3, 4, 5]).astype(np.int32)
    lists.update(np.arange(16, dtype=np.int32), indptr, np.ones(6, np.int32), 16)
    listed = {name: (group.num_tiles, group.num_tasks) for name, group in lists.groups.items()}
    lists.expect(16, 16, tuple(listed))
    for name, (tiles, tasks) in listed.items():
        group = lists.groups[name]
        splits = group.choice.splits(group.shape.d_in)
        assert lists.decode_grid(group.num_tiles * splits, group.choice) >= tiles * splits, name
        at_once = group.choice.programs_per_sm * H200.num_sms
        assert lists.decode_grid(group.num_tasks, group.choice) >= min(tasks, at_once), name


def test_prompts_add_their_planes_and_lists() -> None:
    shapes = group_shapes(SHAPES, PAGE, 2)
    few, many = (list_bytes(shapes, rows, 256, 64, H200) for rows in (512, 8192))
    widest = max(
        rows * (len(shape.d_outs) * 4) * choose(shape, rows, H200).splits(shape.d_in) * 64
        for shape in shapes.values()
        for rows in (576, 1024, 1088, 2048, 2112, 4096, 8192)
    )
    wanted, _ = prompt_capacity(shapes, 8192, 256, 64, H200)
    entries = sum(capacity.nbytes for capacity in wanted.values())
    rest = many - few - widest - entries - 3 * 4 * (8192 - 512)
    assert 0 < rest < 20 * 1024 and entries < 0.05 * widest


def test_capacity_grows_with_rows_and_rank() -> None:
    shapes = group_shapes(SHAPES, PAGE, 2)
    (small, planes), (large, more) = (
        decode_capacity(shapes, rows, rank, H200) for rows, rank in ((64, 16), (256, 64))
    )
    assert all(large[name].covers(small[name]) for name in shapes) and more > planes

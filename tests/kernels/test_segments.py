"""Popularity laws against published vectors, and segments against a plain grouping."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_kernels.popularity import make_slots, popularity_counts
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable
from multilora_kernels.testing import make_segments
from multilora_kernels.work_lists import WorkLists


@pytest.mark.parametrize(
    ("popularity", "rows", "counts"),
    [
        ("uniform", 1, [1]),
        ("uniform", 4, [2, 2]),
        ("uniform", 8, [3, 3, 2]),
        ("uniform", 32, [6, 6, 5, 5, 5, 5]),
        ("uniform", 1024, [32] * 32),
        ("skewed", 1, [1]),
        ("skewed", 2, [1, 1]),
        ("skewed", 4, [2, 1, 1]),
        ("skewed", 8, [3, 2, 1, 1, 1]),
        ("skewed", 16, [5, 4, 3, 2, 1, 1]),
        ("skewed", 64, [17, 17, 11, 7, 5, 3, 2, 1, 1]),
        ("skewed", 1024, [291, 194, 157, 129, 86, 57, 38, 25, 17, 11, 7, 5, 3, 2, 1, 1]),
        ("distinct", 3, [1, 1, 1]),
        ("identical", 5, [5]),
        ("zipf:1", 11, [4, 2, 1, 1, 1, 1, 1]),
    ],
)
def test_popularity_counts(popularity: str, rows: int, counts: list[int]) -> None:
    assert popularity_counts(popularity, rows) == counts


@pytest.mark.parametrize(
    ("popularity", "start"),
    [("uniform", [27, 30, 3, 5, 21, 19, 16, 23]), ("skewed", [5, 8, 0, 0, 3, 2, 2, 3])],
)
def test_shuffle_agrees_with_the_published_order(popularity: str, start: list[int]) -> None:
    assert make_slots(popularity, 1024, first_slot=0)[:8].tolist() == start


@given(st.integers(1, 200), st.sampled_from(["skewed:2.5", "zipf:1.5", "zipf:0.9", "uniform"]))
def test_counts_add_up(rows: int, popularity: str) -> None:
    counts = popularity_counts(popularity, rows)
    assert sum(counts) == rows and counts == sorted(counts, reverse=True) and min(counts) > 0


def test_an_unknown_law_is_named() -> None:
    with pytest.raises(ValueError, match="'pareto'"):
        popularity_counts("pareto", 4)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_segments_group_the_rows_of_every_slot_in_order(slots: list[int]) -> None:
    segments = Segments(40, "cpu")
    segments.build(slots)
    expected = {s: [i for i, slot in enumerate(slots) if slot == s] for s in set(slots) - {0}}
    found = {
        int(slot): segments.permutation[a:b].tolist()
        for slot, a, b in zip(
            segments.seg_slots, segments.seg_indptr[:-1], segments.seg_indptr[1:], strict=True
        )
    }
    assert found == expected
    assert segments.num_tokens == len(slots)
    assert segments.num_segments == len(expected)
    assert segments.has_adapters == bool(expected)


def test_a_step_of_base_rows_has_no_segments() -> None:
    segments = make_segments("distinct", 4)
    assert segments.has_adapters
    segments.build(np.zeros(4, dtype=np.int32))
    assert not segments.has_adapters and segments.num_tokens == 4


def test_rows_whose_lists_could_not_be_written_are_not_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lists on the device are then another step's: the same rows again are written anew."""
    table = AdapterTable(4, 1, {"q_proj": (16, 16)}, 8, "cpu")
    table.settle(4096, 4)
    segments = Segments(8, "cpu")
    segments.bind(table)
    written: list[list[int]] = []

    def update(lists: WorkLists, rows: np.ndarray, starts: np.ndarray, *step: object) -> None:
        if fails:
            raise MemoryError("no room on the device")
        written.append(rows.tolist())

    monkeypatch.setattr(WorkLists, "update", update)
    fails = False
    segments.build([1, 2])
    segments.build([1, 2])
    assert written == [[0, 1]], "the rows of the last step again cost nothing"
    fails = True
    for slots in ([2, 1], [1, 2]):
        with pytest.raises(MemoryError):
            segments.build(slots)
    fails = False
    segments.build([1, 2])
    assert written == [[0, 1]] * 2
    segments.build([2, 1])
    assert written == [[0, 1], [0, 1], [1, 0]]


def test_rows_whose_slots_were_not_uploaded_are_not_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = AdapterTable(4, 1, {"q_proj": (16, 16)}, 8, "cpu")
    table.settle(4096, 4)
    table.has_extras[1:] = True
    segments = Segments(8, "cpu")
    segments.bind(table)
    monkeypatch.setattr(WorkLists, "update", lambda *step: None)
    segments.build([1, 2])
    upload = segments._staging.upload

    def fail(*arrays: object) -> None:
        raise MemoryError("no room in pinned memory")

    monkeypatch.setattr(segments._staging, "upload", fail)
    with pytest.raises(MemoryError):
        segments.build([2, 1])
    monkeypatch.setattr(segments._staging, "upload", upload)
    segments.build([2, 1])
    assert segments.has_extras(table)
    assert segments.row_slots[:2].tolist() == [2, 1]

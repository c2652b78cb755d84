"""The benchmark runner's own arithmetic, without a device."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from multilora_kernels.bench.__main__ import MODULES, best_choice, merge_tuned
from multilora_kernels.bench.timing import Built, Case, record_of, sets_needed
from multilora_kernels.launch import H200, RTX_4090


def case_of(moved: float, flops: float) -> Case:
    def build(device: torch.device) -> Built:
        return Built(2, {})

    return Case("op", {"B": 4, "S": 16}, moved, build, flops)


def test_bound_is_the_slower_of_bytes_and_operations() -> None:
    """4.583 MB take a microsecond to read on an H200, 777 MFLOP one to multiply."""
    assert case_of(4.583e6, 0).bound_us(H200) == pytest.approx(1.0)
    assert case_of(4.583e6, 3 * 777e6).bound_us(H200) == pytest.approx(3.0)
    assert case_of(1e6, 1e6).bound_us(RTX_4090) is None


def test_record_holds_median_and_rates() -> None:
    record = record_of(case_of(4.583e6, 777e6), H200, "ours", [3.0, 2.0, 2.5])
    assert (record["us"], record["us_min"], record["us_max"]) == (2.5, 2.0, 3.0)
    assert record["gbps"] == pytest.approx(4.583e6 / 2.5e3, rel=1e-3)
    assert record["share_of_bound"] == pytest.approx(0.4)


def test_input_sets_exceed_the_l2() -> None:
    for size in (1e3, 1e6, 5e7, 1e9):
        sets = sets_needed(size)
        assert 2 <= sets <= 256 and (sets == 256 or sets * size >= 128 * 2**20)


def test_best_choice_is_the_least_geometric_mean() -> None:
    """A choice that one case could not run is not a candidate."""
    timed = [
        {'{"n": 1}': 10.0, '{"n": 2}': 8.0, '{"n": 3}': 1.0},
        {'{"n": 1}': 10.0, '{"n": 2}': 11.0},
    ]
    assert best_choice(timed) == {"n": 2}
    assert best_choice([{'{"n": 1}': 1.0}, {'{"n": 2}': 1.0}]) is None


def test_merge_keeps_other_entries(tmp_path: Path) -> None:
    merge_tuned(tmp_path, H200, {"a": {"x": {"n": 1}}, "b": {"y": {"n": 2}}})
    merge_tuned(tmp_path, H200, {"a": {"z": {"n": 3}, "x": {"n": 4}}})
    table = json.loads((tmp_path / "h200.json").read_text())
    assert table == {"a": {"x": {"n": 4}, "z": {"n": 3}}, "b": {"y": {"n": 2}}}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_distinct_cases(name: str) -> None:
    module = f"multilora_kernels.bench.{name}"
    assert importlib.util.find_spec(module) is not None
    cases = importlib.import_module(module).cases()
    labels = [(case.op, case.label) for case in cases]
    assert cases and len(set(labels)) == len(labels)
    assert all(bool(case.choices) <= bool(case.tune_key) for case in cases)

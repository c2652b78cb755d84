"""The benchmark runner's own arithmetic, without a device."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from multilora_kernels.bench import tuning
from multilora_kernels.bench.selection import MODULES, Selection
from multilora_kernels.bench.timing import Built, Case, Run, record_of, sets_needed
from multilora_kernels.bench.tuning import Search, best_choice, merge_tuned
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


def test_a_search_stores_the_best_choice_of_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all cases of a key; what does not fit one of them is no candidate for the others."""
    figures = {1: [9.0, 4.0], 2: [3.0, 5.0], 3: [1.0, None]}

    def case(index: int) -> tuple[Case, Built]:
        choices = tuple({"n": n} for n in figures)
        made = Case("op", {"T": index}, 1.0, lambda _: Built(2, {}), tune_key="k", choices=choices)
        return made, Built(2, {}, lambda choice: lambda _: figures[choice["n"]][index])

    def timed(run: Run, *_: object, **__: object) -> list[float]:
        us = run(0)
        if us is None:
            raise OutOfResources(2, 1, "shared memory")
        return [float(str(us))] * 3

    monkeypatch.setattr(tuning, "time_us", timed)
    monkeypatch.setattr(tuning.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning.launch, "chip_of", lambda index: H200)
    said: list[str] = []
    search = Search(tmp_path, said.append)
    records = [record for index in (0, 1) for record in search.run(*case(index))]
    assert [record["us"] for record in records] == [9.0, 3.0, 1.0, 4.0, 5.0]
    assert json.loads((tmp_path / "h200.json").read_text()) == {"op": {"k": {"n": 2}}}
    assert said[0].endswith('1.00 us {"n": 3}')


def test_a_selection_names_parts_of_ops_and_shapes() -> None:
    wanted = list(Selection(("lora",), "tunes=order").cases())
    assert wanted and all("order of sums" in case.label and case.choices for case in wanted)
    assert all(case.compile is not None for case in wanted)
    assert len(list(Selection().cases())) > len(list(Selection(("lora",)).cases())) > len(wanted)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_distinct_cases(name: str) -> None:
    module = f"multilora_kernels.bench.{name}"
    assert importlib.util.find_spec(module) is not None
    cases = importlib.import_module(module).cases()
    labels = [(case.op, case.label) for case in cases]
    assert cases and len(set(labels)) == len(labels)
    assert all(bool(case.choices) <= bool(case.tune_key) for case in cases)

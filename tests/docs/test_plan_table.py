"""The table of planned and allocated bytes in docs/plan.md is made from the records."""

import json
from pathlib import Path

import plan_table
import pytest

from multilora_cli.sizing.device import NOTABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the script finds and writes copies."""
    for name in ("DOCUMENT", "RECORDS"):
        original: Path = getattr(plan_table, name)
        copy = tmp_path / original.name
        copy.write_text(original.read_text())
        monkeypatch.setattr(plan_table, name, copy)
    return tmp_path


def test_the_document_holds_the_table_of_the_records(folder: Path) -> None:
    plan_table.main([])
    written = (folder / "plan.md").read_text()
    assert written == (ROOT / "docs" / "plan.md").read_text(), "run tools/plan_table.py"


def test_every_recorded_part_is_within_two_percent_of_the_plan() -> None:
    lines = (ROOT / "docs" / "benchmarks" / "plan-h200.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if "planned" in run]
    assert {run["quantization"] for run in runs} == {"none", "awq", "fp8"}
    for run in runs:
        assert run["peak"] <= run["device_bytes"]
        for part in run["allocated"].keys() - {"margin"}:
            assert run["allocated"][part] == pytest.approx(run["planned"][part], rel=NOTABLE), part


def test_a_new_run_takes_the_place_of_the_old_one(folder: Path) -> None:
    parts = dict.fromkeys((*plan_table.PARTS, "margin"), 3 * 2**20)
    captured = {"steps": 9, "pool": 1, "driver": 2, "fixed": 3}
    probe = folder / "probe.jsonl"
    lines = [
        {"kind": "captured", "after": "start", **captured},
        {"kind": "captured", "after": "adapters", **captured, "steps": 10},
        {"kind": "result", "storage": "awq", "planned": parts, "kept": 2**34,
         "allocated": {**parts, "graphs": 4 * 2**20}},
    ]  # fmt: skip
    probe.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan_table.main([str(probe), "--commit", "abc"])
    records = (folder / "plan-h200.jsonl").read_text().splitlines()
    awq = next(run for run in map(json.loads, records) if run["quantization"] == "awq")
    assert (awq["commit"], awq["peak"], awq["graphs"]) == ("abc", 2**34, captured)
    written = (folder / "plan.md").read_text()
    assert "| graphs | 566 MiB, +0.4 % | 4 MiB, +33.3 % |" in written
    assert "16.00 of 22 GiB" in written

"""The table of planned and allocated bytes in docs/plan.md is made from the records."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.sizing.device import NOTABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The script, writing into copies."""
    loaded = runpy.run_path(str(ROOT / "tools" / "plan_table.py"))
    for name in ("DOCUMENT", "RECORDS"):
        copy = tmp_path / loaded[name].name
        copy.write_text(loaded[name].read_text())
        monkeypatch.setitem(loaded["main"].__globals__, name, copy)
    loaded["folder"] = tmp_path
    return loaded


def test_the_document_holds_the_table_of_the_records(script: dict[str, Any]) -> None:
    script["main"]([])
    written = (script["folder"] / "plan.md").read_text()
    assert written == (ROOT / "docs" / "plan.md").read_text(), "run tools/plan_table.py"


def test_every_recorded_part_is_within_two_percent_of_the_plan() -> None:
    lines = (ROOT / "docs" / "benchmarks" / "plan-h200.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if "planned" in run]
    assert {run["quantization"] for run in runs} == {"none", "awq", "fp8"}
    for run in runs:
        assert run["peak"] <= run["device_bytes"]
        for part in run["allocated"].keys() - {"margin"}:
            assert run["allocated"][part] == pytest.approx(run["planned"][part], rel=NOTABLE), part


def test_a_new_run_takes_the_place_of_the_old_one(script: dict[str, Any]) -> None:
    parts = dict.fromkeys((*script["PARTS"], "margin"), 3 * 2**20)
    captured = {"steps": 9, "pool": 1, "driver": 2, "fixed": 3}
    probe = script["folder"] / "probe.jsonl"
    lines = [
        {"kind": "captured", "after": "start", **captured},
        {"kind": "captured", "after": "adapters", **captured, "steps": 10},
        {"kind": "result", "storage": "awq", "planned": parts, "kept": 2**34,
         "allocated": {**parts, "graphs": 4 * 2**20}},
    ]  # fmt: skip
    probe.write_text("".join(json.dumps(line) + "\n" for line in lines))
    script["main"]([str(probe), "--commit", "abc"])
    records = (script["folder"] / "plan-h200.jsonl").read_text().splitlines()
    awq = next(run for run in map(json.loads, records) if run["quantization"] == "awq")
    assert (awq["commit"], awq["peak"], awq["graphs"]) == ("abc", 2**34, captured)
    written = (script["folder"] / "plan.md").read_text()
    assert "| graphs | 566 MiB, +0.4 % | 4 MiB, +33.3 % |" in written
    assert "16.00 of 22 GiB" in written

"""Expected tokens/s: the bound times a measured share, or nothing."""

import json
from pathlib import Path

import efficiency as tool
import pytest

from multilora_cli.sizing import efficiency, report
from multilora_cli.sizing.efficiency import Measured, Step, measured, nearest
from multilora_cli.sizing.hardware import find_gpu
from tests.cli.test_plan import LLAMA3_8B, planned

H200, RTX_4090 = find_gpu("h200"), find_gpu("rtx-4090")
CELLS = (
    Measured("H200", 90, "awq", 64, False, 3.0, 0.8, "0123456789abcdef"),
    Measured("H200", 90, "awq", 64, True, 4.0, 0.5, "0123456789abcdef"),
    Measured("H200", 90, "awq", 1, True, 1.0, 0.3, "0123456789abcdef"),
)


@pytest.mark.parametrize(
    ("batch", "share"),
    [(1, 0.3), (2, 0.3), (3, None), (32, 0.5), (64, 0.5), (128, 0.5), (256, None)],
)
def test_the_nearest_batch_within_a_doubling(batch: int, share: float | None) -> None:
    cell = nearest(CELLS, H200, "awq", Step(batch, True, 4.0))
    assert (cell and cell.share) == share


def test_no_other_class_storage_or_load_stands_in() -> None:
    plain = Step(64, False, 3.0)
    assert nearest(CELLS, find_gpu("h100"), "awq", plain) is CELLS[0]
    assert nearest(CELLS, RTX_4090, "awq", plain) is None
    assert nearest(CELLS, H200, "fp8", plain) is None
    assert nearest(CELLS[:1], H200, "awq", Step(64, True, 3.0)) is None


@pytest.mark.parametrize(("bound_ms", "told"), [(30.0, True), (1.5, True), (1.4, False)])
def test_a_small_model_is_not_told_by_a_large_one(bound_ms: float, told: bool) -> None:
    """Half the bytes in half the time, and the launches as before: the share would be a lie."""
    assert (nearest(CELLS, H200, "awq", Step(64, False, bound_ms)) is not None) == told


def test_a_plan_says_where_its_figure_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(LLAMA3_8B))
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("base: {model: ./8b, name: llama}\n")
    monkeypatch.setattr(report, "measured", lambda: CELLS)
    asked = ("--set", "base.quantization=awq", "--assume", "rank=16,count=300")
    rows = {row["batch"]: row for row in planned(fleet, "--gpu", "h200", *asked)["bounds"]}
    assert rows[64]["expected_tokens_s"] == pytest.approx(0.5 * rows[64]["tokens_s"])
    assert rows[64]["expected_from"] == "measured on H200, commit 0123456789"
    assert rows[256]["expected_tokens_s"] is None
    rows = planned(fleet, "--gpu", "rtx-4090", *asked)["bounds"]
    assert all(row["expected_from"] == "no data for this card" for row in rows)


def test_the_data_comes_from_the_benchmarks() -> None:
    """The file is what the tool makes of docs/benchmarks, so that no figure is entered by hand."""
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    lines = [
        line
        for path in sorted(folder.glob("engine*.jsonl"))
        for line in path.read_text().splitlines()
        if line
    ]
    made = [Measured(**cell) for cell in tool.cells(lines)]
    remedy = "run: python tools/efficiency.py docs/benchmarks/engine*.jsonl"
    assert list(measured()) == made, remedy
    assert all(0 < cell.share < 1.05 for cell in made)


def test_the_tool_takes_cells_with_a_bound() -> None:
    cell = {
        "kind": "cell", "schema": tool.SCHEMA, "quantization": "awq", "setting": "distinct",
        "batch": 64, "gpu": "NVIDIA H200", "step_ms": 8.0, "bound_ms": 4.0, "commit": "abc",
    }  # fmt: skip
    others = ({"schema": "x"}, {**cell, "setting": "mixed"}, {**cell, "bound_ms": None},
              {**cell, "gpu": "Unknown"}, {**cell, "step_ms": 16.0, "setting": "base"})  # fmt: skip
    found = tool.cells([json.dumps(record) for record in (*others, cell)])
    assert [(c["adapters"], c["share"]) for c in found] == [(False, 0.25), (True, 0.5)]
    assert Measured(**found[1]).label == "measured on H200, commit abc"
    assert tool.OUTPUT.name == efficiency.FILE

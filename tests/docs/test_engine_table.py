"""The engine's table in docs/benchmarks.md is what the script makes of the records."""

import json
import sys
from pathlib import Path

import efficiency
import engine_table
import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks" / "engine-h200.jsonl"


def test_the_document_holds_the_table_of_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = engine_table.DOCUMENT
    copy = tmp_path / "benchmarks.md"
    copy.write_text(document.read_text())
    readme = tmp_path / "README.md"
    readme.write_text(engine_table.README.read_text())
    was = engine_table.README.read_text()
    monkeypatch.setattr(engine_table, "DOCUMENT", copy)
    monkeypatch.setattr(engine_table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["engine_table.py", str(RECORDS)])
    engine_table.main()
    assert copy.read_text() == document.read_text()
    assert readme.read_text() == was, "run tools/engine_table.py"
    cells = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    for cell in cells:
        if cell["kind"] != "cell":
            continue
        if cell["setting"] == "pool":
            assert f" {cell['output_tokens_per_s']:,.0f} at {cell['batch']}" in copy.read_text()
        else:
            assert f" {cell['step_ms']:.2f} |" in copy.read_text()


def test_the_efficiency_of_the_plan_is_that_of_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = tmp_path / "efficiency.json"
    monkeypatch.setattr(efficiency, "OUTPUT", written)
    efficiency.main([str(path) for path in sorted(RECORDS.parent.glob("engine-h*.jsonl"))])
    held = ROOT / "multilora_cli" / "sizing" / "efficiency.json"
    assert json.loads(written.read_text()) == json.loads(held.read_text())
    assert json.loads(held.read_text())["cells"]

"""The LoRA tables of kernels/README.md are what the script makes of the records."""

import sys
from pathlib import Path

import lora_table
import pytest

ROOT = Path(__file__).parents[2]


def test_the_readme_holds_the_tables_of_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readme = lora_table.README
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    monkeypatch.setattr(lora_table, "README", copy)
    records = str(ROOT / "docs" / "benchmarks" / "lora-h200.jsonl")
    monkeypatch.setattr(sys, "argv", ["lora_table.py", records])
    lora_table.main()
    assert copy.read_text() == readme.read_text()
    assert "| rank 16, distinct | 28 |" in copy.read_text()


def test_steps_say_what_is_added() -> None:
    cell = {"setting": "mixed", "rows": 16, "ms": {"base": 4.0, "one stream": 5.0, "own": 4.4}}
    before = {**cell, "ms": {"base": 1.0, "one stream": 1.0, "own": 1.0}, "commit": "abb"}
    rows = lora_table.captured_steps([before, cell | {"commit": "abc"}])
    assert rows[2:] == ["| mixed | 16 | 4.00 | 5.00 (+25.0 %) | 4.40 (+10.0 %) | +12 % | abc |"]

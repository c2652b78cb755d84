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

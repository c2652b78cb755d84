"""The LoRA tables of kernels/README.md are what the script makes of the records."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_readme_holds_the_tables_of_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "lora_table.py"))
    readme = ROOT / "kernels" / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    monkeypatch.setitem(script["main"].__globals__, "README", copy)
    records = str(ROOT / "docs" / "benchmarks" / "lora-h200.jsonl")
    monkeypatch.setattr(sys, "argv", ["lora_table.py", records])
    script["main"]()
    assert copy.read_text() == readme.read_text()
    assert "| rank 16, distinct | 28 |" in copy.read_text()

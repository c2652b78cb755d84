"""docs/quantisation.md: its table is made of the records, its claims are those of the records."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/quantize_table.py."""
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "quantize_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_made_of_the_records(tool: ModuleType) -> None:
    text = (ROOT / "docs" / "quantisation.md").read_text()
    shown = text.split(tool.BEGIN)[1].split(tool.END)[0].strip()
    assert shown == tool.table(tool.read(tool.RECORDS))
    shown = text.split(tool.DRIFT_BEGIN)[1].split(tool.DRIFT_END)[0].strip()
    assert shown == tool.drift_table(tool.read(tool.DRIFT))


def test_auto_round_is_a_tenth_below_plain_rounding(tool: ModuleType) -> None:
    """SmolLM2-135M, groups of 64, calibrated on the text that is shipped."""
    found = {
        r["way"]: r["perplexity"]
        for r in tool.read(tool.RECORDS)
        if r["model"].startswith("smollm2") and r["calibration"] == "default"
    }
    assert found["base"] < found["auto-round"] < 0.9 * found["plain"]
    assert found["kv-fp8"] < 1.01 * found["base"] and found["fp8"] < 1.03 * found["base"]

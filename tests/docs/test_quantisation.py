"""docs/quantisation.md: its table is made of the records, its claims are those of the records."""

from pathlib import Path

import quantize_table

ROOT = Path(__file__).parents[2]


def test_the_tables_are_made_of_the_records() -> None:
    text = (ROOT / "docs" / "quantisation.md").read_text()
    shown = text.split(quantize_table.BEGIN)[1].split(quantize_table.END)[0].strip()
    assert shown == quantize_table.table(quantize_table.read(quantize_table.RECORDS))
    shown = text.split(quantize_table.DRIFT_BEGIN)[1].split(quantize_table.DRIFT_END)[0].strip()
    assert shown == quantize_table.drift_table(quantize_table.read(quantize_table.DRIFT))


def test_auto_round_is_a_tenth_below_plain_rounding() -> None:
    """SmolLM2-135M, groups of 64, calibrated on the text that is shipped."""
    found = {
        r["way"]: r["perplexity"]
        for r in quantize_table.read(quantize_table.RECORDS)
        if r["model"].startswith("smollm2") and r["calibration"] == "default"
    }
    assert found["base"] < found["auto-round"] < 0.9 * found["plain"]
    assert found["kv-fp8"] < 1.01 * found["base"] and found["fp8"] < 1.03 * found["base"]

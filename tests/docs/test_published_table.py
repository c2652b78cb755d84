"""The published tables in docs/benchmarks.md are what the script makes of the records."""

import json
from pathlib import Path
from typing import Any

import published_table
import pytest


def test_the_document_holds_the_tables_of_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "benchmarks.md"
    document = published_table.DOCUMENT
    copy.write_text(document.read_text())
    monkeypatch.setattr(published_table, "DOCUMENT", copy)
    published_table.main()
    assert copy.read_text() == document.read_text(), "run tools/published_table.py"


def record(preset: str, load: str, **more: Any) -> dict[str, Any]:
    settings = {"quantization": "none", "rate": None, "adapters_from": "models"}
    return {
        "preset": preset, "load": load,
        "command": f"mlora bench --preset {preset}",
        "commit": "abc", "date": "2026-11-30", "gpu": "NVIDIA H200", "adapters": 5, "cut": 0,
        "requests": 300, "duration_s": 7.004,
        "requests_per_s": 7.5, "mean_output": 250.0, "input_tokens_per_s": 100.0,
        "output_tokens_per_s": 5000.0, "bound": {"share": 0.8123}, "loads": 3,
        "itl": {"p50": 0.0061}, "ttft": {"mean": 0.25}, "slo_attainment": 0.875, **more,
        "settings": {**settings, **more.get("settings", {})},
    }  # fmt: skip


def made(*records: dict[str, Any]) -> list[str]:
    published = json.loads(published_table.PUBLISHED.read_text())
    return str(published_table.body(records, published)).splitlines()


def test_punicas_rows_stand_beside_what_was_published() -> None:
    fp8 = {"quantization": "fp8"}
    lines = made(
        record("punica", "identical", settings=fp8),
        record("punica", "distinct", output_tokens_per_s=1.0),
        record("punica", "distinct"),  # the last one of a row counts
        record("punica", "base", bound=None),
    )
    rows = [line for line in lines if line.startswith(("| BF16", "| FP8"))]
    assert rows == [
        "| BF16 | distinct | 300 requests in 7 s | 5,100 | 81.2% | 6.1 ms | 1,053 | 87 | 26 |",
        "| BF16 | base | 300 requests in 7 s | 5,100 | - | 6.1 ms | - | - | - |",
        "| FP8 | identical | 300 requests in 7 s | 5,100 | 81.2% | 6.1 ms | 1,044 | 1,140 | 82 |",
    ]
    assert lines.count("- `mlora bench --preset punica`: NVIDIA H200, commit abc, 2026-11-30") == 1
    assert "Not measured yet." in lines  # S-LoRA's


def test_s_loras_rows_by_setting_arrivals_and_adapters() -> None:
    at_once = {"adapters_from": "/tmp/s2.names", "rate": "inf"}
    lines = made(
        record("s-lora-table3", "n=1000", settings={**at_once, "rate": "10.0"}, bound=None),
        record("s-lora-table3", "n=1000", settings=at_once, cut=200),
        record("s-lora-table3", "n=5", settings=at_once, ttft=None, loads=None),
    )
    rows = [line for line in lines if line.startswith("| S2")]
    assert rows == [
        "| S2 | at once | 5 | 5 | 300 requests in 7 s | 5,000 | 7.50 | 81.2% | - | 0.875 | - | 7.48"
        " | 2.66 s | 0.765 |",
        "| S2 | at once | 1000 | 5 | 300 requests in 7 s, 200 cut | 5,000 | 20.00 | 81.2% | 250 ms"
        " | 0.875 | 3 | 6.69 | 10.5 s"
        " | 0.469 |",
        "| S2 | 10/s | 1000 | 5 | 300 requests in 7 s | 5,000 | 7.50 | - | 250 ms | 0.875 | 3"
        " | 6.69 | 10.5 s | 0.469 |",
    ]


def test_the_published_figures_are_those_of_the_presets() -> None:
    """A table cannot have a row that no preset makes."""
    from multilora_cli.bench.arms import POPULARITIES, TABLE3_ADAPTERS

    published = json.loads(published_table.PUBLISHED.read_text())
    assert set(published["punica"]["rows"]) == set(POPULARITIES)
    for rows in published["s-lora"]["rows"].values():
        assert set(rows) <= {f"n={count}" for count in TABLE3_ADAPTERS}

"""The demo fleet's table in docs/benchmarks.md says what its records say."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_row_is_that_of_its_records() -> None:
    """Both rounds together; a ratio is taken within its round."""
    lines = (DOCS / "benchmarks/demo-cpu.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rounds = {
        load: [r for r in records if r["load"] == load] for load in (r["load"] for r in records)
    }
    speed = "output_tokens_per_s"
    document = (DOCS / "benchmarks.md").read_text()
    assert list(rounds) == ["base", "identical", "skewed", "uniform", "distinct"]
    for load, found in rounds.items():
        assert not any(record["errors"] for record in found)
        tokens = sum(record["output_length"]["total"] for record in found)
        rate = tokens / sum(record["duration_s"] for record in found)
        pairs = zip(found, rounds["base"], strict=True)
        ratios = [record[speed] / base[speed] for record, base in pairs]
        ratio = f"{sum(ratios) / len(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        first, gap = (
            1e3 * sum(record[name]["p50"] for record in found) / len(found)
            for name in ("ttft", "itl")
        )
        shown = "-" if load == "base" else ratio
        row = f"| {load} | {rate:.0f} | {shown} | {first:.0f} ms | {gap:.0f} ms |"
        assert row in document, row

"""What docs/benchmarks.md says of the host's time is what the tool makes of the records."""

from pathlib import Path

import doc_tables
import host_times

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_holds_the_table_of_the_records(tmp_path: Path) -> None:
    records = doc_tables.read(DOCS / "benchmarks" / "host-h200.jsonl")
    document = DOCS / "benchmarks.md"
    copy = tmp_path / "benchmarks.md"
    copy.write_text(document.read_text())
    doc_tables.put(copy, host_times.BEGIN, host_times.table(records), host_times.END)
    assert copy.read_text() == document.read_text(), "run tools/host_times.py --table"
    steps = [record for record in records if record["kind"] == "steps"]
    assert len(steps) == 4
    for step in steps:
        assert f"| {step['host_ms']:.2f} | {step['step_ms']:.2f} |" in copy.read_text()

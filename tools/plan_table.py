"""Write the table of docs/plan.md, what an H200 allocated beside what was planned.

    MLORA_TEST_OUTPUT=FOLDER pytest -m gpu tests/e2e/test_plan_gpu.py
    python tools/plan_table.py [FOLDER/plan.jsonl --commit HASH]

With a file, its results first take the place of the recorded ones of the same settings in
docs/benchmarks/plan-h200.jsonl.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from doc_tables import BASES, Record, put, read

from multilora_cli.units import format_size

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "plan.md"
RECORDS = ROOT / "docs" / "benchmarks" / "plan-h200.jsonl"
BEGIN, END = "<!-- planned and allocated: begin -->", "<!-- planned and allocated: end -->"
PARTS = ("weights", "pool", "workspace", "tables", "graphs", "lists", "context")
TITLES = {"context": "CUDA context"}
COMMAND = "pytest -m gpu tests/e2e/test_plan_gpu.py"


def main(arguments: Sequence[str] | None = None) -> None:
    """Take in new results, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--commit", default="unknown")
    asked = parser.parse_args(arguments)
    records = read(RECORDS)
    if asked.results is not None:
        records = taken_in(records, read(asked.results), asked.commit)
        RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records))
    put(DOCUMENT, BEGIN, table([record for record in records if "planned" in record]), END)


def taken_in(records: Sequence[Record], lines: Sequence[Record], commit: str) -> list[Record]:
    """`records` with the results among the probe's `lines` in place of those they repeat."""
    updated = [dict(record) for record in records]
    captured: Record = {}
    for line in lines:
        if line["kind"] == "captured" and line["after"] == "start":
            captured = {name: line[name] for name in ("steps", "pool", "driver", "fixed")}
        if line["kind"] == "result":
            run = next(
                run
                for run in updated
                if run["command"] == COMMAND and run["quantization"] == line["storage"]
            )
            run |= {"planned": line["planned"], "allocated": line["allocated"], "graphs": captured}
            run |= {"peak": line["kept"], "commit": commit, "date": str(date.today())}
    return updated


def table(runs: Sequence[Record]) -> str:
    """A column a run: bytes allocated, and how many more than planned."""
    titles = [
        f"{BASES[run['quantization']]}, {run['device_bytes'] / 2**30:.0f} GiB,"
        f" {run['max_num_seqs']} sequences" for run in runs
    ]  # fmt: skip
    lines = [f"| part | {' | '.join(titles)} |", "|---" * (len(runs) + 1) + "|"]
    for part in PARTS:
        cells = " | ".join(_cell(run, part) for run in runs)
        lines.append(f"| {TITLES.get(part, part)} | {cells} |")
    margins = [
        f"{format_size(run['allocated']['margin'])} of {format_size(run['planned']['margin'])}"
        for run in runs
    ]
    peaks = [f"{r['peak'] / 2**30:.2f} of {r['device_bytes'] / 2**30:.0f} GiB" for r in runs]
    lines.append(f"| margin, at most | {' | '.join(margins)} |")
    lines.append(f"| torch's memory at its peak | {' | '.join(peaks)} |")
    commits = ", ".join(sorted({run["commit"] for run in runs}))
    gpus = ", ".join(sorted({run["gpu"] for run in runs}))
    return "\n".join([*lines, "", f"{gpus}, commit {commits}, `{COMMAND}`."])


def _cell(run: Record, part: str) -> str:
    planned, allocated = run["planned"][part], run["allocated"][part]
    return f"{format_size(allocated)}, {(allocated - planned) / planned * 100:+.1f} %"


if __name__ == "__main__":
    main()

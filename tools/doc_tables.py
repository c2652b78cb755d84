"""Recorded JSON lines, and tables made of them that lie between two markers of a document."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BASES = {"none": "BF16", "fp8": "FP8", "awq": "AWQ INT4"}  # how tables call what records say


Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def engine_cells(records: Iterable[Record], base: str = "none") -> dict[tuple[str, int], Record]:
    """What `mlora bench --offline` measured on a base, by setting and batch."""
    return {
        (record["setting"], record["batch"]): record
        for record in records
        if record["kind"] == "cell" and record["quantization"] == base
    }


def put(document: Path, begin: str, body: str, end: str) -> None:
    """Write `body` in place of what lies between the markers `begin` and `end`, lines both."""
    before, rest = document.read_text().split(begin)
    document.write_text(f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}")

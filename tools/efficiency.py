"""Makes multilora_cli/sizing/efficiency.json from the engine's benchmark records.

    python tools/efficiency.py docs/benchmarks/engine-*.jsonl

Every cell of `mlora bench --offline` that has a bound becomes a line; of cells measured more than
once the last counts.
"""

import json
import sys
from pathlib import Path
from typing import Any

from multilora_cli.bench.offline_report import SCHEMA
from multilora_cli.errors import BadInput
from multilora_cli.sizing.hardware import match_gpu

OUTPUT = Path(__file__).parents[1] / "multilora_cli" / "sizing" / "efficiency.json"
_SETTINGS = {"base": False, "distinct": True}  # no adapter, and one of its own for every row


def cells(lines: list[str]) -> list[dict[str, Any]]:
    """The measured shares, by card, storage, adapters and batch."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        record = json.loads(line)
        if record.get("schema") != SCHEMA or record.get("bound_ms") is None:
            continue
        if record["setting"] not in _SETTINGS or not record.get("gpu"):
            continue
        try:
            card = match_gpu(record["gpu"], 0)
        except BadInput:
            continue
        cell = {
            "card": card.name,
            "sm": card.sm,
            "storage": record["quantization"],
            "batch": record["batch"],
            "adapters": _SETTINGS[record["setting"]],
            "bound_ms": record["bound_ms"],
            "share": round(record["bound_ms"] / record["step_ms"], 4),
            "commit": str(record["commit"]),
        }
        found[tuple(cell[key] for key in ("card", "storage", "adapters", "batch"))] = cell
    return [found[key] for key in sorted(found)]


def main(paths: list[str]) -> None:
    """Write the file from the records in `paths`."""
    if not paths:
        sys.exit("name the records: python tools/efficiency.py docs/benchmarks/engine-*.jsonl")
    lines = [line for path in paths for line in Path(path).read_text("utf-8").splitlines()]
    rows = ",\n  ".join(json.dumps(cell) for cell in cells([line for line in lines if line]))
    OUTPUT.write_text('{"cells": [' + (f"\n  {rows}\n" if rows else "") + "]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

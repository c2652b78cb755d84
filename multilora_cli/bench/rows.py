"""One load that ended as one JSON line, `mlora.bench.row/1`: what tables in docs are made of."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from multilora_cli.bench.campaign import Pass
from multilora_cli.bench.report import bound_of
from multilora_cli.errors import BadInput

SCHEMA = "mlora.bench.row/1"
_DIGITS = 5
# What a table needs; groups by adapter, curves and timelines are in the report.
_MEASURES = (
    "requests", "completed", "cut", "errors", "duration_s", "offered_rate", "requests_per_s",
    "input_tokens_per_s", "output_tokens_per_s", "strip_tokens_per_s", "ttft", "itl", "e2e",
    "slo_attainment", "satisfaction", "input_length", "output_length", "adapters", "hit_ratio",
    "loads",
)  # fmt: skip
_FACTS = ("command", "commit", "preset", "seed", "settings")


def row(done: Pass, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one pass; `facts` are those of its report."""
    server = next(s for s in facts["servers"] if s["label"] == done.side)
    machine = facts["machine"]
    found = asdict(done.measures)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        **{key: facts[key] for key in _FACTS},
        "gpu": machine["gpus"][0] if machine["gpus"] else None,
        "versions": machine["versions"],
        "side": done.side,
        "base": server["base"],
        "listed": server["adapters"],
        "load": done.arm,
        "round": done.round,
        "mean_output": done.mean_output,
        "bound": rounded(bound_of([done])),
        **{key: rounded(found[key]) for key in _MEASURES},
    }


def append(path: Path, record: Mapping[str, Any], flag: str) -> None:
    """One more line, on disk before what follows starts: a time limit loses only that. BadInput."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise BadInput(f"{flag} {path}: {error.strerror or error}") from None


def rounded(value: Any) -> Any:
    """Floats to five digits, inside of anything."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value

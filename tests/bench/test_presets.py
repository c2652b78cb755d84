"""The presets with published lengths, and a recorded load, on a real server of a tiny shape."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.sizing.trace import read_trace
from tests.e2e.serving import Served, start


def mlora(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy")
    mlora("bench", "dummy", str(folder), "--model", "tiny", "--setting", "mixed",
          "--adapters", "6")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    record = str(folder / "load.jsonl")
    served = start(folder / "fleet.yaml", "--port", "0", "--record", record, log=folder / "log")
    try:
        yield served
    finally:
        served.stop()


def measured(served: Served, *arguments: str) -> dict[str, Any]:
    value = mlora("bench", "--url", served.url, *arguments)
    arms = {arm["label"]: arm["measures"] for arm in value["arms"]}
    for label, found in arms.items():
        assert found["errors"] == {} and found["completed"] == found["requests"] > 0, label
    return arms


def test_punica_asks_its_lengths_of_every_popularity(served: Served) -> None:
    arms = measured(served, "--preset", "punica", "--requests", "1")
    assert list(arms) == ["base", "identical", "skewed", "uniform", "distinct"]
    for found in arms.values():
        assert (found["input_length"]["mean"], found["output_length"]["mean"]) == (24, 45)


def test_s_lora_has_a_row_for_every_number_of_adapters(served: Served) -> None:
    arms = measured(served, "--preset", "s-lora-table3", "--requests", "2", "--rate", "inf")
    assert list(arms) == ["n=0", "n=1", "n=5", "n=6"]
    five = arms["n=5"]  # the published trace: (1, 388, 268) and (4, 467, 357)
    assert (five["input_length"]["total"], five["output_length"]["total"]) == (855, 625)
    assert [group["name"] for group in five["per_adapter"]] == ["mixed-1", "mixed-4"]


def test_rank_mix_measures_each_rank(served: Served) -> None:
    arms = measured(served, "--preset", "rank-mix", "--requests", "8", "--lengths", "8:6",
                    "--rounds", "1")  # fmt: skip
    assert list(arms) == ["base", "rank 8 alone", "rank 64 alone", "all ranks"]
    groups = {group["name"]: group["requests"] for group in arms["all ranks"]["per_rank"]}
    assert groups == {"8": 2, "16": 2, "32": 2, "64": 2}


def test_what_was_recorded_is_replayed_and_planned(served: Served, folder: Path) -> None:
    """Two requests to one adapter and one to the base, then the same again from the file."""
    record = folder / "load.jsonl"
    already = len(read_trace(record)) if record.exists() and record.stat().st_size else 0
    measured(served, "--preset", "smoke", "--requests", "4", "--lengths", "8:5")
    calls = read_trace(record)[already:]
    loads = [call for call in calls if call.output_tokens == 5]
    assert len(loads) == 8 and {call.input_tokens for call in loads} == {8}
    trace = folder / "trace.jsonl"
    lines = record.read_text().splitlines()[already:]
    trace.write_text("\n".join(line for line in lines if '"output": 5' in line) + "\n")
    arms = measured(served, "--trace", str(trace))
    assert arms["trace"]["requests"] == 8 and arms["trace"]["output_length"]["total"] == 40
    asked = {group["name"]: group["requests"] for group in arms["trace"]["per_adapter"]}
    names = [call.adapter or "(base)" for call in loads]
    assert asked == {name: names.count(name) for name in names}
    value = mlora("plan", str(folder / "fleet.yaml"), "--gpu", "h200", "--trace", str(trace))
    assert value["trace"]["requests"] == 8

"""Planned against allocated, part by part: BF16, FP8 and AWQ bases, adapters of mixed ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORAGES = ("none", "fp8", "awq")
GIB = 2**30


def probe(**asked: Any) -> dict[str, Any]:
    """What tests/e2e/plan_probe.py prints, and into $MLORA_TEST_OUTPUT/plan.jsonl if it is set."""
    command = [sys.executable, "-m", "tests.e2e.plan_probe", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    line = done.stdout.splitlines()[-1]
    if out := os.environ.get("MLORA_TEST_OUTPUT"):
        with (Path(out) / "plan.jsonl").open("a") as file:
            file.write(line + "\n")
    found: dict[str, Any] = json.loads(line)
    return found


def report(found: dict[str, Any]) -> str:
    """Planned and allocated of every part, for a failure's text."""
    parts = {**found["planned"], **found["allocated"]}
    rows = [
        f"{part}: planned {found['planned'].get(part, 0):,}, allocated"
        f" {found['allocated'].get(part, 0):,}"
        for part in parts
    ]
    return "\n".join([*rows, f"metered: {found['metered']}"])


@pytest.mark.parametrize("storage", STORAGES)
def test_on_a_cpu(storage: str) -> None:
    """A-PERF-04: what every part took is what was planned, to the byte."""
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1,
              "pool_bytes": 4 * 2**20, "max_model_len": 256}  # fmt: skip
    found = probe(storage=storage, model="tiny", device="cpu", adapters=4, host_bytes=2**28,
                  config=config)  # fmt: skip
    assert found["deviations"] == {}, report(found)
    for part in ("weights", "pool", "tables"):
        assert found["allocated"][part] == found["planned"][part]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_an_8b_on_the_card(storage: str) -> None:
    """Within 2 % by part at the limits of the default fleet file; the rest is what the driver
    takes for the process, and lies in what memory.device_fraction leaves."""
    found = probe(
        storage=storage, model="llama-3-8b", device="cuda:0", config={"device_bytes": 40 * GIB}
    )
    print(report(found))
    assert found["reserved_at_the_end"] <= found["limit"], report(found)
    at_start = found["metered"]["everything at start"] / found["planned_at_start"]
    assert at_start == pytest.approx(1, abs=0.02), report(found)
    assert found["deviations"] == {}, report(found)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES[1:])
def test_the_plan_of_an_rtx_4090_run_for_real(storage: str) -> None:
    """22 GiB, 64 sequences: all that the engine takes of a card of 24 GB with a 4-bit or FP8 8B."""
    limits = {"device_bytes": 22 * GIB, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    found = probe(storage=storage, model="llama-3-8b", device="cuda:0", config=limits)
    print(report(found))
    assert found["reserved_at_the_end"] <= found["limit"], report(found)
    context = found["metered"]["context at the end"]
    assert found["reserved_at_the_end"] + context <= 24564 * 2**20, report(found)

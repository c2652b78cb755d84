"""Planned against allocated, part by part: BF16, FP8 and AWQ bases, adapters of mixed ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORAGES = ("none", "awq", "fp8")
GIB = 2**30
LIMIT_S = 80  # of one start: kernels that nobody compiled yet take half of it


def probe(tmp_path: Path, **asked: Any) -> dict[str, Any]:
    """The result of tests/e2e/plan_probe.py. Every line that it printed stays, whatever becomes of
    it: in $MLORA_TEST_OUTPUT/plan.jsonl, if that is set."""
    command = [sys.executable, "-m", "tests.e2e.plan_probe", json.dumps(asked)]
    root = Path(__file__).parents[2]
    lines = Path(os.environ.get("MLORA_TEST_OUTPUT", tmp_path)) / "plan.jsonl"
    errors = lines.with_suffix(".err")
    with lines.open("a") as out, errors.open("a") as err:
        done = subprocess.run(command, stdout=out, stderr=err, cwd=root, timeout=LIMIT_S)
    assert done.returncode == 0, errors.read_text()[-4000:]
    found: dict[str, Any] = json.loads(lines.read_text().splitlines()[-1])
    return found


def report(found: dict[str, Any]) -> str:
    """Planned and allocated of every part, for a failure's text."""
    parts = {**found["planned"], **found["allocated"]}
    rows = [
        f"{part}: planned {found['planned'].get(part, 0):,}, allocated"
        f" {found['allocated'].get(part, 0):,}"
        for part in parts
    ]
    return "\n".join([*rows, f"kept: {found['kept']:,}", f"books: {found['books']}"])


def check(found: dict[str, Any]) -> None:
    """Every part within 2 %, and all of it within the limit."""
    assert found["deviations"] == {}, report(found)
    graphs = found["books"]["outside"] - found["allocated"]["context"]
    assert found["kept"] + graphs <= found["limit"], report(found)


@pytest.mark.parametrize("storage", STORAGES)
def test_on_a_cpu(storage: str, tmp_path: Path) -> None:
    """A-PERF-04: what every part took is what was planned, to the byte."""
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1,
              "pool_bytes": 4 * 2**20, "max_model_len": 256}  # fmt: skip
    found = probe(tmp_path, storage=storage, model="tiny", device="cpu", host_bytes=2**28,
                  config=config)  # fmt: skip
    assert found["deviations"] == {}, report(found)
    for part in ("weights", "pool", "tables"):
        assert found["allocated"][part] == found["planned"][part]


@pytest.mark.gpu
def test_an_8b_in_16_bits(tmp_path: Path) -> None:
    """The limits of the default fleet file, and steps with prompts captured too."""
    config = {"device_bytes": 40 * GIB, "capture_prompts": True}
    found = probe(tmp_path, storage="none", model="llama-3-8b", device="cuda:0", config=config)
    check(found)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES[1:])
def test_the_plan_of_an_rtx_4090_run_for_real(storage: str, tmp_path: Path) -> None:
    """22 GiB, 64 sequences: all that the engine takes of a card of 24 GB with a 4-bit or FP8 8B."""
    limits = {"device_bytes": 22 * GIB, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    found = probe(tmp_path, storage=storage, model="llama-3-8b", device="cuda:0", config=limits)
    check(found)
    assert found["kept"] + found["books"]["outside"] <= 24564 * 2**20, report(found)

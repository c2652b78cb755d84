"""tools/lora_step.py without a device: every cell and choice runs, and gives the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import lora_step
import pytest


def test_every_cell_is_a_record(tmp_path: Path) -> None:
    output = tmp_path / "step.jsonl"
    command = [
        *(
            sys.executable,
            lora_step.__file__,
            "--model",
            "tiny",
            "--device",
            "cpu",
            "--rounds",
            "1",
        ),
        *("--batch", "1,3", "--settings", "one,mixed", "--output", output, "--commit", "abc"),
        *("--try", "low:side_priority=0", "--try", "wide:rows_n=256,dot_k=128@3"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(c["setting"], c["rows"]) for c in cells] == [
        ("one", 1), ("one", 3), ("mixed", 1), ("mixed", 3),
    ]  # fmt: skip
    for cell in cells:
        wide = ["wide"] if cell["rows"] == 3 else []
        assert list(cell["ms"]) == ["base", "one stream", "own", "low", *wide]
        assert all(cell["same_bits"].values()) and all(ms > 0 for ms in cell["ms"].values())
        assert cell["commit"] == "abc" and "--batch 1,3" in cell["command"]


@pytest.mark.parametrize("text", ["own:no_such_field=1", "own:rows_n=wide", "own:rows_n"])
def test_a_choice_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        lora_step.parse_variant(text)

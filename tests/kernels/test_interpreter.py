"""Runs every kernel test marked `interpreter` under Triton's interpreter, a process per file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(
    path.name
    for path in HERE.glob("test_*.py")
    if path.name != "test_interpreter.py" and "mark.interpreter" in path.read_text()
)


@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels(name: str) -> None:
    """The kernels of one test file, run on CPU tensors by Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "interpreter and not slow"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(HERE / name)],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

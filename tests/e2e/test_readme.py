"""The README's tour, run as it stands against the demo fleet it starts."""

import re
import subprocess
import sys
from pathlib import Path

import httpx

from tests.e2e.serving import start

REPOSITORY = Path(__file__).parents[2]


def test_the_tour_prints_what_it_says(tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (tour,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    fleet = REPOSITORY / "fleet.example.yaml"
    served = start(
        fleet,
        "--port",
        "0",
        "--set",
        "memory.device=cpu",
        "--set",
        "server.state_file=off",
        log=tmp_path / "log",
    )
    try:
        assert "http://127.0.0.1:8000" in tour
        script = tour.replace("http://127.0.0.1:8000", served.url)
        ran = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
        )
        assert ran.stdout == expected, ran.stderr
        docs = httpx.get(f"{served.url}/docs", timeout=30).text
        assert "/v1/chat/completions" in docs
        assert not re.search(r'(?:src|href)="https?://', docs)  # it must show offline
    finally:
        assert served.stop() == 0

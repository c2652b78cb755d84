"""A real `mlora serve` in processes of its own, and what tests ask of it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_S = 120  # a hang, not a speed, is what this catches


@dataclass
class Served:
    """One server under test."""

    process: subprocess.Popen[bytes]
    url: str
    fleet: Path
    ready: dict[str, object]
    log: Path
    signatures: dict[str, int] = field(default_factory=dict)

    @property
    def engine_pid(self) -> int:
        """The engine: the one child of the front."""
        (pid,) = children(self.process.pid)
        return pid

    def metrics(self) -> str:
        """The text of /metrics."""
        return httpx.get(f"{self.url}/metrics", timeout=30).text

    def adapters(self) -> dict[str, dict[str, object]]:
        """The rows of the adapter listing by name."""
        rows = httpx.get(f"{self.url}/v1/lora_adapters", timeout=30).json()["data"]
        return {row["id"]: row for row in rows}

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until /readyz says so."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s: {self.log.read_text()}")

    def stop(self, how: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """End it and give its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Make sure it is gone, and give its pipe back."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def children(pid: int) -> list[int]:
    """Process ids of the direct children of `pid`."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def start(fleet: Path, *arguments: str, log: Path) -> Served:
    """Run `mlora serve` and read what it says when it is ready."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "multilora_cli", "serve", str(fleet), "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    assert process.stdout is not None
    text = b""
    while line := process.stdout.readline():
        text += line
        if line == b"}\n":
            ready = json.loads(text)
            return Served(process, ready["url"], fleet, ready, log)
    process.wait(10)
    process.stdout.close()
    raise AssertionError(f"did not start ({process.returncode}): {log.read_text()}")


# Ranks below, at and above a tile of 16, and several tiles: what a lost tile would change.
RANKS = {"r4": 4, "r8": 8, "r12": 12, "r16": 16, "r24": 24, "r32": 32, "r64": 64}

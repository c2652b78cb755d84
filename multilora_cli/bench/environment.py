"""Where and with what a report was made: what is needed to run it again."""

import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from multilora_cli.bench.target import public_url
from multilora_cli.sizing.hardware import local_cards

_PACKAGES = (
    "multilora-cli", "torch", "triton", "numpy", "aiohttp", "msgspec", "uvicorn",
)  # fmt: skip
_SECRET_FLAGS = ("--api-key", "--against-api-key")
_FILING_FLAGS = ("--output", "--rows", "--report", "--commit")  # a path of one machine, or beside


def environment() -> dict[str, Any]:
    """Machine, cards and versions, as plain values."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpus": gpu_names(),
        "python": platform.python_version(),
        "versions": versions(_PACKAGES),
    }


def gpu_names() -> list[str]:
    """The cards NVML sees; none where there is no driver."""
    return [name for name, _ in local_cards()]


def commit() -> str | None:
    """The commit of this checkout, `-dirty` where files differ; None for an installed package."""
    folder = Path(__file__).parent
    tracked = _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
    head = _git(folder, "rev-parse", "HEAD") if tracked is not None else None
    if head is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head + ("-dirty" if changed else "")


def command_line(arguments: Sequence[str]) -> str:
    """The command as it can be typed again, without keys, passwords in URLs and where its record
    went."""
    words = ["mlora"]
    hide = skip = False
    for word in arguments:
        flag, equals, _ = word.partition("=")
        if skip:
            skip = False
            continue
        if hide:
            word, hide = "...", False
        elif flag in _FILING_FLAGS:
            skip = not equals
            continue
        elif flag in _SECRET_FLAGS:
            hide = not equals
            word = f"{flag}=..." if equals else word
        elif "://" in word:
            head, colon, url = word.rpartition("=") if word.startswith("--") else ("", "", word)
            word = head + colon + public_url(url)
        words.append(word)
    return shlex.join(words)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

"""Prints the oldest libraries of command line and server that pyproject.toml allows, for pip.

    pip install --target .oldest $(python tools/oldest_versions.py)
    PYTHONPATH=.oldest pytest -W default tests/cli/test_app.py tests/server

Those that transformers, of the tests, wants newer are left out, and torch with what it brings.
"""

import re
import tomllib
from pathlib import Path

_LEFT_OUT = {
    "torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface-hub", "nvidia-ml-py",
}  # fmt: skip


def oldest(dependencies: list[str]) -> list[str]:
    """`name==version` of every lower bound."""
    found = []
    for line in dependencies:
        match = re.match(r"([a-z0-9-]+)>=([0-9.]+)", line)
        if match is None:
            raise SystemExit(f"pyproject.toml: {line}: expected a lower bound")
        name, version = match.groups()
        if name not in _LEFT_OUT:
            found.append(f"{name}=={version}" + ".0" * (2 - version.count(".")))
    return found


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    print(*oldest(tomllib.loads(text)["project"]["dependencies"]))

"""Checks a built wheel: its two top-level names, its size, and that `mlora --help` runs from it."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TOP_LEVEL = {"multilora_cli", "multilora_kernels"}
DEMO_BYTES = 12 * 10**6  # what the demo fleet may add to the wheel


def main(wheel: Path) -> None:
    """Exit with a message where the wheel is not as it should be."""
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
    names = {info.filename.split("/")[0] for info in infos}
    found = {name for name in names if not name.endswith(".dist-info")}
    if found != TOP_LEVEL:
        sys.exit(f"{wheel.name}: top-level names {sorted(found)}, expected {sorted(TOP_LEVEL)}")
    demo = sum(i.compress_size for i in infos if i.filename.startswith("multilora_cli/demo/"))
    if not 0 < demo <= DEMO_BYTES:
        sys.exit(f"{wheel.name}: the demo fleet takes {demo} bytes, expected 1 to {DEMO_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel],
            check=True,
        )
        code = "from multilora_cli.cli.app import main; main()"
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-c", code, "--version"]
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
    sys.stdout.write(f"{wheel.name}: demo {demo} bytes, {result.stdout}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Time the kernels of this package on the GPU here: `python -m multilora_kernels.bench`.

Writes a table to standard output and JSON lines (commit, GPU, versions, figures) to --output.
With --tune, every case's launch choices are tried and the best stored in tuned/<chip>.json.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from multilora_kernels import launch
from multilora_kernels.bench.selection import Selection
from multilora_kernels.bench.timing import Built, Case, record_of, time_us
from multilora_kernels.bench.tuning import Search, compile_all

TUNED = Path(launch.__file__).parent / "tuned"
STAND_INS = {"rtx-4090": launch.RTX_4090, "h200": launch.H200}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m multilora_kernels.bench", description=__doc__)
    parser.add_argument("--op", action="append", help="only ops whose name contains this")
    parser.add_argument("--shape", help="only shapes whose label contains this, as 'B=64 S=1024'")
    parser.add_argument("--variant", action="append", help="only these variants, as 'ours'")
    parser.add_argument("--tune", action="store_true", help="search launch choices and store them")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="compile in so many processes first (LoRA, decode attention)",
    )
    parser.add_argument("--tuned", type=Path, default=TUNED, help="folder of the tuned tables")
    parser.add_argument("--chip", choices=sorted(STAND_INS), help="choose launches for this card")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--samples", type=int, default=5, help="samples per figure")
    return parser.parse_args()


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _environment(commit: str | None, chip: launch.Chip) -> dict[str, Any]:
    return {
        "commit": commit or _commit(),
        "gpu": torch.cuda.get_device_name(),
        "launch_choices_for": chip.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "multilora_kernels.bench", *sys.argv[1:]]),
    }


def _time_case(case: Case, built: Built, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chip = launch.chip_of(torch.cuda.current_device())
    for variant, run in built.variants.items():
        if arguments.variant and variant not in arguments.variant:
            continue
        figures = time_us(run, built.num_sets, samples=arguments.samples)
        record = record_of(case, chip, variant, figures)
        share = record["share_of_bound"]
        _say(
            f"{case.op:24} {case.label:44} {variant:28} {record['us']:10.2f} us"
            f" {record['gbps']:8.0f} GB/s {record['tflops']:7.1f} TFLOP/s"
            + ("" if share is None else f" {share:6.2f} of bound")
        )
        yield record


def main() -> None:
    """Run the cases that the command line selects."""
    arguments = _arguments()
    if arguments.chip:
        launch.force_chip(STAND_INS[arguments.chip])
    device = torch.device("cuda", torch.cuda.current_device())
    chip = launch.chip_of(torch.cuda.current_device())
    environment = _environment(arguments.commit, chip)
    selection = Selection(tuple(arguments.op or ()), arguments.shape)
    search = Search(arguments.tuned, _say)
    if arguments.jobs > 1:
        stand_in = chip if arguments.chip else None
        compile_all(selection, stand_in, arguments.jobs, tune=arguments.tune)
    for case in selection.cases():
        if not case.choices if arguments.tune else case.only_tunes:
            continue
        built = case.build(device)
        records = search.run(case, built) if arguments.tune else _time_case(case, built, arguments)
        for record in records:
            if arguments.output is not None:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                with arguments.output.open("a") as lines:
                    lines.write(json.dumps({**record, **environment}) + "\n")
        del built
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

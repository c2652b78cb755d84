"""Time the kernels of this package on the GPU here: `python -m multilora_kernels.bench`.

Writes a table to standard output and JSON lines (commit, GPU, versions, figures) to --output.
With --tune, every case's launch choices are tried and the best stored in tuned/<chip>.json.
"""

import argparse
import importlib
import importlib.util
import json
import math
import multiprocessing
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from multilora_kernels import launch
from multilora_kernels.bench.timing import Built, Case, record_of, time_us

# What a launch choice that does not fit the chip raises: it is no candidate.
_TOO_LARGE = (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError)
MODULES = ("attention", "lora", "gemm", "elementwise")
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
        "--jobs", type=int, default=1, help="with --tune: compile in so many processes first"
    )
    parser.add_argument("--tuned", type=Path, default=TUNED, help="folder of the tuned tables")
    parser.add_argument("--chip", choices=sorted(STAND_INS), help="choose launches for this card")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--samples", type=int, default=5, help="samples per figure")
    return parser.parse_args()


def _cases(wanted: argparse.Namespace) -> Iterator[Case]:
    for name in MODULES:
        module = f"multilora_kernels.bench.{name}"
        if importlib.util.find_spec(module) is None:
            continue
        for case in importlib.import_module(module).cases():
            if wanted.op and not any(part in case.op for part in wanted.op):
                continue
            if wanted.shape is None or wanted.shape in case.label:
                yield case


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


def _time_choices(case: Case, built: Built) -> dict[str, float]:
    """Microseconds of every launch choice (as JSON) that compiles and fits this chip."""
    timed: dict[str, float] = {}
    if built.with_choice is None:
        return timed
    for choice in case.choices:
        try:
            figures = time_us(built.with_choice(choice), built.num_sets, 3, sample_us=500.0)
        except _TOO_LARGE:
            continue
        timed[json.dumps(choice)] = sorted(figures)[1]
    for us, choice_text in sorted((us, text) for text, us in timed.items())[:3]:
        _say(f"{case.op:24} {case.label:44} {us:10.2f} us {choice_text}")
    return timed


def _compile_part(arguments: argparse.Namespace, part: int) -> None:
    """Launch every `--jobs`-th choice of the selected cases once: Triton caches on disk."""
    if arguments.chip:
        launch.force_chip(STAND_INS[arguments.chip])
    device = torch.device("cuda", torch.cuda.current_device())
    work = [
        (case, choice)
        for case in _cases(arguments)
        if case.compile is not None
        for choice in case.choices
    ]
    for case, choice in work[part :: arguments.jobs]:
        assert case.compile is not None
        with suppress(*_TOO_LARGE):
            case.compile(device, choice)


def _compile_all(arguments: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for done in [pool.submit(_compile_part, arguments, i) for i in range(arguments.jobs)]:
            done.result()


def best_choice(timed: list[dict[str, float]]) -> dict[str, Any] | None:
    """The choice with the least geometric mean over the cases that share a key."""
    shared = set.intersection(*(set(case) for case in timed))
    if not shared:
        return None
    best = min(sorted(shared), key=lambda choice: sum(math.log(case[choice]) for case in timed))
    choice: dict[str, Any] = json.loads(best)
    return choice


def merge_tuned(folder: Path, chip: launch.Chip, found: dict[str, dict[str, Any]]) -> None:
    """Write `found` (op -> key -> choice) into the chip's table; other entries stay."""
    path = folder / f"{chip.key}.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    for op, entries in found.items():
        table[op] = dict(sorted({**table.get(op, {}), **entries}.items()))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    launch.tuned_table.cache_clear()  # later cases build on what was just found


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
    timed: dict[tuple[str, str], list[dict[str, float]]] = {}
    if arguments.tune and arguments.jobs > 1:
        _compile_all(arguments)
    for case in _cases(arguments):
        if arguments.tune and not case.choices:
            continue
        built = case.build(device)
        if arguments.tune:
            key = (case.op, case.tune_key)
            timed.setdefault(key, []).append(_time_choices(case, built))
            best = best_choice(timed[key])
            if best is not None:
                merge_tuned(arguments.tuned, chip, {case.op: {case.tune_key: best}})
        else:
            for record in _time_case(case, built, arguments):
                if arguments.output is not None:
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    with arguments.output.open("a") as lines:
                        lines.write(json.dumps({**record, **environment}) + "\n")
        del built
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""The search of launch choices behind --tune: compiled side by side, timed, the best one stored.

A module of its own, importable by the processes that compile: `__main__` of a package is not.
"""

import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from multilora_kernels import launch
from multilora_kernels.bench.selection import Selection
from multilora_kernels.bench.timing import Built, Case, time_us

# What a launch choice that does not fit the chip raises: it is no candidate.
TOO_LARGE = (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError)
# Microseconds by choice (as JSON), of every case of one op and tune key.
Timed = dict[tuple[str, str], list[dict[str, float]]]


class Search:
    """The choices of many cases; each key's entry in the chip's table is the best one so far."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Entries go to `folder`/<chip>.json; `say` gets a line for the best choices of a case."""
        self._folder = folder
        self._say = say
        self._timed: Timed = {}

    def run(self, case: Case, built: Built) -> Iterator[dict[str, Any]]:
        """Time the case's choices and store the best of its key; yields a record for each."""
        figures = self._time(case, built)
        key = (case.op, case.tune_key)
        self._timed.setdefault(key, []).append(figures)
        best = best_choice(self._timed[key])
        if best is not None:
            chip = launch.chip_of(torch.cuda.current_device())
            merge_tuned(self._folder, chip, {case.op: {case.tune_key: best}})
        for choice, us in figures.items():
            found = {"op": case.op, "shape": dict(case.shape), "us": round(us, 3)}
            yield {**found, "choice": json.loads(choice)}

    def _time(self, case: Case, built: Built) -> dict[str, float]:
        """Microseconds of every choice that compiles and fits this chip."""
        timed: dict[str, float] = {}
        assert built.with_choice is not None, case.label
        for choice in case.choices:
            with suppress(*TOO_LARGE):
                figures = time_us(built.with_choice(choice), built.num_sets, 3, sample_us=500.0)
                timed[json.dumps(choice)] = sorted(figures)[1]
        if not timed:
            self._say(f"{case.op:24} {case.label:44} no choice fits")
        for us, text in sorted((us, text) for text, us in timed.items())[:3]:
            self._say(f"{case.op:24} {case.label:44} {us:10.2f} us {text}")
        return timed


def best_choice(timed: Sequence[dict[str, float]]) -> dict[str, Any] | None:
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


def compile_all(
    selection: Selection, chip: launch.Chip | None, jobs: int, *, tune: bool = False
) -> None:
    """Launch the selected cases once, in `jobs` processes, for `chip` if given: their own choice,
    or for a search every one of theirs.

    Triton keeps the binaries on disk, so the search itself compiles nothing.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        share = partial(_compile_part, selection, chip, jobs, tune)
        parts = [pool.submit(share, part) for part in range(jobs)]
        for done in parts:
            done.result()


def _compile_part(
    selection: Selection, chip: launch.Chip | None, parts: int, tune: bool, part: int
) -> None:
    launch.force_chip(chip)
    device = torch.device("cuda", torch.cuda.current_device())
    # Cases with one key have the same kernels.
    work = {
        (case.op, case.tune_key, json.dumps(choice)): (case.compile, choice)
        for case in selection.cases()
        if case.compile is not None
        for choice in (case.choices if tune else ({},))
    }
    for compile_choice, choice in list(work.values())[part::parts]:
        with suppress(*TOO_LARGE):
            compile_choice(device, choice)

"""What adapters cost inside a captured decode step, under several launch choices.

    python tools/lora_step.py --try low:side_priority=0 --try "rows128:rows_n=128@256" --output FILE

Every cell (a setting and a number of rows) is captured without adapters ("base"), with all work
on one stream ("one stream"), as the engine captures it ("own"), and once for each --try whose rows
fit; the graphs are replayed in turns. Settings: "one", a rank-16 adapter on all seven projections
shared by all rows; "distinct", 64 of them; "mixed", 64 on the attention with ranks 8 to 64.
Weights and adapters are random, the context is 192 tokens a row. A JSON line per cell: medians in
milliseconds, and whether the logits have the bits of "one stream"; tools/lora_table.py makes
kernels/README.md's table of them.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import triton

from multilora_cli.bench.geometries import config_folder
from multilora_cli.layers.context import StepContext
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.loader import load_decoder
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.pages import ATTENTION
from multilora_kernels.add_lora import add_lora
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.bench.lora import forced
from multilora_kernels.layout import GROUPS, MODULES, page_bytes, plan_image
from multilora_kernels.lora_choice import Choose, LoraChoice, choose
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.table import AdapterTable
from multilora_kernels.testing import make_fleet

SCHEMA = "mlora.bench.lora-step/1"
CONTEXT = 192
ADAPTERS = 64
# Ranks of the adapters in turn, and their modules.
SETTINGS: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "one": ((16,), MODULES),
    "distinct": ((16,), MODULES),
    "mixed": ((8, 16, 32, 64), ATTENTION),
}
RANK = 64  # what launches are sized for, as the engine does unless its limit is 16 or less
# What `Segments.prepare_capture` is told beside the rows.
SIZES = ("rank", "groups")
Run = Callable[[], object]


def load(model: str, device: torch.device) -> Decoder:
    """The shape of `model`, filled with random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = config_folder(model, "none", Path(scratch))
        geometry = read_geometry(folder)
        return load_decoder(folder, geometry, device, torch.bfloat16, load_format="dummy")


@dataclass(frozen=True)
class Variant:
    """A launch choice that differs from the ordinary one in some fields, for some rows or all."""

    name: str
    fields: Mapping[str, Any]
    rows: int | None = None

    @property
    def choose(self) -> Choose:
        """The choice."""
        fields = {name: value for name, value in self.fields.items() if name not in SIZES}
        return forced(fields) if fields else choose

    def sizes(self, setting: str) -> Mapping[str, Any]:
        """What launches are sized for: a rank, and the setting's groups of modules."""
        _, modules = SETTINGS[setting]
        groups = [name for name, own in GROUPS.items() if own[0] in modules]
        named = self.fields.get("groups")
        return {
            "rank": self.fields.get("rank", RANK),
            "groups": groups if named is None else named.split("+"),
        }


OWN = Variant("own", {})


def parse_variant(text: str) -> Variant:
    """NAME:FIELD=VALUE,...[@ROWS] as --try takes it; values as JSON. Raises ValueError.

    Fields of a launch choice, and what sizes launches: "rank", "groups" (a string, "qkv+o").
    """
    name, _, rest = text.partition(":")
    fields, _, rows = rest.partition("@")
    pairs = (pair.split("=", 1) for pair in fields.split(",") if pair)
    found = {field: json.loads(value) for field, value in pairs}
    unknown = set(found) - {field.name for field in dataclass_fields(LoraChoice)} - {*SIZES}
    if unknown:
        raise ValueError(f"no fields of a launch choice: {sorted(unknown)}")
    return Variant(name, found, int(rows) if rows else None)


def compile_for(geometry: ModelGeometry, rows: int, group: str, variant: Variant) -> None:
    """Launch both kernels of a group once, in a process of its own."""
    shapes = geometry.module_shapes
    one = {(0, module): 16 for module in MODULES}
    size = page_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, 2)
    fleet = make_fleet([one], shapes, 1, size, torch.bfloat16, "cuda")
    modules = GROUPS[group]
    x = torch.zeros(rows, shapes[modules[0]][0], device="cuda", dtype=torch.bfloat16)
    y = x.new_zeros(rows, sum(shapes[module][1] for module in modules))
    segments = Segments(rows, "cuda", choose=variant.choose)
    segments.build([1] * rows)
    add_lora(y, x, fleet.pool, fleet.table, segments, 0, group)
    torch.cuda.synchronize()


class Bench:
    """A decoder of random weights, a pool, and the adapters of every setting in it."""

    def __init__(
        self, decoder: Decoder, settings: Sequence[str], most: int, device: torch.device
    ) -> None:
        self.decoder, self.geometry = decoder, decoder.geometry
        self.device = device
        geometry = self.geometry
        size = page_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, 2)
        self.row_pages = CONTEXT // 16 + 1
        pages = 1 + most * self.row_pages
        self.tables: dict[str, AdapterTable] = {}
        for setting in settings:
            count = 1 if setting == "one" else ADAPTERS
            plans = [self._plan(setting, index, size) for index in range(count)]
            blocks = 2 * sum(len(plan.blocks) for plan in plans)
            shapes = geometry.module_shapes
            table = AdapterTable(ADAPTERS + 1, geometry.num_layers, shapes, blocks, device)
            for slot, plan in enumerate(plans, 1):
                table.set(slot, plan, range(pages, pages + plan.num_pages))
                pages += plan.num_pages
            table.flush()
            self.tables[setting] = table
        self.pool = torch.empty(pages, size, dtype=torch.uint8, device=device)
        for start in range(0, pages, 512):
            self.pool[start : start + 512].view(torch.bfloat16).normal_(std=0.02)
        self.side = SideStream(device) if device.type == "cuda" else None

    def _plan(self, setting: str, index: int, size: int) -> Any:
        ranks, modules = SETTINGS[setting]
        rank = ranks[index % len(ranks)]
        wanted = {(layer, m): rank for layer in range(self.geometry.num_layers) for m in modules}
        return plan_image(wanted, self.geometry.module_shapes, size, 2)

    def step(
        self, rows: int, setting: str | None = None, variant: Variant = OWN, *, beside: bool = True
    ) -> Callable[[], torch.Tensor]:
        """A decode step of `rows` rows; it holds all that it reads."""
        device = self.device
        pages = 1 + torch.arange(rows * self.row_pages, device=device, dtype=torch.int32)
        table = pages.view(rows, self.row_pages)
        ids = torch.arange(rows, device=device) % self.geometry.vocab_size
        positions = torch.full((rows,), CONTEXT - 1, dtype=torch.int64, device=device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device=device)
        segments = None if setting is None else self._segments(rows, setting, variant)
        context = StepContext(
            pool=self.pool,
            slot_mapping=table[:, (CONTEXT - 1) // 16].long() * 16 + (CONTEXT - 1) % 16,
            attention=AttentionBatch(starts, lengths, table, rows, 1, CONTEXT),
            table=None if setting is None else self.tables[setting],
            segments=segments,
            side=self.side if beside and setting is not None else None,
        )

        def run() -> torch.Tensor:
            return self.decoder.logits(self.decoder.forward(ids, positions, context))

        return run

    def _segments(self, rows: int, setting: str, variant: Variant) -> Segments:
        segments = Segments(rows, self.device, max_rank=64, choose=variant.choose)
        slots = np.ones(rows, np.int32) if setting == "one" else np.arange(rows) % ADAPTERS + 1
        if self.device.type == "cuda":
            sizes = variant.sizes(setting)
            segments.prepare_capture(self.tables[setting], rows, slots=slots, **sizes)
        else:
            segments.build(slots)
        return segments


def capture(step: Callable[[], torch.Tensor]) -> tuple[Run, torch.Tensor]:
    """The step as a graph, and where it leaves its logits; without a device the step itself."""
    logits = step()
    if logits.device.type != "cuda":
        return step, logits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay(held: object = step) -> None:  # a graph does not hold what it reads
        graph.replay()

    replay()
    torch.cuda.synchronize()
    return replay, logits


def interleaved(runs: Mapping[str, Run], rounds: int, each: int = 4) -> dict[str, float]:
    """Median milliseconds of each, replayed in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    clock = marks_on_device if torch.cuda.is_available() else marks_on_host
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, ms in zip(runs, clock(list(runs.values()), each), strict=True):
            times[name].append(ms / each)
    return {name: round(median(found), 4) for name, found in times.items()}


def marks_on_device(runs: Sequence[Run], each: int) -> list[float]:
    """Milliseconds of `each` runs of every one, by events: nobody waits for the device between."""
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(len(runs) + 1)
    ]
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        for _ in range(each):
            run()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


def marks_on_host(runs: Sequence[Run], each: int) -> list[float]:
    """The same without a device."""
    marks = [time.perf_counter()]
    for run in runs:
        for _ in range(each):
            run()
        marks.append(time.perf_counter())
    return [1e3 * (second - first) for first, second in pairwise(marks)]


@torch.inference_mode()
def measure(
    bench: Bench, setting: str, rows: int, variants: Sequence[Variant], rounds: int, base: Run
) -> dict[str, Any]:
    """One cell."""
    steps = {"one stream": bench.step(rows, setting, beside=False)}
    steps |= {v.name: bench.step(rows, setting, v) for v in variants}
    captured = {name: capture(step) for name, step in steps.items()}
    runs = {"base": base} | {name: run for name, (run, _) in captured.items()}
    times = interleaved(runs, rounds)
    reference = captured["one stream"][1]
    same = {name: bool(torch.equal(logits, reference)) for name, (_, logits) in captured.items()}
    if not bool(reference.isfinite().all()):
        raise SystemExit(f"{setting}, {rows} rows: logits that are not finite")
    return {"setting": setting, "rows": rows, "ms": times, "same_bits": same}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--settings", default="one,distinct,mixed")
    parser.add_argument("--try", dest="tries", action="append", default=[], type=parse_variant)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    return parser.parse_args()


def main() -> None:
    """Measure every cell; lines are printed and appended to --output as they come."""
    given = arguments()
    batches = [int(rows) for rows in given.batch.split(",")]
    settings = given.settings.split(",")
    device = torch.device(given.device)
    of_rows = {rows: [OWN, *(v for v in given.tries if v.rows in (None, rows))] for rows in batches}
    decoder = load(given.model, device)
    with ProcessPoolExecutor(max(1, given.jobs), get_context("spawn")) as pool:
        waiting = [
            pool.submit(compile_for, decoder.geometry, rows, group, variant)
            for rows in batches
            for variant in of_rows[rows]
            for group in GROUPS
            if given.jobs and variant.fields.keys().isdisjoint(SIZES)
        ]
        bench = Bench(decoder, settings, max(batches), device)
        for part in waiting:
            part.result()
    where = {
        "schema": SCHEMA,
        "command": shlex.join(["python", *sys.argv]),
        "commit": given.commit,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    with torch.inference_mode():
        bases = {rows: capture(bench.step(rows))[0] for rows in batches}
    for setting in settings:
        for rows in batches:
            cell = measure(bench, setting, rows, of_rows[rows], given.rounds, bases[rows])
            line = json.dumps(cell | where)
            if given.output is not None:
                with given.output.open("a") as file:
                    file.write(line + "\n")
            base = cell["ms"]["base"]
            shown = (
                f"{n} {ms:.3f} ({100 * (ms / base - 1):+.1f} %)" for n, ms in cell["ms"].items()
            )
            differing = [name for name, same in cell["same_bits"].items() if not same]
            sys.stdout.write(f"{setting}, B={rows}: {', '.join(shown)}; other bits: {differing}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Markdown tables of the base multiplies, from the JSON lines of the bench and the peers' file.

    python -m multilora_kernels.bench.gemm_table docs/benchmarks/gemm-h200.jsonl \
        docs/benchmarks/gemm-peers-h200.json
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = dict[tuple[str, int], dict[str, float]]  # (projection, M) -> variant -> microseconds

_INT4_PEERS = ("Marlin", "Machete", "tinygemm", "gemlite")
_FP8_PEERS = ("FP8 per-tensor", "FP8 row-wise, vLLM CUTLASS")


def figures_of(records: Sequence[Mapping[str, Any]], op: str, **shape: str) -> Figures:
    """The last figure of every cell of `op` whose shape has the given entries."""
    found: Figures = {}
    for record in records:
        cell = record["shape"]
        if record["op"] != op or any(cell.get(key) != value for key, value in shape.items()):
            continue
        key = (str(cell["proj"]), int(cell["M"]))
        found.setdefault(key, {})[record["variant"]] = float(record["us"])
        bound = record["bound_us"]
        if record["variant"] == "ours" and bound is not None:
            found[key]["bound"] = float(bound)
    return found


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else round(over / under, 2)


def _table(
    figures: Figures, beside: Sequence[str], peers: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    """Ours, what was timed beside it, the best of the peers `names`, and ratios."""
    best_header = f"best of {', '.join(names)} (other run)" if names else ""
    header = ["proj", "M", "bound", "ours", "share of bound", *beside]
    if names:
        header += [best_header, "best / ours"]
    yield _row(header)
    yield _row(["---"] * len(header))
    ratios: dict[int, list[float]] = {}
    order = {"qkv": 0, "o": 1, "gate_up": 2, "down": 3}
    for proj, m in sorted(figures, key=lambda cell: (order[cell[0]], cell[1])):
        us = figures[proj, m]
        ours = us["ours"]
        cells: list[object] = [
            proj,
            m,
            round(us["bound"], 1) if "bound" in us else None,
            round(ours, 1),
        ]
        cells += [_ratio(us.get("bound"), ours)]
        cells += [None if name not in us else round(us[name], 1) for name in beside]
        if names:
            measured = peers.get(proj, {}).get(str(m), {})
            known = [measured[name] for name in names if name in measured]
            best = min(known) if known else None
            cells += [best, _ratio(best, ours)]
            if best is not None:
                ratios.setdefault(m, []).append(best / ours)
        yield _row(cells)
    if ratios:
        ratios = dict(sorted(ratios.items()))
        means = (f"M={m} {statistics.geometric_mean(r):.2f}" for m, r in ratios.items())
        yield ""
        yield "Geometric mean of best / ours over the projections: " + ", ".join(means) + "."


def _by_shape(
    records: Sequence[Mapping[str, Any]], op: str, keys: Sequence[str], variants: Sequence[str]
) -> Iterator[str]:
    """A row for each shape of `op`, `keys` being a name and a number: the figures of the last
    commit that it was measured at."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    commits: dict[tuple[str, ...], str] = {}
    for record in records:
        if record["op"] == op:
            shape = tuple(str(record["shape"][key]) for key in keys)
            if record["commit"] != commits.get(shape):
                commits[shape], found[shape] = record["commit"], {}
            found[shape][record["variant"]] = float(record["us"])
    measured = [name for name in variants if any(name in us for us in found.values())]
    yield _row([*keys, *measured])
    yield _row(["---"] * (len(keys) + len(measured)))
    for shape, us in sorted(found.items(), key=lambda row: (row[0][0], int(row[0][1]))):
        yield _row([*shape, *(round(us[name], 1) if name in us else None for name in measured)])


def tables(records: Sequence[Mapping[str, Any]], peers: Mapping[str, Any]) -> Iterator[str]:
    """Every table, line by line."""
    beside = ("cuBLAS bf16", "tinygemm", "dequantise all + cuBLAS")
    yield "**awq_gemm**, group 128, us"
    yield ""
    yield from _table(figures_of(records, "awq_gemm"), beside, peers, _INT4_PEERS)
    scaled = ("ours, x quantised by its own kernel", "_scaled_mm per tensor", "_scaled_mm by rows")
    yield ""
    yield "**fp8_gemm**, a scale per output channel and per row, us"
    yield ""
    channel = figures_of(records, "fp8_gemm", scales="channel")
    yield from _table(channel, scaled, peers, _FP8_PEERS)
    yield ""
    yield "**fp8_gemm**, scales by blocks of 128 x 128, us"
    yield ""
    yield from _table(figures_of(records, "fp8_gemm", scales="block"), scaled[:2], {}, ())
    for op in ("fp8_weight_only", "bf16_gemv", "bf16_rows"):
        yield ""
        yield f"**{op}**, us"
        yield ""
        yield from _table(figures_of(records, op), ("cuBLAS bf16",), {}, ())
    yield ""
    yield "**awq_hopper**, us"
    yield ""
    hopper = ("ours", "dequantise slices + cuBLAS", "cuBLAS bf16")
    yield from _by_shape(records, "awq_hopper", ("proj", "M"), hopper)
    yield ""
    yield "**A layer without attention**, us"
    yield ""
    yield from _by_shape(records, "layer", ("base", "M"), ("ours", "cuBLAS bf16"))


def main() -> None:
    """Write the tables of the files named on the command line to standard output."""
    lines, peers = (Path(name).read_text() for name in sys.argv[1:3])
    records = [json.loads(line) for line in lines.splitlines()]
    sys.stdout.write("\n".join(tables(records, json.loads(peers)["us"])) + "\n")


if __name__ == "__main__":
    main()

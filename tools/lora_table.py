"""Write the LoRA tables of kernels/README.md from recorded benchmark lines.

    python tools/lora_table.py docs/benchmarks/lora-h200.jsonl

Peers' figures, measured on the same kind of card with the same method, are data too:
docs/benchmarks/lora-peers-h200.jsonl. What adapters add to a captured step is read from
docs/benchmarks/lora-step-h200.jsonl, and what they add in the engine from
docs/benchmarks/engine-h200.jsonl. Tables replace what lies between their two markers.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean

from doc_tables import Record, engine_cells, put, read

ROOT = Path(__file__).parents[1]
README = ROOT / "kernels" / "README.md"
PEERS = ROOT / "docs" / "benchmarks" / "lora-peers-h200.jsonl"
STEPS = ROOT / "docs" / "benchmarks" / "lora-step-h200.jsonl"
ENGINE = ROOT / "docs" / "benchmarks" / "engine-h200.jsonl"
BEGIN, END = "<!-- lora table: begin -->", "<!-- lora table: end -->"
STEP_BEGIN, STEP_END = "<!-- lora step table: begin -->", "<!-- lora step table: end -->"
ADDED_BEGIN, ADDED_END = "<!-- lora in the engine: begin -->", "<!-- lora in the engine: end -->"
# Per cent that a step may take more than without adapters, by rows.
ASKED: Mapping[str, Mapping[int, int]] = {
    "one": {1: 10, 16: 10, 64: 10, 256: 10},
    "distinct": {1: 12, 16: 17, 64: 35, 256: 27},
    "mixed": {1: 8, 16: 12, 64: 25, 256: 20},
}
NAMES = {
    "vllm": "vLLM",
    "vllm_tuned": "vLLM tuned",
    "sgl_csgmv": "csgmv",
    "sgl_triton": "SGLang triton",
    "sgl_v2": "triton_v2",
    "bgmv": "BGMV",
    "grouped_mm": "grouped_mm",
}

Key = tuple[str, int, str, str]


def ours(records: Iterable[Record], chip: str, variant: str = "ours") -> dict[Key, Record]:
    """The last record of every cell under one chip's launch choices."""
    return {
        (r["shape"]["group"], r["shape"]["T"], r["shape"]["popularity"], r["shape"]["rank"]): r
        for r in records
        if r["op"] == "lora"
        and r["variant"] == variant
        and r["launch_choices_for"] == chip
        and "void" not in r
    }


def best_peer(peer: Record) -> tuple[str, float]:
    """Name and microseconds of the fastest peer of a cell; our own prototype is not one."""
    times = {name: us for name, us in peer["us"].items() if name in NAMES and us}
    name = min(times, key=lambda n: times[n])
    return name, times[name]


def cell_rows(peers: list[Record], found: dict[Key, Record], other: dict[Key, Record]) -> list[str]:
    """One line per cell: ours, the best peer, the stream floor, the stand-in's choices."""
    lines = [
        "| group | T | rows | rank | ours us | best peer us | best peer / ours | stream / ours |"
        " RTX 4090 choices us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for peer in peers:
        key = (peer["group"], peer["T"], peer["popularity"], peer["rank"])
        if key not in found and key not in other:
            continue
        # Where only the stand-in's figure is valid, it is compared.
        us = (found.get(key) or other[key])["us"]
        shown = f"{us:.1f}" if key in found else "-"
        name, peer_us = best_peer(peer)
        floor = peer.get("stream_us")
        share = "" if floor is None else f"{floor / us:.2f}"
        stand_in = f"{other[key]['us']:.1f}" if key in other else ""
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {key[3]} | {shown} | {peer_us:.1f}"
            f" ({NAMES[name]}) | {peer_us / us:.2f} | {share} | {stand_in} |"
        )
    return lines


def summary(peers: list[Record], found: dict[Key, Record]) -> list[str]:
    """Geometric means over the parts of the grid."""
    parts: list[tuple[str, Callable[[Record], bool]]] = [
        ("rank 16, distinct", lambda p: p["popularity"] == "distinct" and p["rank"] == "16"),
        (
            "rank 16, uniform, skewed, identical",
            lambda p: p["popularity"] in ("uniform", "skewed", "identical"),
        ),
        *(
            (f"rank {rank}, distinct", lambda p, rank=rank: p["rank"] == rank)
            for rank in ("8", "32", "64", "128", "mix")
        ),
        ("prefill", lambda p: p["popularity"].endswith("adapters")),
    ]
    lines = [
        "| part of the grid | cells | best peer / ours | worst cell | "
        + " | ".join(NAMES.values())
        + " |",
        "|---" * (4 + len(NAMES)) + "|",
    ]
    for title, belongs in parts:
        pairs = [
            (peer, found[key]["us"])
            for peer in peers
            if belongs(peer)
            and (key := (peer["group"], peer["T"], peer["popularity"], peer["rank"])) in found
        ]
        if not pairs:
            continue
        ratios = [best_peer(peer)[1] / us for peer, us in pairs]
        single = []
        for name in NAMES:
            against = [peer["us"][name] / us for peer, us in pairs if peer["us"].get(name)]
            single.append(f"{geometric_mean(against):.2f}" if against else "-")
        lines.append(
            f"| {title} | {len(pairs)} | {geometric_mean(ratios):.2f} | {min(ratios):.2f} | "
            + " | ".join(single)
            + " |"
        )
    return lines


def steps(records: list[Record]) -> list[str]:
    """Whole decode steps: all layers, every row its own adapter."""
    lines = ["| step | T | ms | share of the byte bound |", "|---|---|---|---|"]
    found = {
        (r["shape"]["groups"], r["shape"]["T"]): r
        for r in records
        if r["op"] == "lora_step" and r["launch_choices_for"] == "NVIDIA H200"
    }
    for (groups, rows), record in sorted(found.items()):
        title = "32 layers, " + groups.replace("+", ", ")
        lines.append(
            f"| {title} | {rows} | {record['us'] / 1e3:.2f} | {record['share_of_bound']:.2f} |"
        )
    return lines


def captured_steps(records: Iterable[Record]) -> list[str]:
    """What adapters add to a captured step: on one stream, and as the engine captures it."""
    found = {(cell["setting"], cell["rows"]): cell for cell in records}
    names = ("adapters", "rows", "base, ms", "one stream", "as captured", "asked", "commit")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for setting, asked in ASKED.items():
        for rows in sorted(rows for name, rows in found if name == setting):
            cell = found[setting, rows]
            ms, limit = cell["ms"], asked.get(rows)
            one, own = (
                f"{ms[name]:.2f} (+{100 * (ms[name] / ms['base'] - 1):.1f} %)"
                for name in ("one stream", "own")
            )
            wanted = f"+{limit} %" if limit else ""
            lines.append(
                f"| {setting} | {rows} | {ms['base']:.2f} | {one} | {own} | {wanted} |"
                f" {cell['commit']} |"
            )
    return lines


def added(records: Iterable[Record]) -> list[str]:
    """What adapters add between two tokens of the running engine, in 16 bits."""
    found = engine_cells(records)
    names = ("adapters", "rows", "base, ms", "with adapters", "asked", "commit")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for setting, asked in ASKED.items():
        for rows, limit in asked.items():
            cell, base = found[setting, rows], found["base", rows]["step_ms"]
            share = 100 * (cell["step_ms"] / base - 1)
            lines.append(
                f"| {setting} | {rows} | {base:.2f} | {cell['step_ms']:.2f} (+{share:.1f} %) |"
                f" +{limit} % | {cell['commit']} |"
            )
    return lines


def main() -> None:
    """Rewrite the tables from the file named on the command line."""
    records = read(Path(sys.argv[1]))
    peers = read(PEERS)
    found = ours(records, "NVIDIA H200")
    stand_in = ours(records, "NVIDIA GeForce RTX 4090")
    last = next(r for r in reversed(records) if r in found.values())
    cells = Counter(record["commit"] for record in found.values())
    commits = f"commit {last['commit']}"
    if len(cells) > 1:
        commits = "commits " + ", ".join(f"{name} ({count} cells)" for name, count in cells.items())
    source = (
        f"Measured on {last['gpu']}, torch {last['torch']}, Triton {last['triton']}, {commits}:"
        f" `{last['command']}`. Peers: see the file beside the records."
    )
    shared = {key: record for key, record in stand_in.items() if key not in found}
    only = "Of cells without a valid figure of the H200's choices, those of the RTX 4090's:"
    rest = [only, "", *summary(peers, shared), ""] if shared else []
    parts = [
        source, "", *summary(peers, found), "", *rest, *steps(records), "",
        *cell_rows(peers, found, stand_in),
    ]  # fmt: skip
    put(README, BEGIN, "\n".join(parts), END)
    put(README, STEP_BEGIN, "\n".join(captured_steps(read(STEPS))), STEP_END)
    put(README, ADDED_BEGIN, "\n".join(added(read(ENGINE))), ADDED_END)


if __name__ == "__main__":
    main()

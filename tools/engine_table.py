"""Write the engine's tables in docs/benchmarks.md and README.md from recorded lines of
`mlora bench --offline`.

    python tools/engine_table.py docs/benchmarks/engine-h200.jsonl

What vLLM reaches on the same kind of card with the same workload is data too:
docs/benchmarks/engine-peers-h200.jsonl; and what a server around the same engine reached is
docs/benchmarks/served-h200.jsonl, lines of `mlora bench --rows`. The tables replace what lies
between the two markers of each.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from doc_tables import BASES, Record, engine_cells, put, read

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
PEERS = ROOT / "docs" / "benchmarks" / "engine-peers-h200.jsonl"
SERVED = ROOT / "docs" / "benchmarks" / "served-h200.jsonl"
BEGIN, END = "<!-- engine table: begin -->", "<!-- engine table: end -->"
SERVED_BEGIN, SERVED_END = "<!-- served table: begin -->", "<!-- served table: end -->"
README_BEGIN, README_END = "<!-- speeds: begin -->", "<!-- speeds: end -->"
TITLES = {
    "base": "no adapter",
    "one": "one adapter, rank 16 on all seven projections, shared by all rows",
    "distinct": "64 adapters, rank 16 on all seven projections",
    "mixed": "64 adapters, ranks 8, 16, 32 and 64 on attention",
}
BATCHES = (1, 16, 64, 256)


def steps(records: Sequence[Record], peers: Sequence[Record]) -> list[str]:
    """Milliseconds of a decode step, ours beside the peer's, by base, setting and batch."""
    lines = ["| base | adapters | |" + "".join(f" B={batch} |" for batch in BATCHES)]
    lines.append("|---" * (3 + len(BATCHES)) + "|")
    for base, base_title in BASES.items():
        ours = engine_cells(records, base)
        for setting, title in TITLES.items():
            cells = {batch: ours[setting, batch] for batch in BATCHES if (setting, batch) in ours}
            if not cells:
                continue
            times = {batch: cell["step_ms"] for batch, cell in cells.items()}
            bounds = {batch: cell["bound_ms"] for batch, cell in cells.items()}
            lines.append(_row(base_title, title, "mlora", times))
            lines.append(_row("", "", "least possible", bounds))
            for peer in peers:
                if (peer["quantization"], peer["setting"]) == (base, setting):
                    found = {int(batch): ms for batch, ms in peer["step_ms"].items()}
                    lines.append(_row("", "", peer["server"], found))
    return lines


def _row(base: str, adapters: str, who: str, times: Mapping[int, float]) -> str:
    cells = "".join(f" {times[b]:.2f} |" if b in times else " - |" for b in BATCHES)
    return f"| {base} | {adapters} | {who} |{cells}"


def loads(records: Sequence[Record]) -> list[str]:
    """Adapters loaded while others decode."""
    lines = []
    for record in records:
        if record["kind"] != "loads":
            continue
        size = record["adapter_bytes"] / 1e6
        times = [
            f"{median(record[name]):.0f} ms {where}"
            for name, where in (
                ("first_ms", "from files at their first load"),
                ("again_ms", "from files with a known digest"),
                ("warm_ms", "from host memory"),
            )
        ]
        lines.append(
            f"{BASES[record['quantization']]}: adapters of {size:.0f} MB, loaded one by one while"
            f" {record['batch']} answers decode,"
            f" are hot after a median of {', '.join(times)}; the others' tokens come"
            f" {record['step_ms']:.2f} ms apart, at most {record['gap_max_ms']:.2f} ms meanwhile."
        )
    return lines


def pools(records: Sequence[Record], peers: Sequence[Record]) -> list[str]:
    """Tokens/s where adapters and KV have one tight pool between them."""
    lines = []
    for base, title in BASES.items():
        found = {
            batch: cell["output_tokens_per_s"]
            for (setting, batch), cell in engine_cells(records, base).items()
            if setting == "pool"
        }
        if found:
            speeds = ", ".join(f"{speed:,.0f} at {batch}" for batch, speed in found.items())
            lines.append(
                f"{title}, 64 adapters (rank 16 on attention) and KV in one pool of 2.69 GiB,"
                f" tokens/s of whole batches by their size: {speeds}."
            )
    for peer in peers:
        if peer["setting"] == "pool":
            known = peer["output_tokens_per_s"].items()
            speeds = ", ".join(f"{speed:,} at {batch}" for batch, speed in known)
            lines.append(f"{peer['version']} with that memory ({peer['settings']}): {speeds}.")
    return lines


def served(rows: Sequence[Record], records: Sequence[Record]) -> list[str]:
    """Tokens/s over HTTP, means of the rounds of a load, beside the engine's own with the same
    lengths."""
    alone = {
        (*key, f"{cell['input']}:{cell['output']}"): cell["output_tokens_per_s"]
        for key, cell in engine_cells(records).items()
    }
    found: dict[tuple[str, int, str], list[Record]] = {}
    for row in rows:
        asked = row["settings"]
        key = (row["load"], asked["concurrency"], asked["lengths"])
        found.setdefault(key, []).append(row)
    lines = [
        "| adapters | clients | tokens in, out | tok/s | of the engine alone | first token, p50 |"
        " between tokens, p50 | p99 |",
        "|---" * 8 + "|",
    ]
    for (load, clients, lengths), rounds in found.items():
        speed = fmean(row["output_tokens_per_s"] for row in rounds)
        engine = alone.get((load, clients, lengths))
        share = f"{speed / engine:.0%}" if engine else "-"
        times = [(1e3 * fmean(row[what][p] for row in rounds)) for what, p in
                 (("ttft", "p50"), ("itl", "p50"), ("itl", "p99"))]  # fmt: skip
        cells = [TITLES[load], str(clients), lengths.replace(":", ", "), f"{speed:,.0f}", share]
        cells += [f"{times[0]:.0f} ms", f"{times[1]:.2f} ms", f"{times[2]:.1f} ms"]
        lines.append(f"| {' | '.join(cells)} |")
    sources = dict.fromkeys((row["commit"], row["command"]) for row in rows)
    named = "; ".join(f"`{command}` (commit {commit})" for commit, command in sources)
    return [*lines, "", f"{rows[0]['gpu']}: {named}."]


def readme(records: Sequence[Record], peers: Sequence[Record]) -> list[str]:
    """What a reader wants first: BF16, every request on an adapter of its own, beside the peer."""
    ours = engine_cells(records)
    theirs = {peer["server"]: {int(batch): ms for batch, ms in peer["step_ms"].items()}
              for peer in peers
              if (peer["quantization"], peer["setting"]) == ("none", "distinct")}  # fmt: skip
    rows: dict[str, Mapping[int, float]] = {
        title: {batch: ours[setting, batch]["step_ms"] for batch in BATCHES}
        for setting, title in (("base", "no adapter"), ("distinct", "distinct adapters"))
    }
    rows["vLLM 0.26, distinct adapters, as it comes"] = theirs["vLLM"]
    rows["vLLM 0.26, tuned for it"] = theirs["vLLM tuned"]
    commits = ", ".join(dict.fromkeys(ours[s, b]["commit"] for s in ("base", "distinct")
                                      for b in BATCHES))  # fmt: skip
    tight = max((peer for peer in peers if peer["setting"] == "pool"),
                key=lambda peer: peer["output_tokens_per_s"]["64"])  # fmt: skip
    load = next(r for r in records if r["kind"] == "loads" and r["quantization"] == "none")
    return [
        f"At commit {commits}:",
        "",
        f"| rows | {' | '.join(map(str, BATCHES))} |",
        "|" + " --- |" * (1 + len(BATCHES)),
        *(f"| {title} |" + "".join(f" {times[b]:.2f} |" for b in BATCHES)
          for title, times in rows.items()),
        "",
        "64 adapters and their KV cache in 2.69 GiB:"
        f" {ours['pool', 64]['output_tokens_per_s']:,.0f} tokens/s at 64 rows, where vLLM with that"
        f" memory makes {tight['output_tokens_per_s']['64']}.",
        "",
        f"An adapter of {load['adapter_bytes'] / 1e6:.0f} MB that comes beside {load['batch']}"
        f" streams is used {median(load['first_ms']):.0f} ms after it was asked for from files,"
        f" {median(load['warm_ms']):.0f} ms from host memory; the streams' tokens come"
        f" {load['step_ms']:.1f} ms apart, at most {load['gap_max_ms']:.1f} ms meanwhile.",
    ]  # fmt: skip


def main() -> None:
    """Rewrite the tables from the file named on the command line."""
    records, peers = read(Path(sys.argv[1])), read(PEERS)
    commands = dict.fromkeys((r["commit"], r["command"]) for r in records)
    first = records[0]
    source = (
        f"Measured on {first['gpu']}, torch {first['torch']}, Triton {first['triton']}: "
        + "; ".join(f"`{command}` (commit {commit})" for commit, command in commands)
        + ". Milliseconds between tokens while every request"
        " decodes, median; 128 tokens in, 128 out. vLLM 0.26 was measured on the same kind of card"
        " with the same workload; its records name its settings."
    )
    parts = [source, "", *steps(records, peers), "", *pools(records, peers), "", *loads(records)]
    put(DOCUMENT, BEGIN, "\n".join(parts), END)
    put(README, README_BEGIN, "\n".join(readme(records, peers)), README_END)
    put(DOCUMENT, SERVED_BEGIN, "\n".join(served(read(SERVED), records)), SERVED_END)


if __name__ == "__main__":
    main()

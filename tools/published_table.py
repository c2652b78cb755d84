"""Write the published tables in docs/benchmarks.md, ours beside the published figures.

    python tools/published_table.py

Ours are the lines that `mlora bench --rows docs/benchmarks/published-h200.jsonl` appends, of which
the last one of a row counts; theirs are docs/benchmarks/published.json. The tables replace what
lies between the two markers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doc_tables import BASES, put, read

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "docs" / "benchmarks" / "published-h200.jsonl"
PUBLISHED = ROOT / "docs" / "benchmarks" / "published.json"
BEGIN, END = "<!-- published tables: begin -->", "<!-- published tables: end -->"
POPULARITIES = ("distinct", "uniform", "skewed", "identical", "base")
NOTHING = "-"

Record = Mapping[str, Any]
Key = tuple[str, ...]


def punica(records: Sequence[Record], published: Mapping[str, Any]) -> list[str]:
    """One row a base and popularity: tokens/s, share of the bound, and what was published."""
    found = {
        (row["settings"]["quantization"], row["load"]): row
        for row in records
        if row["preset"] == "punica"
    }
    lines = [
        "| base | popularity | measured | tok/s | of bound | ITL p50"
        " | Punica | vLLM, no LoRA | PEFT |",
        "|---" * 9 + "|",
    ]
    for base, title in BASES.items():
        for load in POPULARITIES:
            row = found.get((base, load))
            if row is None:
                continue
            theirs = published["rows"].get(load, {})
            tokens = row["input_tokens_per_s"] + row["output_tokens_per_s"]
            cells = [title, load, measured(row), f"{tokens:,.0f}", share(row)]
            cells += [milliseconds(row["itl"], "p50")]
            cells += [f"{theirs[name]:,}" if name in theirs else NOTHING for name in
                      ("Punica", "vLLM", "PEFT")]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def slora(records: Sequence[Record], published: Mapping[str, Any]) -> list[str]:
    """One row a setting, number of adapters and rate."""
    found = {
        (Path(row["settings"]["adapters_from"]).stem, row["settings"]["rate"], row["load"]): row
        for row in records
        if row["preset"] == "s-lora-table3"
    }
    lines = [
        "| adapters | arrivals | n | asked | measured | tok/s | req/s | of bound | TTFT mean"
        " | within 6 s | loads | S-LoRA: req/s | TTFT | within 6 s |",
        "|---" * 14 + "|",
    ]
    for setting, rate, load in sorted(found, key=order):
        row = found[setting, rate, load]
        theirs = published["rows"].get(setting, {}).get(load)
        cells = [
            setting.upper(),
            "at once" if rate == "inf" else f"{float(rate or 10.0):g}/s",
            load.removeprefix("n="),
            str(row["adapters"]),
            measured(row),
            f"{row['output_tokens_per_s']:,.0f}",
            f"{requests_per_s(row):.2f}",
            share(row),
            milliseconds(row["ttft"], "mean"),
            f"{row['slo_attainment']:.3f}",
            NOTHING if row["loads"] is None else str(row["loads"]),
            *(
                (f"{theirs['rate']:.2f}", f"{theirs['ttft_s']:g} s", f"{theirs['attainment']:.3f}")
                if theirs
                else (NOTHING,) * 3
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def order(key: Key) -> tuple[str, bool, int]:
    """By setting, saturated loads first, then by the number of adapters."""
    setting, rate, load = key
    return setting, rate != "inf", int(load.removeprefix("n="))


def requests_per_s(row: Record) -> float:
    """Of a load that was cut: its tokens/s over what a request of it asks for on average."""
    if row["cut"]:
        return float(row["output_tokens_per_s"]) / float(row["mean_output"])
    return float(row["requests_per_s"])


def measured(row: Record) -> str:
    """How much of a load was run: to its end, or until it was ended."""
    cut = f", {row['cut']} cut" if row["cut"] else ""
    return f"{row['requests']} requests in {row['duration_s']:.3g} s{cut}"


def share(row: Record) -> str:
    """Of the bound, where the card was known."""
    return f"{row['bound']['share']:.1%}" if row["bound"] else NOTHING


def milliseconds(spread: Mapping[str, float] | None, point: str) -> str:
    """One point of a distribution of seconds."""
    return NOTHING if spread is None else f"{spread[point] * 1e3:.4g} ms"


def commands(records: Sequence[Record], preset: str) -> list[str]:
    """What was typed for the rows of a preset, each once, with where and when."""
    texts = dict.fromkeys(
        f"- `{row['command']}`: {row['gpu'] or 'its server'}, commit {row['commit']}, {row['date']}"
        for row in records
        if row["preset"] == preset
    )
    return list(texts)


def body(records: Sequence[Record], published: Mapping[str, Any]) -> str:
    """What stands between the markers."""
    parts = []
    for title, preset, table, theirs in (
        ("Punica's text generation", "punica", punica, published["punica"]),
        ("S-LoRA's table 3", "s-lora-table3", slora, published["s-lora"]),
    ):
        rows = table(records, theirs) or ["Not measured yet."]
        source = f"Published: {theirs['source']}; {theirs['unit']}."
        parts += [f"#### {title}", "", *rows, "", source, *commands(records, preset), ""]
    return "\n".join(parts[:-1])


def main() -> None:
    """Rewrite the tables from the recorded lines."""
    records = read(RECORDS) if RECORDS.is_file() else []  # none before the first run
    put(DOCUMENT, BEGIN, body(records, json.loads(PUBLISHED.read_text())), END)


if __name__ == "__main__":
    main()

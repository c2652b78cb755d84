"""Perplexity of a base in every storage that `mlora quantize` makes: one command, one table.

    python tools/quantize_table.py MODEL --work FOLDER [--text FILE] [--calibration FILE]

Quantised copies are made in FOLDER by the command itself (one that is there already is measured
as it is), each is measured on the same held-out text, a line per measurement is appended to
docs/benchmarks/quantize.jsonl, and the tables in docs/quantisation.md are written from the records;
without MODEL only the tables are. `--ways` names some of the ways.

The default text is the second half of Python's own language reference (pydoc_data.topics), which
no default calibration has seen. Needs the extra `quantize`; `autoawq` the extra `awq` and CUDA.
"""

import argparse
import importlib.metadata
import json
import pydoc_data.topics
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from doc_tables import put, read

from multilora_cli.bench.environment import commit
from multilora_cli.engine.perplexity import base_perplexity
from multilora_cli.errors import MloraError
from multilora_cli.progress import silent
from multilora_cli.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
DRIFT = ROOT / "docs" / "benchmarks" / "quantize-drift.jsonl"  # of `mlora verify --drift --json`
RECORDS = ROOT / "docs" / "benchmarks" / "quantize.jsonl"
DOCUMENT = ROOT / "docs" / "quantisation.md"
BEGIN, END = "<!-- quantize table: begin -->", "<!-- quantize table: end -->"
DRIFT_BEGIN, DRIFT_END = "<!-- drift table: begin -->", "<!-- drift table: end -->"
# Way -> (what the table calls it, arguments of `mlora quantize`; None: the base itself).
WAYS: dict[str, tuple[str, list[str] | None]] = {
    "base": ("the 16-bit base", None),
    "kv-fp8": ("the 16-bit base, KV cache in FP8", None),
    "fp8": ("FP8, a scale per output channel", ["--to", "fp8"]),
    "plain": ("AWQ, plain rounding", ["--to", "awq", "--iterations", "0"]),
    "auto-round": ("AWQ, auto-round", ["--to", "awq"]),
    "autoawq": ("AWQ, AutoAWQ", ["--to", "awq", "--method", "autoawq"]),
}
CALIBRATED = ("auto-round", "autoawq")
_LIBRARIES = {"plain": "auto-round", "auto-round": "auto-round", "autoawq": "autoawq"}


def main() -> None:
    """Measure what was asked for, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="where quantised copies are put")
    parser.add_argument("--text", type=Path, help="held-out text")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text that are measured")
    parser.add_argument("--ways", default=",".join(way for way in WAYS if way != "autoawq"))
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.model is not None:
        if options.work is None:
            parser.error("--work FOLDER is needed")
        measure(options)
    if options.records == RECORDS:
        write_table(read(RECORDS))


def measure(options: argparse.Namespace) -> None:
    """Append a record for every way."""
    tokens = load_tokenizer(options.model).encode(held_out(options.text))[: options.tokens]
    for way in options.ways.split(","):
        folder, command, seconds = options.model, None, None
        if WAYS[way][1] is not None:
            text = f"-{options.calibration.stem}" if options.calibration else ""
            folder = options.work / f"{options.model.name}-{way}{text}"
            command, seconds = quantised(options, way, folder)
        kv = "fp8" if way == "kv-fp8" else "auto"
        found = base_perplexity(folder, tokens, silent, kv)
        library = _LIBRARIES.get(way)
        record = {
            "model": options.model.name, "way": way, "perplexity": round(found, 4),
            "tokens": len(tokens), "text": options.text.name if options.text else "default",
            "calibration": options.calibration.name if options.calibration else "default",
            "command": command, "seconds": seconds, "bytes": weight_bytes(folder),
            "library": f"{library} {importlib.metadata.version(library)}" if library else None,
            "torch": torch.__version__, "device": device(), "threads": torch.get_num_threads(),
            "commit": commit(), "date": date.today().isoformat(),
        }  # fmt: skip
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{way}: {found:.3f}", flush=True)


def quantised(options: argparse.Namespace, way: str, folder: Path) -> tuple[str, float | None]:
    """The command that makes `folder`, and how long it took; None where it was there."""
    arguments = [*(WAYS[way][1] or [])]
    if options.calibration is not None and "awq" in arguments:
        arguments += ["--calibration", str(options.calibration)]
    named = [Path(word).name if "/" in word else word for word in arguments]
    shown = " ".join(["mlora quantize", options.model.name, *named, "-o", folder.name])
    if folder.exists():
        return shown, None
    started = time.monotonic()
    command = [sys.executable, "-m", "multilora_cli", "quantize", str(options.model), *arguments]
    subprocess.run([*command, "-o", str(folder), "--json"], check=True)
    return shown, round(time.monotonic() - started, 1)


def held_out(path: Path | None) -> str:
    """The text that is measured."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text[len(text) // 2 :]


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def device() -> str:
    """Where perplexity is measured."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def table(records: Iterable[dict[str, Any]]) -> str:
    """The last record of every model, device, way and calibration, beside the base."""
    last = {(r["model"], r["device"], r["way"], r["calibration"]): r for r in records}
    lines = [
        "| base, measured on | storage | weights, MB | perplexity | over the 16-bit base | than"
        " plain rounding | made in |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (model, where, way, text), record in sorted(last.items(), key=_order):
        if way not in CALIBRATED and text != "default":
            continue
        base = last.get((model, where, "base", "default"))
        plain = last.get((model, where, "plain", "default")) if way in CALIBRATED else None
        over = f"{record['perplexity'] / base['perplexity'] - 1:+.1%}" if base else ""
        less = f"{record['perplexity'] / plain['perplexity'] - 1:+.1%}" if plain else ""
        name = WAYS[way][0] + (f", calibrated on {text}" if text != "default" else "")
        seconds = f"{record['seconds']:.0f} s" if record["seconds"] else ""
        lines.append(
            f"| {model}, {where} | {name} | {record['bytes'] / 1e6:.0f} |"
            f" {record['perplexity']:.2f} | {over if way != 'base' else ''} | {less} | {seconds} |"
        )
    return "\n".join(lines)


def _order(item: tuple[tuple[str, str, str, str], Any]) -> tuple[str, str, int, bool]:
    model, where, way, text = item[0]
    return model, where, list(WAYS).index(way), text != "default"


def drift_table(records: Iterable[dict[str, Any]]) -> str:
    """Agreement of adapters with themselves on the 16-bit base: a row a way, means of adapters."""
    ways: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        ways.setdefault((record["model"], record["way"]), []).append(record)
    lines = ["| base | storage | adapters | top-1 agreement | mean KL, nats |"]
    lines.append("| --- | --- | --- | --- | --- |")
    models = list(dict.fromkeys(model for model, _ in ways))
    order = {key: (models.index(key[0]), list(WAYS).index(key[1])) for key in ways}
    for (model, way), found in sorted(ways.items(), key=lambda item: order[item[0]]):
        tops, kls = ([record[field] for record in found] for field in ("top1", "mean_kl"))
        lines.append(
            f"| {model} | {WAYS[way][0]} | {len(found)} | {min(tops):.2f} to {max(tops):.2f} |"
            f" {min(kls):.3f} to {max(kls):.3f} |"
        )
    return "\n".join(lines)


def write_table(records: list[dict[str, Any]]) -> None:
    """Put both tables between their markers in the document."""
    put(DOCUMENT, BEGIN, table(records), END)
    put(DOCUMENT, DRIFT_BEGIN, drift_table(read(DRIFT)), DRIFT_END)


if __name__ == "__main__":
    try:
        main()
    except MloraError as error:
        sys.exit(f"error: {error}")

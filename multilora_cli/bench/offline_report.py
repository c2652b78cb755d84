"""Cells of the engine benchmark as JSON lines and as a table: batch sizes side by side."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from multilora_cli.bench.environment import command_line, commit, gpu_names, versions
from multilora_cli.bench.neutral import Setting, Shape
from multilora_cli.bench.offline import Figures
from multilora_cli.bench.rows import rounded
from multilora_cli.bench.tables import Table
from multilora_cli.sizing.bound import decode_bound
from multilora_cli.sizing.budget import BaseBytes
from multilora_cli.sizing.hardware import Gpu

SCHEMA = "mlora.bench.offline/1"
_NOTHING = "-"


def facts(arguments: Sequence[str], device: str, known_commit: str | None) -> dict[str, Any]:
    """What makes a line repeatable: command, commit, card and versions."""
    names = gpu_names()
    return {
        "command": command_line(arguments),
        "commit": known_commit or commit(),
        "gpu": names[0] if names and device != "cpu" else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        **versions(("torch", "triton")),
    }


def cell(
    model: str, quantization: str, setting: Setting, batch: int, shape: Shape, found: Figures
) -> dict[str, Any]:
    """One measured cell as a plain value."""
    return {
        "kind": "cell",
        "schema": SCHEMA,
        "model": model,
        "quantization": quantization,
        "setting": setting.name,
        "adapters": len(setting.sources),
        "batch": batch,
        "input": shape.input_tokens,
        "output": shape.output_tokens,
        "rounds": shape.rounds,
        **{key: rounded(value) for key, value in asdict(found).items()},
    }


def bound_ms(
    base: BaseBytes, kv_per_token: int, shape: Shape, batch: int, adapters: Sequence[int], gpu: Gpu
) -> float:
    """Least milliseconds of a decode step halfway through the answers.

    `adapters` are the bytes of each of the setting's; the first `batch` of them are read.
    """
    context = shape.input_tokens + shape.output_tokens // 2
    return decode_bound(base, kv_per_token, [context] * batch, adapters[:batch], gpu).seconds * 1e3


class Phases:
    """Seconds of each phase of a start, in order; phases that come back add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._since = 0.0

    @contextmanager
    def watching(self, first: str) -> Iterator[None]:
        """Count time, for `first` until `report` names another phase."""
        self._name, self._since = first, perf_counter()
        try:
            yield
        finally:
            self._close()

    def report(self, phase: str, done: int, total: int) -> None:
        """What build_engine calls with its progress."""
        if phase != self._name:
            self._close()
            self._name = phase

    def _close(self) -> None:
        now = perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def process_age_s() -> float | None:
    """Seconds since this process was started; None where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(uptime - ticks / os.sysconf("SC_CLK_TCK"), 0.0)


def describe(record: Mapping[str, Any]) -> str:
    """One line for whoever waits."""
    if record["kind"] == "failure":
        return f"{record['quantization']}, {record['settings']}: failed"
    if record["kind"] == "loads":
        times = ", ".join(
            f"{name.removesuffix('_ms').replace('_', ' ')} {max(record[name]):.1f}"
            for name in ("first_ms", "again_ms", "warm_ms")
            if record[name]
        )
        return (
            f"{record['quantization']}: {len(record['first_ms'])} loads beside B={record['batch']}:"
            f" to hot, worst ms: {times}; step median {record['step_ms']:.2f} ms, longest gap"
            f" {record['gap_max_ms']:.2f} ms; beside a prompt of {record['prompt_tokens']:,} tokens"
            f" {record['prompt_gap_max_ms']:.1f} ms"
        )
    if record["kind"] == "start":
        phases = ", ".join(f"{k} {v:.2f} s" for k, v in record["start_s"].items() if v is not None)
        return f"{record['quantization']}: started: {phases}"
    host, prompts = record["host_ms"]["step"], record["prompt_host_ms"].get("step")
    beside = "" if prompts is None else f", {prompts:.2f} with prompts"
    return (
        f"{record['quantization']}, {record['setting']}, B={record['batch']}:"
        f" {_step_text(record)} ms/step, {record['output_tokens_per_s']:,.0f} tok/s,"
        f" TTFT {record['ttft_last_ms']:.0f} ms; the engine counted {host:.2f} ms a step{beside}"
    )


def cells_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Milliseconds a decode step and what share of the bound that is, by setting and batch."""
    cells = [record for record in records if record["kind"] == "cell"]
    batches = sorted({record["batch"] for record in cells})
    rows: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for record in cells:
        rows.setdefault((record["quantization"], record["setting"]), {})[record["batch"]] = record
    bound = " (bound)" if any(record.get("bound_ms") is not None for record in cells) else ""
    columns = ("base", "setting", *(f"B={b} ms/step{bound} tok/s" for b in batches))
    return columns, [
        (*key, *(_cell_text(found.get(batch)) for batch in batches)) for key, found in rows.items()
    ]


def starts_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Every start of an engine by phase, in seconds."""
    starts = [record for record in records if record["kind"] == "start"]
    names = list(dict.fromkeys(name for record in starts for name in record["start_s"]))
    rows = []
    for record in starts:
        seconds = [record["start_s"].get(name) for name in names]
        texts = [_NOTHING if value is None else f"{value:.2f}" for value in seconds]
        rows.append((record["quantization"], record["settings"], *texts))
    return ("base", "settings", *names), rows


def _cell_text(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return _NOTHING
    return f"{_step_text(record)} {record['output_tokens_per_s']:,.0f}"


def _step_text(record: Mapping[str, Any]) -> str:
    bound = record.get("bound_ms")
    share = f" ({bound:.2f})" if bound is not None else ""
    return f"{record['step_ms']:.2f}{share}"

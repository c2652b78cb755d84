"""Where a start, a step and a load spend their time: one JSON line each, as soon as it is known.

    python tools/host_times.py                       # an 8B on the first card
    python tools/host_times.py --model tiny --device cpu --rows 4,8
    python tools/host_times.py --parts start         # the start alone
    python tools/host_times.py --table docs/benchmarks/host-h200.jsonl    # docs/benchmarks.md

start: seconds by phase, and those of all captures by what they are spent on. steps: milliseconds
the host takes for a step that only decodes, by phase. loads: from file to hot beside decoding rows,
first and once more, and the longest gap between tokens. dora: the same of an adapter whose norms
are computed over the base.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from doc_tables import put, read

STARTED = time.perf_counter()
ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- host table: begin -->", "<!-- host table: end -->"
# What a load is called -> the tier it comes from; None: never loaded.
LOADS: tuple[tuple[str, Literal["warm", "cold"] | None], ...] = (
    ("first", None), ("known", "cold"), ("warm", "warm"),
)  # fmt: skip

if TYPE_CHECKING:
    from multilora_cli.bench.offline import Driver
    from multilora_cli.engine.engine import Engine
    from multilora_cli.engine.messages import AdapterRef


def say(kind: str, **facts: Any) -> None:
    """One line, numbers with three decimals."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}
    print(json.dumps({"kind": kind, **rounded}), flush=True)


class Captures:
    """Seconds of the parts of every capture, summed up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: type, name: str, part: str) -> None:
        """Count the time of a method as `part`."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + took

        setattr(owner, name, timed)


def watch_captures() -> Captures:
    """Of every step that is captured from now on."""
    import torch

    from multilora_cli.engine.decode_graphs import DecodeGraphs, GraphMemory

    found = Captures()
    found.watch(DecodeGraphs, "_warm_up", "decode steps before they are captured")
    found.watch(GraphMemory, "record", "captures")
    found.watch(torch.cuda.CUDAGraph, "capture_begin", "of them: begin")
    found.watch(torch.cuda.CUDAGraph, "capture_end", "of them: end")
    return found


def steps(
    engine: "Engine", driver: "Driver", rows: int, refs: Sequence["AdapterRef"], temperature: float
) -> None:
    """Host milliseconds a step by phase, of steps that only decode."""
    from msgspec.structs import replace

    from multilora_cli.bench.neutral import Shape, make_submits

    shape = Shape(32, 400)
    first = driver.take_ids(rows)
    submits = make_submits(shape, rows, refs, engine.parts.vocab_size, first)
    if temperature:
        params = replace(submits[0].params, temperature=temperature, top_p=0.95)
        submits = [
            replace(submit, params=replace(params, seed=seed))
            for seed, submit in enumerate(submits)
        ]
    driver.begin(submits)
    driver.steps(20)
    before = engine.snapshot().counters
    gaps = driver.steps(100)
    after = engine.snapshot().counters
    grown = {name: after[name] - before[name] for name in after}
    count = grown["steps"] - grown["prompt_steps"]
    phases = {
        name.removesuffix("_seconds"): round(
            (value - grown[f"prompt_{name}"]) / max(count, 1) * 1e3, 3
        )
        for name, value in grown.items()
        if name.endswith("_seconds") and not name.startswith("prompt_")
    }
    host = sum(phases[name] for name in ("schedule", "launch", "answer", "beside"))
    say(
        "steps",
        rows=rows,
        adapters=len(refs),
        temperature=temperature,
        host_ms=host,
        step_ms=median(gaps) * 1e3,
        **phases,
    )
    driver.cancel(submits)


def loads(
    engine: "Engine", driver: "Driver", rows: int, refs: Sequence["AdapterRef"], kind: str
) -> None:
    """Every adapter to hot: as it comes, with its digest known, and from host memory."""
    from multilora_cli.bench.neutral import Shape, make_submits

    first = driver.take_ids(rows)
    submits = make_submits(Shape(32, 1500), rows, (), engine.parts.vocab_size, first)
    driver.begin(submits)
    usual = median(driver.steps(40)) * 1e3
    for name, tier in LOADS:
        times, longest = [], 0.0
        for ref in refs:
            if tier is not None:
                driver.evict(ref, tier)
            took, gaps = driver.load_beside(ref)
            times.append(took * 1e3)
            longest = max(longest, max(gaps) * 1e3)
            driver.steps(3)
        say(
            kind, tier=name, rows=rows, count=len(times), median_ms=median(times),
            worst_ms=max(times), gap_ms=usual, longest_gap_ms=longest,
        )  # fmt: skip
    driver.cancel(submits)


def with_dora(folder: Path, ref: "AdapterRef", target: Path) -> "AdapterRef":
    """A copy of an adapter in `target` with a magnitude of ones for every module."""
    import torch
    from msgspec.structs import replace
    from safetensors.torch import load_file, save_file

    from multilora_cli.adapters.digest import content_digest
    from multilora_cli.adapters.peft import read_adapter
    from multilora_cli.sizing.geometry import read_geometry

    source = Path(ref.path)
    tensors = load_file(source / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_B." in name]:
        magnitude = torch.ones(tensors[name].shape[0], dtype=tensors[name].dtype)
        tensors[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = magnitude
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    digest = content_digest(read_adapter(target, read_geometry(folder), max_rank=64))
    return replace(ref, name=f"dora-{target.name}", path=str(target), digest=digest)


def table(records: Sequence[dict[str, Any]]) -> str:
    """What was recorded, for docs/benchmarks.md."""
    steps = [r for r in records if r["kind"] == "steps"]
    lines = [
        "| rows | | decide | launch | answer | host in all | step |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in steps:
        what = f"{r['adapters']} adapters" if r["adapters"] else "no adapter"
        if r["temperature"]:
            what += f", temperature {r['temperature']:g}, top_p 0.95"
        lines.append(
            f"| {r['rows']} | {what} | {r['schedule']:.2f} | {r['launch']:.2f} | {r['answer']:.2f}"
            f" | {r['host_ms']:.2f} | {r['step_ms']:.2f} |"
        )
    lines.append("")
    for r in (r for r in records if r["kind"] == "start"):
        phases = ", ".join(f"{name} {r[name]:.1f}" for name in _PHASES if name in r)
        files = f", {r['files']} (`{r['command']}`, {r['commit']})" if "files" in r else ""
        lines.append(
            f"- Start with {r['cache']} kernel cache{files}, process to first token"
            f" {r['since_process_start_s']:.1f} s: {phases}."
        )
    for r in (r for r in records if r["kind"] in ("loads", "dora")):
        lines.append(
            f"- {_LOADED[r['kind']]}, {_TIERS[r['tier']]}, beside {r['rows']} rows: hot after"
            f" {r['median_ms']:.1f} ms (median of {r['count']}), tokens of others every"
            f" {r['gap_ms']:.1f} ms, at most {r['longest_gap_ms']:.1f}."
        )
    (facts,) = (r for r in records if r["kind"] == "facts")
    lines += ["", f"{facts['gpu']}: `{facts['command']}` (commit {facts['commit'][:7]})."]
    return "\n".join(lines)


_PHASES = ("torch", "import", "plan", "weights", "pool", "kernels", "steps", "graphs")
_LOADED = {
    "loads": "An adapter of 27 MB (rank 16 on attention)",
    "dora": "One of 27 MB with DoRA",
}
_TIERS = {
    "first": "from files for the first time",
    "known": "from files once more",
    "warm": "from host memory",
}


def main(arguments: argparse.Namespace) -> None:
    """The parts that are asked for, on one engine."""
    if arguments.table is not None:
        put(ROOT / "docs" / "benchmarks.md", BEGIN, table(read(arguments.table)), END)
        return
    from multilora_cli.bench.environment import commit
    from multilora_cli.bench.neutral import Setting, Shape, make_submits
    from multilora_cli.bench.offline import Driver
    from multilora_cli.bench.offline_report import Phases, process_age_s
    from multilora_cli.cli.bench_engine import EngineOptions, engine_for, make_adapters

    parts = arguments.parts.split(",")
    rows = [int(count) for count in arguments.rows.split(",")]
    texts = [f"dummy:rank=16,targets=attention,seed={seed}" for seed in range(arguments.count)]
    setting = Setting("loads", "rank 16 on attention", tuple(texts))
    # Room for others: an adapter that takes the place of another one waits for its last step too.
    spare = Setting("spare", "never loaded", tuple(f"{text}0000" for text in texts))
    phases, captures, torch_s = Phases(), None, 0.0
    arguments_text = " ".join(sys.argv[1:])
    say("facts", command=f"python tools/host_times.py {arguments_text}".strip(), commit=commit())
    with tempfile.TemporaryDirectory() as scratch:
        options = EngineOptions(
            model=arguments.model, scratch=Path(scratch), cache=Path(scratch) / "cache",
            device=arguments.device, load_format="dummy", max_model_len=2048,
            max_num_seqs=max(rows), max_num_batched_tokens=arguments.tokens, capture_prompts=True,
            kv_bytes=arguments.kv_bytes, tight_bytes=2**31,
        )  # fmt: skip
        if arguments.device != "cpu":
            began = time.perf_counter()
            captures = watch_captures()
            torch_s = time.perf_counter() - began
        with engine_for(options, arguments.quantization, [setting, spare], phases) as engine:
            driver, folder = Driver(engine), options.folder(arguments.quantization)
            one = make_submits(Shape(128, 1), 1, (), engine.parts.vocab_size, driver.take_ids(1))
            first = driver.run(one)
            seconds = {name: round(value, 3) for name, value in phases.seconds.items()}
            say(
                "start", since_process_start_s=process_age_s(), first_token_s=first.wall_s,
                torch=torch_s, **seconds,
            )  # fmt: skip
            if captures is not None:
                say("captures", **captures.seconds)
            if parts == ["start"]:
                return
            refs = make_adapters(engine, setting, folder, options.cache).refs
            if "loads" in parts:
                loads(engine, driver, rows[0], refs, "loads")
            if "dora" in parts:
                doras = [with_dora(folder, ref, Path(scratch) / f"d{i}") for i, ref in
                         enumerate(refs[:1])]  # fmt: skip
                loads(engine, driver, rows[0], doras, "dora")
            if "steps" in parts:
                for count in rows:
                    steps(engine, driver, count, (), 0.0)
                    steps(engine, driver, count, (), 0.7)
                driver.load(refs)
                for count in rows:
                    steps(engine, driver, count, refs, 0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--parts", default="start,steps,loads,dora")
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--count", type=int, default=6, help="adapters")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--table", type=Path, help="write the table of these records and end")
    parser.add_argument("--kv-bytes", type=int, default=9 * 2**30)
    main(parser.parse_args())

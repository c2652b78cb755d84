"""`mlora bench --offline`: the engine in this process, without HTTP and without text."""

import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from multilora_cli.cli import bench_flags as flags
from multilora_cli.cli.console import Console
from multilora_cli.cli.options import JsonOption, QuietOption, parse_flag

if TYPE_CHECKING:
    from multilora_cli.bench.neutral import Setting, Shape
    from multilora_cli.bench.offline import Driver
    from multilora_cli.bench.offline_report import Phases
    from multilora_cli.cli.bench_engine import EngineOptions
    from multilora_cli.engine.engine import Engine
    from multilora_cli.engine.messages import AdapterRef, Submit
    from multilora_cli.sizing.hardware import Gpu


def offline(
    model: flags.OfflineModel = None,
    settings: flags.OfflineSettings = "base,one,distinct,mixed,pool",
    quantization: flags.OfflineQuantization = "none",
    batch: flags.OfflineBatch = "1,16,64,256",
    lengths: flags.OfflineLengths = "128:128",
    rounds: flags.OfflineRounds = 1,
    adapters: flags.OfflineAdapters = 64,
    loads: flags.OfflineLoads = 0,
    capture_prompts: flags.CapturePrompts = True,
    device: flags.OfflineDevice = "auto",
    kv: flags.OfflineKv = "9GiB",
    tight_pool: flags.OfflineTightPool = "2.69GiB",
    max_model_len: flags.OfflineMaxModelLen = 2048,
    load_format: flags.OfflineLoadFormat = "dummy",
    gpu: flags.OfflineGpu = None,
    cache: flags.OfflineCache = None,
    output: flags.OfflineOutput = None,
    commit: flags.Commit = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the engine alone: milliseconds a decode step, beside what the card allows.

    B requests at once, greedy, end of sequence ignored; weights and adapters are random and made
    here. Settings and base formats are given as lists and share one start of this process.

    Example: mlora bench --offline --quantization none,awq --batch 1,64 --output engine.jsonl
    """
    from multilora_cli.bench.arms import parse_lengths
    from multilora_cli.bench.neutral import Shape, make_settings
    from multilora_cli.cli.bench_engine import EngineOptions
    from multilora_cli.cli.bench_options import check_writable
    from multilora_cli.sizing.hardware import find_gpu, rated_gpu
    from multilora_cli.units import parse_size

    check_writable(output, "--output")
    console = Console(as_json=as_json, quiet=quiet)
    model = model or usual_model(console, device, "measured")
    batches = _numbers("--batch", batch)
    inputs, outputs = parse_lengths(lengths, 1, 0)
    bench = _Bench(
        console=console,
        model=model,
        quantizations=_choices("--quantization", quantization, ("none", "fp8", "awq")),
        settings=make_settings(settings.split(","), adapters),
        batches=batches,
        shape=Shape(inputs[0], outputs[0], rounds),
        gpu=rated_gpu(device) if gpu is None else find_gpu(gpu),
        output=output,
        commit=commit,
        arguments=tuple(sys.argv[1:]),
        loads=loads,
    )
    with tempfile.TemporaryDirectory(prefix="mlora-bench-") as scratch:
        options = EngineOptions(
            model=model,
            scratch=Path(scratch),
            cache=cache or Path(scratch) / "adapters",
            device=device,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max(256, *batches),
            max_num_batched_tokens=8192,
            capture_prompts=capture_prompts,
            kv_bytes=parse_flag("--kv", kv, parse_size),
            tight_bytes=parse_flag("--tight-pool", tight_pool, parse_size),
        )
        records = bench.run(options)
    _show(console, records)
    if any(record["kind"] == "failure" for record in records):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Bench:
    """Everything that is measured in one call of the command."""

    console: Console
    model: str
    quantizations: tuple[str, ...]
    settings: "tuple[Setting, ...]"
    batches: tuple[int, ...]
    shape: "Shape"
    gpu: "Gpu | None"
    output: Path | None
    commit: str | None
    arguments: tuple[str, ...]
    loads: int  # adapters to load while others decode

    def run(self, options: "EngineOptions") -> list[dict[str, Any]]:
        """All records; each is on disk as soon as it is known."""
        records: list[dict[str, Any]] = []
        for quantization in self.quantizations:
            options.folder(quantization)  # a wrong name is told before anything is started
        for quantization in self.quantizations:
            for settings in self._groups():
                try:
                    self._engine(options, quantization, settings, records)
                except Exception as error:  # the other bases are still worth their time
                    self._failed(quantization, settings, error, records)
        return records

    def _groups(self) -> "list[tuple[Setting, ...]]":
        """Settings that can share one engine."""
        roomy = tuple(setting for setting in self.settings if not setting.is_tight)
        return [*([roomy] if roomy else []), *((s,) for s in self.settings if s.is_tight)]

    def _engine(
        self,
        options: "EngineOptions",
        quantization: str,
        settings: "Sequence[Setting]",
        records: list[dict[str, Any]],
    ) -> None:
        """One engine: its start, then every setting and batch."""
        from multilora_cli.bench.neutral import loading_setting
        from multilora_cli.bench.offline import Driver
        from multilora_cli.bench.offline_report import Phases
        from multilora_cli.cli.bench_engine import engine_for

        phases = Phases()
        names = ",".join(setting.name for setting in settings)
        self.console.note(f"{quantization}: starting an engine for {names}")
        loads = self.loads if not settings[0].is_tight else 0
        room_for = (*settings, loading_setting(loads)) if loads else settings
        with engine_for(options, quantization, room_for, phases) as engine:
            session = _Session(self, options, quantization, engine, Driver(engine))
            self._add(records, session.start(names, phases))
            for setting in settings:
                for record in session.cells(setting):
                    self._add(records, record)
            if loads:
                self._add(records, session.loads(loads))

    def _add(self, records: list[dict[str, Any]], record: dict[str, Any]) -> None:
        from multilora_cli.bench.offline_report import describe, facts
        from multilora_cli.bench.rows import append

        device = record.pop("device", "")
        self.console.note(describe(record))
        record |= facts(self.arguments, device, self.commit)
        records.append(record)
        if self.output is not None:
            append(self.output, record, "--output")

    def _failed(
        self,
        quantization: str,
        settings: "Sequence[Setting]",
        error: Exception,
        records: list[dict[str, Any]],
    ) -> None:
        from multilora_cli.errors import MloraError

        names = ",".join(setting.name for setting in settings)
        text = error.message if isinstance(error, MloraError) else repr(error)
        self.console.error(f"{quantization}, {names}: {text}")
        if not isinstance(error, MloraError):
            traceback.print_exception(error)
        failure = {"kind": "failure", "model": self.model, "quantization": quantization}
        self._add(records, {**failure, "settings": names, "error": text})


@dataclass(frozen=True)
class _Session:
    """One engine and what is asked of it."""

    bench: _Bench
    options: "EngineOptions"
    quantization: str
    engine: "Engine"
    driver: "Driver"

    def start(self, settings: str, phases: "Phases") -> dict[str, Any]:
        """The first token after the start, and how long everything up to it took."""
        from multilora_cli.bench.offline_report import SCHEMA, process_age_s

        shape = replace(self.bench.shape, output_tokens=1)
        first = self.driver.run(self._submits(shape, 1, ()))
        ready = self.engine.parts.ready
        return {
            "kind": "start",
            "schema": SCHEMA,
            "model": self.bench.model,
            "quantization": self.quantization,
            "settings": settings,
            "start_s": {
                **{name: round(value, 3) for name, value in phases.seconds.items()},
                "first token": round(first.wall_s, 3),
                "since process start": process_age_s(),
            },
            "allocated": dict(ready.allocated),
            "pool_pages": ready.num_pages,
            "device": ready.device,
        }

    def cells(self, setting: "Setting") -> Iterator[dict[str, Any]]:
        """Every batch size of one setting, after one batch each to warm up."""
        from multilora_cli.bench.offline import figures
        from multilora_cli.bench.offline_report import cell
        from multilora_cli.cli.bench_engine import make_adapters

        bench, device = self.bench, self.engine.parts.ready.device
        folder = self.options.folder(self.quantization)
        adapters = make_adapters(self.engine, setting, folder, self.options.cache)
        load_s = self.driver.load(() if setting.is_tight else adapters.refs)
        for batch in bench.batches:
            submits = [
                self._submits(bench.shape, batch, adapters.refs)
                for _ in range(bench.shape.rounds + 1)
            ]
            batches = [self.driver.run(each) for each in submits][1:]
            yield {
                **cell(
                    bench.model, self.quantization, setting, batch, bench.shape, figures(batches)
                ),
                **self._bound(batch, adapters.weight_bytes),
                "load_s": round(load_s, 3),
                "device": device,
            }

    def loads(self, count: int) -> dict[str, Any]:
        """How long adapters take to become hot beside the largest batch, and what it feels."""
        from multilora_cli.bench.loading import measure_loads
        from multilora_cli.bench.neutral import Shape, loading_setting
        from multilora_cli.bench.offline_report import SCHEMA
        from multilora_cli.bench.rows import rounded
        from multilora_cli.cli.bench_engine import make_adapters

        bench, batch = self.bench, min(max(self.bench.batches), 64)
        folder = self.options.folder(self.quantization)
        adapters = make_adapters(self.engine, loading_setting(count), folder, self.options.cache)
        room = self.engine.parts.max_model_len - bench.shape.input_tokens
        submits = self._submits(replace(bench.shape, output_tokens=room), batch, ())
        long = Shape(room, 1, seed=1)
        (prompt,) = self._submits(long, 1, ())
        found = measure_loads(self.driver, submits, adapters.refs, prompt)
        return {
            "kind": "loads",
            "schema": SCHEMA,
            "model": bench.model,
            "quantization": self.quantization,
            "batch": batch,
            "adapter_bytes": adapters.weight_bytes[0],
            **rounded(asdict(found)),
            "device": self.engine.parts.ready.device,
        }

    def _submits(
        self, shape: "Shape", batch: int, adapters: "Sequence[AdapterRef]"
    ) -> "list[Submit]":
        from multilora_cli.bench.neutral import make_submits

        vocab_size, first = self.engine.parts.vocab_size, self.driver.take_ids(batch)
        return make_submits(shape, batch, adapters, vocab_size, first)

    def _bound(self, batch: int, adapter_bytes: "Sequence[int]") -> dict[str, float]:
        """The least time of a step on the card, where it is known."""
        from multilora_cli.bench.offline_report import bound_ms
        from multilora_cli.cli.bench_engine import base_bytes_of
        from multilora_cli.sizing.geometry import read_geometry

        if self.bench.gpu is None:
            return {}
        folder = self.options.folder(self.quantization)
        base = base_bytes_of(self.engine, folder, self.quantization)
        itemsize = 4 if self.engine.parts.ready.dtype == "float32" else 2
        per_token = read_geometry(folder).kv_bytes_per_token(itemsize)
        shape, gpu = self.bench.shape, self.bench.gpu
        return {"bound_ms": round(bound_ms(base, per_token, shape, batch, adapter_bytes, gpu), 4)}


def _show(console: Console, records: "Sequence[dict[str, Any]]") -> None:
    from multilora_cli.bench.offline_report import cells_table, starts_table

    for title, (columns, rows) in (
        ("decode steps: ms (least possible), and tokens/s of whole batches", cells_table(records)),
        ("starts: seconds of each phase", starts_table(records)),
    ):
        if rows:
            console.table(columns, rows, title=title, spare=("settings",))
            console.line()
    console.value(list(records))


def usual_model(console: Console, device: str, what: str) -> str:
    """An 8B where a card can run it. On a CPU a step of one takes seconds: there it is tiny, and
    a note says that this was `what`: measured, written."""
    from multilora_cli.sizing.hardware import local_card

    if device != "cpu" and local_card() is not None:
        return "llama-3-8b"
    console.note(f"on a CPU the shape tiny is {what}; another one: --model llama-3-8b")
    return "tiny"


def _choices(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    from multilora_cli.errors import BadInput

    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(known):
        raise BadInput(f"{flag} {text}: expected some of {','.join(known)}")
    return names


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from multilora_cli.errors import BadInput

    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 4096 for part in parts):
        raise BadInput(f"{flag} {text}: expected numbers from 1 to 4096, such as 1,16,64")
    return tuple(dict.fromkeys(int(part) for part in parts))

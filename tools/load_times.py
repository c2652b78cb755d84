"""How long adapters take from the page cache to host memory beside a thread that runs steps.

    python tools/load_times.py
    python tools/load_times.py --model llama-3-8b --adapter rank=64,targets=all --step-ms 0

The engine's own loader threads read `dummy:` adapters, checks included. The stepping thread does
what the engine's loop does on a GPU: it holds the interpreter for `--host-ms` of every `--step-ms`.
No GPU is needed; the copy to it is not part of the times.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from msgspec.structs import replace

from multilora_cli.adapters.crew import Crew
from multilora_cli.adapters.entry import AdapterRequest, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.adapters.vectors import UnknownBase
from multilora_cli.bench.geometries import config_folder
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.loader_threads import loader_threads, num_helpers
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.engine.process import settled_interpreter
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.pages import kv_page_bytes


@contextmanager
def stepping(host_s: float, step_s: float) -> Iterator[list[float]]:
    """Steps on a thread of their own; gives the list of how long each took beyond `step_s`."""
    late: list[float] = []
    stop = threading.Event()

    def run() -> None:
        tensor = torch.zeros(64)
        while not stop.is_set():
            began = time.perf_counter()
            while time.perf_counter() - began < host_s:
                tensor.add_(1)
            rest = began + step_s - time.perf_counter()
            if rest > 0:
                time.sleep(rest)
            late.append(time.perf_counter() - began - step_s)

    thread = threading.Thread(target=run)
    if step_s:
        thread.start()
    try:
        yield late
    finally:
        stop.set()
        if step_s:
            thread.join()


def adapters(
    folder: Path, geometry: ModelGeometry, base: Path, text: str, count: int
) -> list[AdapterRef]:
    """Written below `folder`, their bytes in the page cache and their digests known."""
    registry = Registry(ServedBase(geometry, "base", folder=base), cache=folder / "cache")
    requests = [AdapterRequest(f"a{i}", f"dummy:{text},seed={i}") for i in range(count)]
    for _, error in registry.register_all(requests, num_threads=2):
        raise error
    entries = [registry.with_digest(request.name) for request in requests]
    return list(map(AdapterRef.of, entries))


def touch(ref: AdapterRef) -> None:
    """Make new versions of the adapter's files, of which nobody knows the digest."""
    for file in Path(ref.path).iterdir():
        file.touch()


def main(arguments: argparse.Namespace) -> None:
    """Every adapter: hashed and read, then with a known digest, then once more."""
    with tempfile.TemporaryDirectory() as scratch:
        base = config_folder(arguments.model, "none", Path(scratch))
        geometry = read_geometry(base)
        refs = adapters(Path(scratch), geometry, base, arguments.adapter, arguments.count)
        helpers = num_helpers() if arguments.helpers is None else arguments.helpers
        threads = loader_threads(1 + helpers, torch.device("cpu"))
        crew = Crew(threads, helpers)

        def new_reader() -> AdapterReader:
            """One that has read no header."""
            return AdapterReader(
                EngineConfig(model_path=str(base)), geometry, kv_page_bytes(geometry, 2),
                UnknownBase(geometry), torch.bfloat16, Failpoints({}), crew,
            )  # fmt: skip

        with (
            settled_interpreter(),
            stepping(arguments.host_ms / 1e3, arguments.step_ms / 1e3) as late,
        ):

            def build(reader: AdapterReader, ref: AdapterRef) -> None:
                plan, fill = reader.open(ref)
                fill(pages[: plan.num_pages * plan.page_bytes].view(plan.num_pages, -1))

            def load(reader: AdapterReader, ref: AdapterRef) -> float:
                began = time.perf_counter()
                threads.submit(build, reader, ref).result()
                took = time.perf_counter() - began
                time.sleep(0.02)
                return took * 1e3

            reader = new_reader()
            plan, _ = reader.open(refs[0])
            # Touched once, as pinned memory is.
            pages = torch.zeros(plan.num_pages * plan.page_bytes, dtype=torch.uint8)
            load(reader, refs[0])  # plan and buffers
            for ref in refs[1:]:
                touch(ref)
            time.sleep(0.05)  # younger files are waited for
            refs = [replace(ref, files=()) for ref in refs]  # as if the front had not hashed them
            for name in ("digest unknown", "digest known", "again"):
                if name == "digest known":
                    reader = new_reader()
                times = [load(reader, ref) for ref in refs[1:]]
                print(
                    f"{name}: median {median(times):.1f} ms, {min(times):.1f} to {max(times):.1f}"
                )
        if late:
            print(f"steps: {median(late) * 1e3:.2f} ms late, at most {max(late) * 1e3:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--adapter", default="rank=16,targets=attention")
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument(
        "--helpers", type=int, help="threads beside a load's own; default: as served"
    )
    parser.add_argument("--host-ms", type=float, default=1.0)
    parser.add_argument("--step-ms", type=float, default=5.6)
    main(parser.parse_args())

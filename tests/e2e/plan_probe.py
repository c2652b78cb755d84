"""Starts one engine on dummy weights, runs its largest steps, and prints planned beside allocated.

    python -m tests.e2e.plan_probe '{"storage": "awq", "model": "llama-3-8b", "device": "cuda:0"}'

JSON lines as they come to be: what torch and the driver count after every phase of the start, every
captured step (its nodes, what it took of torch's pool and of the driver), and at the end one value
with planned, allocated and the deviations above 2 %. A process of its own, so that nothing else is
on the device's books.
"""

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pynvml
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.source import resolve_source
from multilora_cli.bench.geometries import config_folder
from multilora_cli.engine.assemble import build_engine
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.decode_graphs import Captured, GraphMemory
from multilora_cli.engine.engine import Engine
from multilora_cli.engine.messages import AdapterRef, SamplingParams, Submit
from multilora_cli.sizing.device import deviations
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry

# (rank, projections, whether DoRA as well)
ADAPTERS = (
    (8, "all", False), (16, "attention", False), (32, "all", False), (64, "attention", False),
    (16, "attention", True),
)  # fmt: skip
MAX_RANK = 64
_LOOK_AT = 7  # of every so many captured steps the nodes are counted; 7 meets all three ranks
_PLAIN = SamplingParams(max_tokens=4, temperature=0.0)
# The dearest that can be asked for.
_DEAREST = SamplingParams(
    max_tokens=4, temperature=0.9, top_p=0.9, top_k=50, seed=1, logprobs=5, presence_penalty=0.1,
    repetition_penalty=1.1,
)  # fmt: skip


def say(**found: Any) -> None:
    """One line of the report."""
    print(json.dumps(found), flush=True)


class Books:
    """What torch and the driver count on a device, beside what the driver counted before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        if device.type == "cuda":
            pynvml.nvmlInit()
            self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._before = self._used()

    def _used(self) -> int:
        """NVML's count of the whole card, which makes no context."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._card).used)

    def now(self) -> dict[str, int]:
        """Bytes that tensors hold, that torch keeps, and that the driver counts beside those."""
        if self._device.type != "cuda":
            return {}
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": reserved,
            "outside": self._used() - self._before - reserved,
            "outside_if_alone": total - free - reserved,
        }

    def say(self, phase: str) -> None:
        """A line of the report."""
        gc.collect()
        seconds = round(time.perf_counter() - self._began, 2)
        say(kind="phase", phase=phase, seconds=seconds, **self.now())


def watch_captures(books: Books) -> None:
    """Report every captured step: nodes, bytes of torch's pool, bytes of the driver."""
    plain, numbers = GraphMemory.record, count()

    def record(memory: GraphMemory, work: Callable[[], None]) -> Captured:
        number, before = next(numbers), books.now()
        captured = plain(memory, work)
        after = books.now()
        captured.replay()
        replayed = books.now()
        say(
            kind="capture",
            number=number,
            nodes=_try_nodes(work) if number % _LOOK_AT == 0 else None,
            pool=after["reserved"] - before["reserved"],
            driver=after["outside"] - before["outside"],
            driver_at_replay=replayed["outside"] - after["outside"],
            outside=replayed["outside"],
        )
        return captured

    GraphMemory.record = record  # type: ignore[method-assign]


def _try_nodes(work: Callable[[], None]) -> dict[str, int] | str:
    """What `_nodes` says, or why it could not: the bytes are worth having without it."""
    try:
        return _nodes(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _nodes(work: Callable[[], None]) -> dict[str, int]:
    """Nodes by kind of what `work` launches, and what eight more copies of it take each."""
    driver = ctypes.CDLL("libcuda.so.1")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds: dict[str, int] = {"all": count.value}
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        name = {0: "kernel", 1: "memcpy", 2: "memset"}.get(kind.value, str(kind.value))
        kinds[name] = kinds.get(name, 0) + 1
    free = torch.cuda.mem_get_info()[0]
    copies = []
    for _ in range(8):
        copy = ctypes.c_void_p()
        assert (
            driver.cuGraphInstantiateWithFlags(ctypes.byref(copy), handle, ctypes.c_ulonglong(0))
            == 0
        )
        copies.append(copy)
    kinds["bytes_a_copy"] = (free - torch.cuda.mem_get_info()[0]) // 8
    for copy in copies:
        driver.cuGraphExecDestroy(copy)
    return kinds


def main(asked: dict[str, Any]) -> None:
    """Measure one setting; `asked` may hold fields of EngineConfig under `config`."""
    device = torch.device(asked["device"])
    books = Books(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = config_folder(asked["model"], asked["storage"], Path(scratch))
        refs = _adapters(folder, Path(scratch))
        config = EngineConfig(
            model_path=str(folder),
            device=asked["device"],
            quantization=asked["storage"],
            load_format="dummy",
            num_slots=len(refs) + 1,
            host_adapter_bytes=asked.get("host_bytes", 2 * 2**30),
            prefix_caching=False,
            max_lora_rank=MAX_RANK,
            **asked.get("config", {}),
        )
        say(kind="asked", **asked)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # makes the context
            books.say("context")
            if asked.get("watch"):
                watch_captures(books)
        seen = {""}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen.add(phase)
                books.say(f"before {phase}")

        engine = build_engine(config, report)
        books.say("started")
        _measure(engine, config, refs, books)


def _measure(engine: Engine, config: EngineConfig, refs: list[AdapterRef], books: Books) -> None:
    ready, allocated = engine.parts.ready, dict(engine.parts.ready.allocated)
    is_cuda = ready.device.startswith("cuda")
    peaks = {}
    for name, params, adapters in (
        ("plain", _PLAIN, refs[:4]), ("dearest", _DEAREST, refs[:4]), ("extras", _PLAIN, refs),
    ):  # fmt: skip
        before = books.now()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        _largest_step(engine, config, adapters, params)
        if is_cuda:
            peaks[name] = {
                "allocated": torch.cuda.max_memory_allocated() - before["allocated"],
                "reserved": torch.cuda.max_memory_reserved() - before["reserved"],
                "reserved_in_all": torch.cuda.max_memory_reserved(),
            }
        books.say(f"after {name} steps")
    if is_cuda:
        allocated["lists"] = engine.parts.runner._builder.segments.nbytes  # type: ignore[attr-defined]
        allocated.setdefault("workspace", max(peak["allocated"] for peak in peaks.values()))
    say(
        kind="result",
        storage=config.quantization,
        dtype=ready.dtype,
        planned=ready.planned,
        allocated=allocated,
        peaks=peaks,
        limit=config.device_bytes,
        books=books.now(),
        deviations=deviations(ready.planned, allocated),
    )


def _adapters(folder: Path, cache: Path) -> list[AdapterRef]:
    """Dummy adapters of mixed ranks, on attention and on all projections in turn, one with DoRA."""
    geometry, refs = read_geometry(folder), []
    for index, (rank, targets, is_dora) in enumerate(ADAPTERS):
        spec = f"dummy:rank={rank},targets={targets},seed={index}"
        path = resolve_source(spec, relative_to=cache, geometry=geometry, cache=cache)
        if is_dora:
            _add_magnitudes(path, geometry)
        digest = content_digest(read_adapter(path, geometry, max_rank=MAX_RANK))
        refs.append(AdapterRef(f"a{index}", digest, str(path), 1))
    return refs


def _add_magnitudes(path: Path, geometry: ModelGeometry) -> None:
    """Make the adapter in `path` one with DoRA."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
        rows = tensors[name].shape[0]
        magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
        tensors[magnitude] = torch.ones(rows, dtype=torch.bfloat16)
    save_file(tensors, file)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))


def _largest_step(
    engine: Engine, config: EngineConfig, refs: list[AdapterRef], params: SamplingParams
) -> None:
    """Prompts that fill a step, every sequence with an adapter, then all of them decoding."""
    vocab = engine.parts.vocab_size
    length = max(config.max_num_batched_tokens // config.max_num_seqs, 2)
    for index in range(config.max_num_seqs):
        prompt = [(index * 31 + position) % vocab for position in range(length)]
        engine.handle(Submit(index + 1, prompt, params, refs[index % len(refs)]))
    left = set(range(1, config.max_num_seqs + 1))
    while left:
        for delta in engine.step():
            assert delta.fault is None, delta.fault
            if delta.finish_reason is not None:
                left.discard(delta.request_id)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

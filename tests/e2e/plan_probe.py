"""Starts one engine on dummy weights, runs its largest steps, and prints planned beside allocated.

    python -m tests.e2e.plan_probe '{"storage": "awq", "model": "llama-3-8b", "device": "cuda:0"}'

JSON lines as they come to be: what torch and the driver count after every phase of the start, and
at the end planned, allocated and the deviations above 2 %. A process of its own, so that nothing
else is on the device's books.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
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
from multilora_cli.engine.engine import Engine
from multilora_cli.engine.messages import AdapterRef, SamplingParams, Submit
from multilora_cli.engine.model_runner import ModelRunner
from multilora_cli.sizing.device import deviations
from multilora_cli.sizing.geometry import read_geometry

# (rank, projections, whether B has a bias as well)
ADAPTERS = (
    (8, "all", False), (16, "attention", False), (32, "all", False), (64, "attention", False),
    (16, "attention", True),
)  # fmt: skip
MAX_RANK = 64
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
        seen = {""}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen.add(phase)
                books.say(f"before {phase}")

        engine = build_engine(config, report)
        books.say("started")
        _measure(engine, config, refs, books)


def _measure(engine: Engine, config: EngineConfig, refs: list[AdapterRef], books: Books) -> None:
    """The largest step of prompts, then every sequence decoding with an adapter."""
    ready = engine.parts.ready
    say(kind="started", planned=ready.planned, allocated=ready.allocated)
    say(kind="captured", after="start", **_captured(engine))
    is_cuda = ready.device.startswith("cuda")
    kept = 0
    # With adapters all prompts are of one token: what compiles the kernels of longer ones takes
    # longer than all the rest, and no memory.
    length = max(config.max_num_batched_tokens // config.max_num_seqs, 2)
    for name, adapters, tokens in (("prompts", [None], length), ("adapters", refs, 1)):
        _run(engine, config.max_num_seqs, adapters, tokens)
        if is_cuda:
            kept = max(kept, torch.cuda.max_memory_reserved())
        books.say(f"after {name}")
        say(kind="captured", after=name, **_captured(engine))
    say(
        kind="result",
        storage=config.quantization,
        dtype=ready.dtype,
        planned=ready.planned,
        allocated=ready.allocated,
        deviations=deviations(ready.planned, ready.allocated),
        kept=kept,
        limit=config.device_bytes,
        books=books.now(),
    )


def _captured(engine: Engine) -> dict[str, int]:
    """How many steps are captured, and what torch's pool and the driver hold of them."""
    runner = engine.parts.runner
    assert isinstance(runner, ModelRunner)
    graphs = [found for found in (runner._graphs, runner._prompt_graphs) if found is not None]
    if not graphs:
        return {}
    memory = runner._graphs._record.__self__  # type: ignore[union-attr]
    return {
        "steps": sum(len(found._graphs) for found in graphs),
        "pool": memory.pool_bytes,
        "driver": memory.driver_bytes,
        "fixed": sum(found.nbytes for found in graphs),
    }


def _adapters(folder: Path, cache: Path) -> list[AdapterRef]:
    """Dummy adapters of mixed ranks, on attention or on all projections, one with biases."""
    geometry, refs = read_geometry(folder), []
    for index, (rank, targets, has_bias) in enumerate(ADAPTERS):
        spec = f"dummy:rank={rank},targets={targets},seed={index}"
        path = resolve_source(spec, relative_to=cache, geometry=geometry, cache=cache)
        if has_bias:
            _add_biases(path)
        digest = content_digest(read_adapter(path, geometry, max_rank=MAX_RANK))
        refs.append(AdapterRef(f"a{index}", digest, str(path), 1))
    return refs


def _add_biases(path: Path) -> None:
    """Make the adapter in `path` one with lora_bias."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
        bias = torch.full((tensors[name].shape[0],), 0.01, dtype=torch.bfloat16)
        tensors[name.replace("weight", "bias")] = bias
    save_file(tensors, file)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))


def _run(engine: Engine, count: int, refs: Sequence[AdapterRef | None], num_tokens: int) -> None:
    """`count` sequences of the adapters in turn, each with a prompt of so many tokens."""
    vocab = engine.parts.vocab_size
    for index in range(count):
        prompt = [(index * 31 + position) % vocab for position in range(num_tokens)]
        engine.handle(Submit(index + 1, prompt, _DEAREST, refs[index % len(refs)]))
    left = set(range(1, count + 1))
    while left:
        for delta in engine.step():
            assert delta.fault is None, delta.fault
            if delta.finish_reason is not None:
                left.discard(delta.request_id)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

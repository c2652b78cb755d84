"""Starts one engine on dummy weights, runs its largest step, and prints planned beside allocated.

    python -m tests.e2e.plan_probe '{"storage": "awq", "model": "llama-3-8b", "device": "cuda:0"}'

One JSON value: what was planned, what the parts say they took, what torch and the driver count, and
the deviations above 2 %. A process of its own, so that nothing else is on the device's books.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

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
from tests.device_meter import DeviceMeter

RANKS = (8, 16, 32, 64)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure one setting; `asked` may hold fields of EngineConfig under `config`."""
    device = torch.device(asked["device"])
    count = asked.get("adapters", 16)
    with tempfile.TemporaryDirectory() as scratch:
        folder = config_folder(asked["model"], asked["storage"], Path(scratch))
        refs = _adapters(folder, Path(scratch), count)
        config = EngineConfig(
            model_path=str(folder),
            device=asked["device"],
            quantization=asked["storage"],
            load_format="dummy",
            num_slots=count + 1,
            host_adapter_bytes=asked.get("host_bytes", 8 * 2**30),
            prefix_caching=False,
            max_lora_rank=max(RANKS),
            **asked.get("config", {}),
        )
        return _measure(config, device, refs)


def _measure(config: EngineConfig, device: torch.device, refs: list[AdapterRef]) -> dict[str, Any]:
    meter = DeviceMeter(device)
    meter.note_context()
    engine = build_engine(config)
    gc.collect()
    meter.note("everything at start")
    ready, allocated = engine.parts.ready, dict(engine.parts.ready.allocated)
    planned = {k: v for k, v in ready.planned.items() if k not in ("workspace", "graphs")}
    with meter.peak("workspace"):
        _largest_step(engine, config, refs)
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    meter.note_context("context at the end")
    if device.type == "cuda":
        allocated["workspace"] = meter.parts["workspace"]
        runner = engine.parts.runner
        assert isinstance(runner, ModelRunner)
        allocated["lists"] = runner._builder.segments.nbytes  # those of prompts have come since
    return {
        "storage": config.quantization,
        "dtype": ready.dtype,
        "planned": ready.planned,
        "allocated": allocated,
        "metered": meter.parts,
        "planned_at_start": sum(planned.values()),
        "reserved_at_the_end": reserved,
        "limit": config.device_bytes,
        "deviations": deviations(ready.planned, allocated),
    }


def _adapters(folder: Path, cache: Path, count: int) -> list[AdapterRef]:
    """`count` dummy adapters of mixed ranks, on attention and on all projections in turn."""
    geometry, refs = read_geometry(folder), []
    for index in range(count):
        targets = ("all", "attention")[index % 2]
        spec = f"dummy:rank={RANKS[index % len(RANKS)]},targets={targets},seed={index}"
        path = resolve_source(spec, relative_to=cache, geometry=geometry, cache=cache)
        digest = content_digest(read_adapter(path, geometry, max_rank=max(RANKS)))
        refs.append(AdapterRef(f"a{index}", digest, str(path), 1))
    return refs


def _largest_step(engine: Engine, config: EngineConfig, refs: list[AdapterRef]) -> None:
    """Prompts that fill a step, every sequence with an adapter, then all of them decoding under
    the dearest sampling that can be asked for."""
    vocab = engine.parts.vocab_size
    length = max(config.max_num_batched_tokens // config.max_num_seqs, 2)
    params = SamplingParams(
        max_tokens=16, temperature=0.9, top_p=0.9, top_k=50, seed=1, logprobs=5,
        presence_penalty=0.1, repetition_penalty=1.1,
    )  # fmt: skip
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
    print(json.dumps(main(json.loads(sys.argv[1]))))

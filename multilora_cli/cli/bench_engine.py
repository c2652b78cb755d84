"""Engines in this process with dummy weights and adapters, for `mlora bench --offline`."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from multilora_cli.bench.neutral import Setting
    from multilora_cli.bench.offline_report import Phases
    from multilora_cli.engine.config import EngineConfig
    from multilora_cli.engine.engine import Engine
    from multilora_cli.engine.messages import AdapterRef
    from multilora_cli.sizing.budget import BaseBytes
    from multilora_cli.sizing.geometry import ModelGeometry
    from multilora_cli.sizing.pages import AdapterCost


@dataclass(frozen=True)
class EngineOptions:
    """What an engine of the benchmark is started with. Sizes in bytes."""

    model: str  # a shape's name, or a folder with a config.json
    scratch: Path  # for what is written on the way
    cache: Path  # for adapters
    device: str
    load_format: Literal["auto", "dummy"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    capture_prompts: bool
    kv_bytes: int
    tight_bytes: int  # pool of settings in which adapters and KV have little room

    def folder(self, quantization: str) -> Path:
        """Where the config.json of the base is. Raises BadInput."""
        from multilora_cli.bench.geometries import config_folder

        return config_folder(self.model, quantization, self.scratch)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a setting, in order, and the bytes that a step reads of each."""

    refs: tuple["AdapterRef", ...]
    weight_bytes: tuple[int, ...]


@contextmanager
def engine_for(
    options: EngineOptions, quantization: str, settings: "Sequence[Setting]", phases: "Phases"
) -> "Iterator[Engine]":
    """An engine with room for the adapters of all `settings`, its memory given back at the end."""
    import gc

    from multilora_cli.engine.process import settled_interpreter

    with phases.watching("import"):
        from multilora_cli.engine.assemble import build_engine

        phases.report("plan", 0, 1)
        engine = build_engine(_config(options, quantization, settings), phases.report)
    try:
        with settled_interpreter():
            yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        _empty_device_cache()


def _empty_device_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _config(
    options: EngineOptions, quantization: str, settings: "Sequence[Setting]"
) -> "EngineConfig":
    """The workload's limits: KV beside all adapters, no prefix cache."""
    from multilora_cli.engine.config import EngineConfig
    from multilora_cli.engine.device_memory import choose_device, choose_dtype
    from multilora_cli.sizing.budget import num_slots
    from multilora_cli.sizing.geometry import read_geometry
    from multilora_cli.sizing.pages import kv_page_bytes

    folder = options.folder(quantization)
    geometry = read_geometry(folder)
    itemsize = choose_dtype("auto", choose_device(options.device)).itemsize
    page = kv_page_bytes(geometry, itemsize)
    sources = {source for setting in settings for source in setting.sources}
    image_bytes = sum(_cost(geometry, source, page, itemsize).pool_bytes for source in sources)
    tight = any(setting.is_tight for setting in settings)
    return EngineConfig(
        model_path=str(folder),
        device=options.device,
        quantization=quantization,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_slots=num_slots(len(sources)),
        pool_bytes=options.tight_bytes if tight else options.kv_bytes + image_bytes,
        host_adapter_bytes=image_bytes + 2**20 * len(sources),
        prefix_caching=False,
        num_loaders=4,
        capture_prompts=options.capture_prompts,
    )


def _cost(geometry: "ModelGeometry", source: str, page_bytes: int, itemsize: int) -> "AdapterCost":
    from multilora_cli.adapters.source.dummy import parse_spec
    from multilora_cli.sizing.pages import adapter_cost, uniform_ranks

    spec = parse_spec(source.partition(":")[2])
    ranks = uniform_ranks(geometry, spec.rank, spec.targets)
    return adapter_cost(geometry, ranks, page_bytes, itemsize)


def make_adapters(engine: "Engine", setting: "Setting", folder: Path, cache: Path) -> Adapters:
    """The adapters of `setting` as files below `cache`, registered as a server registers them."""
    from multilora_cli.adapters.entry import AdapterRequest, ServedBase
    from multilora_cli.adapters.registry import Registry
    from multilora_cli.engine.messages import AdapterRef
    from multilora_cli.sizing.geometry import read_geometry

    geometry, page = read_geometry(folder), engine.parts.pool.page_bytes
    registry = Registry(ServedBase(geometry, "base", folder=folder), cache=cache)
    names = {source.partition(":")[2]: source for source in setting.sources}
    requests = [AdapterRequest(_name(text), source) for text, source in names.items()]
    threads = _threads()
    for _, error in registry.register_all(requests, num_threads=threads):
        raise error
    with ThreadPoolExecutor(threads) as pool:
        entries = list(pool.map(lambda r: registry.with_digest(r.name), requests))
    itemsize = 4 if engine.parts.ready.dtype == "float32" else 2
    return Adapters(
        tuple(map(AdapterRef.of, entries)),
        tuple(_cost(geometry, s, page, itemsize).weight_bytes for s in setting.sources),
    )


def _name(text: str) -> str:
    """`rank=16,targets=all,seed=3` as a name: letters, digits, dots and dashes."""
    return text.replace("=", "").replace(",", "-")


def _threads() -> int:
    """Writing 64 adapters of 84 MB takes 0.25 s each on one core."""
    import os

    return min(len(os.sched_getaffinity(0)), 16)


def base_bytes_of(engine: "Engine", folder: Path, quantization: str) -> "BaseBytes":
    """What the engine's base weighs, by part."""
    import torch

    from multilora_cli.models.quantized import base_quantization, placed
    from multilora_cli.sizing.budget import base_bytes
    from multilora_cli.sizing.geometry import read_geometry

    geometry, ready = read_geometry(folder), engine.parts.ready
    found = base_quantization(folder, geometry, quantization, from_files=False)
    dtype = getattr(torch, ready.dtype)
    found = placed(found, torch.device(ready.device), dtype)
    return base_bytes(geometry, dtype.itemsize, found)

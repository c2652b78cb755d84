"""A fleet in the words of other servers: vLLM, Ray Serve LLM, vLLM's production stack.

What they cannot do is said in notes and never left out in silence.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from multilora_cli.fleet.schema import Adapter, AdapterPattern, Fleet

Target = Literal["vllm", "ray", "kubernetes"]
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has slots for
_SLOTS = 16  # where the file bounds no distinct adapters: every one of them costs the largest rank
_HUB = re.compile(r"hf:(?://)?([^@]+?)(?:@(.+))?/?")


@dataclass(frozen=True)
class ExportedAdapter:
    """One adapter of the fleet; `folder` holds it on this machine, `rank` is its largest."""

    declared: Adapter
    folder: Path | None = None
    rank: int | None = None  # None: it could not be read here
    has_more: bool = False  # DoRA, biases or whole matrices


@dataclass
class Export:
    """A configuration, and what it does not say."""

    document: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def export(fleet: Fleet, model: str, adapters: Sequence[ExportedAdapter], target: Target) -> Export:
    """`model`: a Hub id or an absolute folder; `adapters`: all that the file lists."""
    made = Export()
    write: dict[Target, Callable[[_Source, Export], None]] = {
        "vllm": _vllm, "ray": _ray, "kubernetes": _kubernetes,
    }  # fmt: skip
    write[target](_Source(fleet, model, adapters), made)
    made.notes += _lost(fleet, adapters)
    return made


@dataclass(frozen=True)
class _Source:
    fleet: Fleet
    model: str
    adapters: Sequence[ExportedAdapter]

    @property
    def name(self) -> str:
        return self.fleet.base.served_name

    @property
    def patterns(self) -> list[AdapterPattern]:
        return [each for each in self.fleet.adapters if isinstance(each, AdapterPattern)]

    def engine(self) -> dict[str, Any]:
        """vLLM's settings, by their names in Python."""
        base, limits, memory = self.fleet.base, self.fleet.limits, self.fleet.memory
        rank = max((adapter.rank or 0 for adapter in self.adapters), default=0)
        wanted = rank or min(limits.max_lora_rank, 64)
        slots = limits.max_loras or min(max(len(self.adapters), 1), _SLOTS)
        values: dict[str, Any] = {
            "revision": base.revision,
            "dtype": None if base.dtype == "auto" else base.dtype,
            "quantization": base.quantization if base.quantization == "fp8" else None,
            "kv_cache_dtype": None if base.kv_cache_dtype == "auto" else base.kv_cache_dtype,
            "max_model_len": base.max_model_len,
            "gpu_memory_utilization": memory.device_fraction,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "enable_lora": True,
            "max_lora_rank": next(size for size in _RANKS if size >= wanted),
            "max_loras": slots,
            "max_cpu_loras": max(len(self.adapters), slots),
        }
        return {key: value for key, value in values.items() if value is not None}


def _vllm(source: _Source, made: Export) -> None:
    """A file for `vllm serve --config`."""
    modules = []
    for adapter in source.adapters:
        place = _hub_id(adapter.declared) or (str(adapter.folder) if adapter.folder else None)
        if place is None:
            made.notes.append(f"{adapter.declared.name}: left out: {adapter.declared.source}")
            continue
        modules.append(f"{adapter.declared.name}={place}")
    settings = {key.replace("_", "-"): value for key, value in source.engine().items()}
    made.document = {
        "model": source.model,
        "served-model-name": source.name,
        "host": source.fleet.server.host,
        "port": source.fleet.server.port or 8000,
        **settings,
        **({"lora-modules": modules} if modules else {}),
    }
    _note_slots(source, made)
    _note_patterns(source, made, "vLLM finds no adapters by name")


def _ray(source: _Source, made: Export) -> None:
    """A file for `serve run`; requests name `base:adapter`."""
    engine = source.engine()
    roots = {_bucket_root(pattern.source, pattern.pattern) for pattern in source.patterns}
    for adapter in source.adapters:
        declared = adapter.declared
        root = _bucket_root(declared.source, declared.name)
        roots.add(root)
        if root is None:
            made.notes.append(
                f"{declared.name}: copy {declared.source} to <dynamic_lora_loading_path>"
                f"/{declared.name}"
            )
    known = sorted(root for root in roots if root is not None)
    if len(known) != 1:
        found = f" (found {', '.join(known)})" if known else ""
        made.notes.append(f"dynamic_lora_loading_path: set the one bucket they lie in{found}")
    config = {
        "model_loading_config": {"model_id": source.name, "model_source": source.model},
        "engine_kwargs": engine,
        "lora_config": {
            "dynamic_lora_loading_path": known[0] if len(known) == 1 else "s3://BUCKET/adapters",
            "max_num_adapters_per_replica": engine["max_loras"],
        },
    }
    made.document = {
        "applications": [
            {
                "name": "fleet",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [config]},
            }
        ]
    }
    made.notes.append(f"requests name an adapter as {source.name}:NAME")
    _note_slots(source, made)


def _kubernetes(source: _Source, made: Export) -> None:
    """Values for the Helm chart of vLLM's production stack, its LoRA controller on."""
    engine = source.engine()
    own = {"dtype": "dtype", "max_model_len": "maxModelLen", "max_num_seqs": "maxNumSeqs",
           "gpu_memory_utilization": "gpuMemoryUtilization", "max_loras": "maxLoras"}  # fmt: skip
    config = {own[key]: value for key, value in engine.items() if key in own}
    extra = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in engine.items()
        if key not in own and key != "enable_lora"
    ]
    name = _label(source.name)
    made.document = {
        "servingEngineSpec": {
            "modelSpec": [
                {
                    "name": name,
                    "repository": "vllm/vllm-openai",
                    "tag": "latest",
                    "modelURL": source.model,
                    "replicaCount": 1,
                    "requestCPU": 8,
                    "requestMemory": "32Gi",
                    "requestGPU": 1,
                    "enableLoRA": True,
                    "vllmConfig": {**config, "extraArgs": extra},
                    "env": [{"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}],
                }
            ]
        },
        "loraController": {"enableLoraController": True, "enabled": True},
        "loraAdapters": [_resource(adapter, source, made) for adapter in source.adapters],
    }
    made.notes.append("requestCPU, requestMemory, requestGPU and tag: set what the cluster has")
    _note_slots(source, made)
    _note_patterns(source, made, "the controller finds no adapters by name")


def _resource(adapter: ExportedAdapter, source: _Source, made: Export) -> dict[str, Any]:
    declared = adapter.declared
    origin: dict[str, Any] = {"adapterName": declared.name}
    hub = _hub_id(declared)
    if hub is not None:
        origin |= {"type": "huggingface", "repository": hub}
    else:
        path = f"/data/shared-pvc-storage/lora-adapters/{declared.name}"
        origin |= {"type": "local", "adapterPath": path}
        made.notes.append(f"{declared.name}: copy {declared.source} to {path} on the shared volume")
    return {
        "name": _label(declared.name),
        "baseModel": source.name,
        "adapterSource": origin,
        "loraAdapterDeploymentConfig": {"algorithm": "default"},
    }


def _note_slots(source: _Source, made: Export) -> None:
    engine = source.engine()
    ranks = [adapter.rank for adapter in source.adapters if adapter.rank]
    if ranks and min(ranks) < engine["max_lora_rank"]:
        made.notes.append(
            f"vLLM reserves {engine['max_loras']} slots of rank {engine['max_lora_rank']};"
            f" the fleet's ranks are {min(ranks)} to {max(ranks)}"
        )


def _note_patterns(source: _Source, made: Export, why: str) -> None:
    for pattern in source.patterns:
        made.notes.append(f"pattern {pattern.pattern}: left out: {why}")


def _lost(fleet: Fleet, adapters: Sequence[ExportedAdapter]) -> list[str]:
    """What a fleet says that none of the others can."""
    notes = []
    for adapter in adapters:
        declared = adapter.declared
        if adapter.rank is None:
            notes.append(f"{declared.name}: could not be read here: its rank is not counted")
        if adapter.has_more:
            notes.append(f"{declared.name}: has DoRA, biases or whole matrices: not served there")
        kept = [name for name in ("pin", "ttl", "digest") if getattr(declared, name) is not None]
        if declared.has_text_files:
            kept.append("tokenizer or chat_template")
        hub = _HUB.fullmatch(declared.source)
        if hub is not None and hub[2]:
            kept.append(f"revision {hub[2]}")
        if kept:
            notes.append(f"{declared.name}: {', '.join(kept)}: without a counterpart")
    if fleet.server.api_keys:
        notes.append("server.api_keys: tenants, their models and limits have no counterpart")
    if fleet.limits.weights or fleet.limits.max_adapter_bytes:
        notes.append("limits.weights, limits.max_adapter_bytes: without a counterpart")
    if fleet.memory.device_bytes is not None:
        notes.append(
            "memory.device_bytes: the share of memory, device_fraction, is written instead"
        )
    return notes


def _hub_id(declared: Adapter) -> str | None:
    match = _HUB.fullmatch(declared.source)
    return match[1] if match is not None else None


def _bucket_root(source: str, name: str) -> str | None:
    """What stands before the adapter's name in a bucket; None where that is not how it ends."""
    root = source.rstrip("/").removesuffix(f"/{name}")
    is_bucket = source.startswith("s3://")
    return root if is_bucket and root != source.rstrip("/") else None


def _label(name: str) -> str:
    """A name that Kubernetes takes."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63].strip("-")

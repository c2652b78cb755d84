"""From a fleet file to what the two processes are started with. No torch in this process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from multilora_cli.adapters.registry import AdapterRequest, Registry, ServedBase
from multilora_cli.adapters.source import is_remote
from multilora_cli.adapters.store import DiskStore
from multilora_cli.cli.base import (
    Report,
    cache_folder,
    compute_itemsize,
    fetch_base,
    open_store,
)
from multilora_cli.engine.config import EngineConfig
from multilora_cli.errors import MloraError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import LoadedFleet, load_fleet, resolve_secret
from multilora_cli.fleet.schema import Adapter
from multilora_cli.fleet.support import check_served
from multilora_cli.models.checkpoint import base_digest
from multilora_cli.server.config import ServerConfig
from multilora_cli.sizing.budget import num_slots
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.hardware import local_card


@dataclass(frozen=True)
class Startup:
    """Everything `serve` needs; `failures` are adapters that are refused, with the reason."""

    loaded: LoadedFleet
    geometry: ModelGeometry
    server: ServerConfig
    engine: EngineConfig
    registry: Registry
    num_adapters: int
    failures: tuple[tuple[str, MloraError], ...]


def prepare(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    report: Report,
    debug: bool = False,
) -> Startup:
    """Read the fleet, find the base, read every adapter's headers. Raises MloraError."""
    loaded = load_fleet(path, overrides)
    check_served(loaded)
    adapters = expand_adapters(loaded)
    report("base", 0, 1)
    folder = fetch_base(loaded, report)
    geometry = read_geometry(folder)
    report("base", 1, 1)
    roots = _roots(loaded, adapters)
    registry = _registry(loaded, folder, geometry, roots, open_store(loaded, adapters))
    failures = _register(registry, adapters, report)
    digest = base_digest(folder, loaded.fleet.base.load_format)
    engine = engine_config(loaded, folder, len(adapters), digest)
    if debug:
        engine = msgspec.structs.replace(engine, debug=True)
    return Startup(
        loaded=loaded,
        geometry=geometry,
        server=_server_config(loaded, folder, geometry, engine),
        engine=engine,
        registry=registry,
        num_adapters=len(adapters),
        failures=failures,
    )


def _registry(
    loaded: LoadedFleet,
    folder: Path,
    geometry: ModelGeometry,
    roots: Sequence[Path],
    store: DiskStore | None,
) -> Registry:
    fleet = loaded.fleet
    base = ServedBase(
        geometry=geometry,
        name=fleet.base.served_name,
        max_rank=fleet.limits.max_lora_rank,
        itemsize=compute_itemsize(loaded, has_card=_has_card(loaded)),
        folder=folder,
        model=fleet.base.model,
    )
    return Registry(
        base,
        relative_to=loaded.folder,
        roots=roots,
        cache=cache_folder() / "dummy",
        store=store,
    )


def _has_card(loaded: LoadedFleet) -> bool:
    return loaded.fleet.memory.device != "cpu" and local_card() is not None


def _roots(loaded: LoadedFleet, adapters: Sequence[Adapter]) -> tuple[Path, ...]:
    """Where adapters may be loaded from at run time: what the file says, else its own folders."""
    named = loaded.fleet.server.adapter_roots
    if named:
        return tuple((loaded.folder / Path(root).expanduser()).resolve() for root in named)
    from multilora_cli.demo import DEMO_ADAPTERS, demo_adapter_path

    own = {"demo": demo_adapter_path(DEMO_ADAPTERS[0]).parent, "dummy": cache_folder() / "dummy"}
    folders = set()
    for adapter in adapters:
        kind, colon, _ = adapter.source.partition(":")
        if not colon:
            folders.add((loaded.folder / Path(adapter.source).expanduser()).resolve().parent)
        elif kind in own:
            folders.add(own[kind])
    return tuple(sorted(folders))


def _register(
    registry: Registry, adapters: Sequence[Adapter], report: Report
) -> tuple[tuple[str, MloraError], ...]:
    requests = [
        AdapterRequest(
            name=adapter.name,
            source=adapter.source,
            pin=adapter.pin,
            priority=adapter.priority,
            digest=adapter.digest,
        )
        for adapter in adapters
    ]
    failures: list[tuple[str, MloraError]] = []
    num_threads = 8 if any(is_remote(request.source) for request in requests) else 2
    for start in range(0, len(requests), 64):  # progress in steps a person can see
        report("adapters", start, len(requests))
        failures += registry.register_all(requests[start : start + 64], num_threads=num_threads)
    report("adapters", len(requests), len(requests))
    return tuple(failures)


def _secret(reference: str, loaded: LoadedFleet) -> str:
    """The secret, taken out of this process's environment so that no child inherits it."""
    value = resolve_secret(reference, loaded.folder)
    kind, _, name = reference.partition(":")
    if kind == "env":
        os.environ.pop(name, None)
    return value


def _server_config(
    loaded: LoadedFleet, folder: Path, geometry: ModelGeometry, engine: EngineConfig
) -> ServerConfig:
    server = loaded.fleet.server
    references = {*server.api_keys, *([server.admin_key] if server.admin_key else [])}
    secrets = {reference: _secret(reference, loaded) for reference in sorted(references)}
    return ServerConfig(
        base_name=loaded.fleet.base.served_name,
        base_path=folder,
        base_digest=engine.base_digest,
        max_loras=engine.distinct_adapters,
        vocab_size=geometry.vocab_size,
        eos_token_ids=geometry.eos_token_ids,
        host=server.host,
        port=server.port,
        api_keys=tuple(secrets[key] for key in server.api_keys),
        admin_key=secrets[server.admin_key] if server.admin_key else None,
    )


def engine_config(
    loaded: LoadedFleet, folder: Path, num_adapters: int, digest: str
) -> EngineConfig:
    """What the engine is started with for a fleet whose base lies in `folder`."""
    fleet = loaded.fleet
    return EngineConfig(
        model_path=str(folder),
        model_name=fleet.base.served_name,
        base_digest=digest,
        device=fleet.memory.device,
        dtype=fleet.base.dtype,
        quantization=fleet.base.quantization,
        kv_cache_dtype=fleet.base.kv_cache_dtype,
        load_format=fleet.base.load_format,
        max_model_len=fleet.base.max_model_len,
        max_num_seqs=fleet.limits.max_num_seqs,
        max_num_batched_tokens=max(fleet.limits.max_num_batched_tokens, fleet.limits.max_num_seqs),
        max_lora_rank=fleet.limits.max_lora_rank,
        max_loras=fleet.limits.max_loras,
        num_slots=num_slots(num_adapters),
        device_bytes=fleet.memory.device_bytes,
        device_fraction=fleet.memory.device_fraction,
        host_adapter_bytes=fleet.memory.host_adapters,
        kv_reserve=fleet.memory.kv_reserve,
    )

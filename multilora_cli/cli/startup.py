"""From a fleet file to what the two processes are started with. No torch in this process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from multilora_cli.adapters.entry import AdapterRequest, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.adapters.source import is_remote, make_dummies
from multilora_cli.adapters.store import StoreOpener
from multilora_cli.cli.base import (
    cache_folder,
    check_memory,
    compute_itemsize,
    fetch_base,
    open_store,
)
from multilora_cli.engine.config import EngineConfig
from multilora_cli.errors import FleetError, MloraError
from multilora_cli.fleet.declared import (
    declared_adapters,
    declared_patterns,
    declared_settings,
)
from multilora_cli.fleet.load import LoadedFleet, load_fleet, secret_notes
from multilora_cli.fleet.statefile import StateFile, state_path
from multilora_cli.models.checkpoint import base_digest
from multilora_cli.progress import Report, silent
from multilora_cli.server.access import Secrets, keys_of
from multilora_cli.server.changes import (
    RuntimeChanges,
    ServedFleet,
    by_name,
    merge,
    request_of,
)
from multilora_cli.server.config import QUEUED, ServerConfig, ServerLimits
from multilora_cli.sizing.budget import num_slots
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.hardware import local_card
from multilora_cli.text.adapter_text import TextChecker

# The driver's, as Linux has it, as WSL has it, and on boards whose card NVML does not see.
_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")


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
    changes: RuntimeChanges  # by operators, since the fleet file was written
    secrets: Secrets  # what the file's keys are
    notes: tuple[str, ...] = ()


def prepare(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    report: Report = silent,
    debug: bool = False,
    check: Callable[[LoadedFleet], None] = lambda loaded: None,
) -> Startup:
    """Read the fleet, find the base, read every adapter's headers. Raises MloraError.

    `check` sees what the file says before a base is fetched; what it raises ends the start.
    """
    loaded = load_fleet(path, overrides)
    check(loaded)
    declared = by_name(map(request_of, declared_adapters(loaded)))
    requests, changes, notes = _changed(loaded, overrides, declared)
    report("base", 0, 1)
    if _runs_on_cpu(loaded):
        check_memory(loaded)
    folder = fetch_base(loaded, report)
    geometry = read_geometry(folder)
    report("base", 1, 1)
    roots = _roots(loaded, declared.values())
    registry = _registry(loaded, folder, geometry, roots, _store(loaded, requests))
    report("adapters", 0, len(requests))
    make_dummies((r.source for r in requests), geometry, cache_folder() / "dummy")
    failures = _register(registry, requests, report)
    secrets = Secrets(loaded.folder)
    digest = base_digest(folder, loaded.fleet.base.load_format)
    engine = engine_config(loaded, folder, len(requests) + loaded.fleet.num_unlisted, digest)
    if debug:
        engine = msgspec.structs.replace(engine, debug=True)
    return Startup(
        loaded=loaded,
        geometry=geometry,
        server=_server_config(loaded, folder, geometry, engine, secrets),
        engine=engine,
        registry=registry,
        num_adapters=len(requests),
        failures=failures,
        changes=changes,
        notes=(*notes, *secret_notes(loaded.fleet.server.secrets, loaded.folder)),
        secrets=secrets,
    )


def _changed(
    loaded: LoadedFleet, overrides: Sequence[str], declared: Mapping[str, AdapterRequest]
) -> tuple[list[AdapterRequest], RuntimeChanges, list[str]]:
    """What to register: the file, and what operators changed since. Raises FleetError."""
    fleet = ServedFleet(
        path=str(loaded.path),
        settings=declared_settings(loaded),
        written=_written(loaded, overrides),
        requests=declared,
        patterns=declared_patterns(loaded),
    )
    path = state_path(loaded)
    if path is None:
        return list(declared.values()), RuntimeChanges(fleet), []
    file = StateFile(path, loaded.path)
    requests, changes, notes = merge(fleet, file.read())
    return requests, RuntimeChanges(fleet, file, changes), notes


def _written(loaded: LoadedFleet, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The settings without the flags, where the file can be read without them."""
    try:
        plain = load_fleet(loaded.path) if overrides else loaded
    except FleetError:
        plain = loaded
    return declared_settings(plain)


def _store(loaded: LoadedFleet, requests: Sequence[AdapterRequest]) -> StoreOpener:
    """Opened now where something remote is known, so that an unsafe folder is told at the start;
    else by the first remote adapter that an operator brings."""
    sources = [request.source for request in requests]
    sources += [pattern.source for pattern in declared_patterns(loaded)]
    opener = StoreOpener(lambda: open_store(loaded))
    if any(map(is_remote, sources)):
        opener()
    return opener


def _registry(
    loaded: LoadedFleet,
    folder: Path,
    geometry: ModelGeometry,
    roots: Sequence[Path],
    store: StoreOpener,
) -> Registry:
    fleet = loaded.fleet
    base = ServedBase(
        geometry=geometry,
        name=fleet.base.served_name,
        max_rank=fleet.limits.max_lora_rank,
        itemsize=compute_itemsize(loaded, has_card=_has_card(loaded)),
        folder=folder,
        model=fleet.base.model,
        check_text=TextChecker(geometry.vocab_size),
    )
    return Registry(
        base,
        relative_to=loaded.folder,
        roots=roots,
        cache=cache_folder() / "dummy",
        store=store,
        surveys=cache_folder() / "headers",
    )


def _runs_on_cpu(loaded: LoadedFleet) -> bool:
    """Whether that is sure before torch is asked: some machines have a card and no NVML."""
    device = loaded.fleet.memory.device
    return device == "cpu" or (
        device == "auto"
        and local_card() is None
        and not any(Path(path).exists() for path in _DRIVERS)
    )


def _has_card(loaded: LoadedFleet) -> bool:
    return loaded.fleet.memory.device != "cpu" and local_card() is not None


def _roots(loaded: LoadedFleet, requests: Iterable[AdapterRequest]) -> tuple[Path, ...]:
    """Where adapters may be loaded from at run time: what the file says, else its own folders."""
    named = loaded.fleet.server.adapter_roots
    if named:
        return tuple((loaded.folder / Path(root).expanduser()).resolve() for root in named)
    from multilora_cli.demo import DEMO_ADAPTERS, demo_adapter_path

    own = {"demo": demo_adapter_path(DEMO_ADAPTERS[0]).parent, "dummy": cache_folder() / "dummy"}
    folders = {
        Path(pattern.root).resolve() for pattern in declared_patterns(loaded) if pattern.is_local
    }
    for request in requests:
        kind, colon, _ = request.source.partition(":")
        if not colon:
            folders.add(Path(request.source).resolve().parent)
        elif kind in own:
            folders.add(own[kind])
    return tuple(sorted(folders))


def _register(
    registry: Registry, requests: Sequence[AdapterRequest], report: Report
) -> tuple[tuple[str, MloraError], ...]:
    failures: list[tuple[str, MloraError]] = []
    num_threads = 8 if any(is_remote(request.source) for request in requests) else 2
    for start in range(0, len(requests), 64):  # progress in steps a person can see
        report("adapters", start, len(requests))
        failures += registry.register_all(requests[start : start + 64], num_threads=num_threads)
    registry.remember()
    report("adapters", len(requests), len(requests))
    return tuple(failures)


def _server_config(
    loaded: LoadedFleet,
    folder: Path,
    geometry: ModelGeometry,
    engine: EngineConfig,
    secrets: Secrets,
) -> ServerConfig:
    server = loaded.fleet.server
    return ServerConfig(
        base_name=loaded.fleet.base.served_name,
        base_path=folder,
        base_digest=engine.base_digest,
        max_loras=engine.distinct_adapters,
        host_adapter_bytes=engine.host_adapter_bytes,
        max_resolved=loaded.fleet.limits.max_resolved,
        vocab_size=geometry.vocab_size,
        eos_token_ids=geometry.eos_token_ids,
        host=server.host,
        port=server.port,
        limits=ServerLimits(max_sequences=engine.max_num_seqs + QUEUED),
        **vars(keys_of(loaded.fleet, secrets)),
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
        max_adapter_bytes=fleet.limits.max_adapter_bytes,
        fairness=fleet.limits.fairness,
        prefetch_bytes_per_s=fleet.memory.prefetch,
        num_slots=num_slots(num_adapters),
        device_bytes=fleet.memory.device_bytes,
        device_fraction=fleet.memory.device_fraction,
        host_adapter_bytes=fleet.memory.host_adapters,
        kv_reserve=fleet.memory.kv_reserve,
    )

"""What a fleet file declares, in one form for start, `mlora diff` and `mlora apply`."""

import os
from pathlib import Path
from typing import Any

from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.fleet.pattern import NamePattern, is_folder
from multilora_cli.fleet.schema import Adapter, AdapterPattern
from multilora_cli.units import format_size

_SIZES = frozenset({"memory.device_bytes", "memory.host_adapters", "memory.disk_cache"})


def declared_adapters(loaded: LoadedFleet) -> list[Adapter]:
    """Every adapter that the file names, locked, its folder absolute. Raises FleetError."""
    return [_absolute(adapter, loaded.folder) for adapter in expand_adapters(loaded)]


def declared_patterns(loaded: LoadedFleet) -> tuple[NamePattern, ...]:
    """The name patterns, in the order of the file, their folders absolute."""
    return tuple(
        entry.compiled.relative_to(loaded.folder)
        for entry in loaded.fleet.adapters
        if isinstance(entry, AdapterPattern)
    )


def declared_settings(loaded: LoadedFleet) -> dict[str, Any]:
    """Everything but the adapters, by `section.key`: what a running server cannot change."""
    settings = {}
    for section in ("base", "memory", "limits", "server", "verify"):
        for key, value in getattr(loaded.fleet, section).model_dump(mode="json").items():
            settings[f"{section}.{key}"] = value
    return settings


def spoken(key: str, value: object) -> str:
    """The value of a setting for people, at most 80 characters: sizes with their unit."""
    if key in _SIZES and isinstance(value, int):
        return format_size(value)
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"


def _absolute(adapter: Adapter, folder: Path) -> Adapter:
    if not is_folder(adapter.source):
        return adapter
    path = folder.absolute() / Path(adapter.source).expanduser()
    return adapter.model_copy(update={"source": os.path.normpath(path)})

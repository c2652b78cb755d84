"""The adapters a fleet names, folder globs resolved, each with where it comes from."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.fleet.lockfile import apply_lock
from multilora_cli.fleet.schema import (
    MAX_ADAPTERS,
    Adapter,
    AdapterFolder,
    is_adapter_name,
    is_template_file,
)

CONFIG = "adapter_config.json"


def expand_adapters(loaded: LoadedFleet, *, locked: bool = True) -> list[Adapter]:
    """Every adapter by name, in the order of the file. Raises FleetError on a name taken twice.

    `locked`: those that the lock file beside the fleet names are bound to what it recorded.
    """
    adapters: dict[str, Adapter] = {}
    served = loaded.fleet.base.served_name.lower()
    for adapter in _all(loaded):
        key = adapter.name.lower()
        twin = adapters.get(key)
        if twin is not None:
            raise FleetError(
                f"{loaded.path}: adapter {adapter.name!r} from {adapter.source} and"
                f" {twin.name!r} from {twin.source} have the same name",
                hint="give one of them a name of its own under `adapters:`",
            )
        if key == served:
            raise FleetError(f"{loaded.path}: adapter {adapter.name!r} has the base's name")
        adapters[key] = adapter
    if len(adapters) > MAX_ADAPTERS:
        raise FleetError(f"{loaded.path}: {len(adapters)} adapters, at most {MAX_ADAPTERS}")
    return apply_lock(loaded, tuple(adapters.values())) if locked else list(adapters.values())


def _all(loaded: LoadedFleet) -> Iterator[Adapter]:
    for index, entry in enumerate(loaded.fleet.adapters):
        if isinstance(entry, Adapter):
            yield _with_template(entry, loaded.folder)
        elif isinstance(entry, AdapterFolder):
            yield from _folders(loaded, index, entry)


def _with_template(adapter: Adapter, folder: Path) -> Adapter:
    """Its template's file, where it names one, absolute."""
    if adapter.chat_template is None or not is_template_file(adapter.chat_template):
        return adapter
    path = folder.absolute() / Path(adapter.chat_template).expanduser()
    return adapter.model_copy(update={"chat_template": os.path.normpath(path)})


def _folders(loaded: LoadedFleet, index: int, entry: AdapterFolder) -> Iterator[Adapter]:
    pattern = str(loaded.folder / Path(entry.folder).expanduser())
    found = sorted(
        path for match in glob.glob(pattern) if (path := Path(match)) and (path / CONFIG).is_file()
    )
    where = f"{loaded.path}: adapters.{index}.folder"
    if not found:
        raise FleetError(f"{where}: no folder at {pattern} holds an {CONFIG}")
    for path in found:
        if not is_adapter_name(path.name):
            raise FleetError(
                f"{where}: {path.name!r} cannot name an adapter",
                hint="rename the folder, or list it with a name and a source",
            )
        yield Adapter(name=path.name, source=str(path))

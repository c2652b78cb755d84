"""The adapters of a fleet, each with its folder or why there is none. No torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from multilora_cli.adapters.source import resolve_source
from multilora_cli.cli.base import cache_folder, open_store
from multilora_cli.errors import MloraError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.fleet.schema import Adapter
from multilora_cli.sizing.geometry import ModelGeometry

_T = TypeVar("_T")


def read_fleet_adapters(
    loaded: LoadedFleet, geometry: ModelGeometry, read: Callable[[Path], _T]
) -> Iterator[tuple[Adapter, _T | MloraError]]:
    """Every adapter that the fleet names, in its order, with what `read` makes of its folder.

    An adapter that cannot be had or read comes with the error; the others go on.
    """
    adapters = expand_adapters(loaded)
    store = open_store(loaded, adapters)
    try:
        for adapter in adapters:
            try:
                folder = resolve_source(
                    adapter.source,
                    relative_to=loaded.folder,
                    geometry=geometry,
                    cache=cache_folder() / "dummy",
                    store=store,
                    digest=adapter.digest,
                )
                found = read(folder)
            except MloraError as error:
                yield adapter, error
            else:
                yield adapter, found
    finally:
        if store is not None:
            store.close()

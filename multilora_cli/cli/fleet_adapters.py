"""The adapters of a fleet, each with its folder or why there is none. No torch."""

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from multilora_cli.adapters.source import make_dummies, resolve_source, shape_alone
from multilora_cli.cli.base import cache_folder, open_store
from multilora_cli.errors import BadInput, MloraError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.fleet.schema import Adapter
from multilora_cli.server.changes import request_of
from multilora_cli.sizing.geometry import ModelGeometry

if TYPE_CHECKING:
    from multilora_cli.text.adapter_text import TextChecker

_T = TypeVar("_T")


def read_fleet_adapters(
    loaded: LoadedFleet,
    geometry: ModelGeometry,
    read: Callable[[Path], _T],
    only: Collection[str] = (),
    *,
    headers_only: bool = False,
) -> Iterator[tuple[Adapter, _T | MloraError]]:
    """Every adapter that the fleet names, in its order, with what `read` makes of its folder.

    An adapter that cannot be had or read comes with the error; the others go on. `only`: just
    these; `headers_only`: random adapters are not given their numbers. Raises BadInput for a name
    that the fleet does not have.
    """
    adapters = _chosen(expand_adapters(loaded), only)
    store = open_store(loaded, adapters)
    check_text = _text_checker(adapters, geometry)
    sources = [adapter.source for adapter in adapters]
    if headers_only:
        sources = [shape_alone(source) for source in sources]
    make_dummies(sources, geometry, cache_folder() / "dummy")
    try:
        for adapter, source in zip(adapters, sources, strict=True):
            request = request_of(adapter)
            try:
                folder = resolve_source(
                    source,
                    relative_to=loaded.folder,
                    geometry=geometry,
                    cache=cache_folder() / "dummy",
                    store=store,
                    digest=adapter.digest,
                    text_files=request.text_files,
                )
                if check_text is not None and request.has_own_text:
                    check_text(folder, request)
                found = read(folder)
            except MloraError as error:
                yield adapter, error
            else:
                yield adapter, found
    finally:
        if store is not None:
            store.close()


def _text_checker(adapters: Sequence[Adapter], geometry: ModelGeometry) -> "TextChecker | None":
    """Only a fleet that asks for it imports the tokenizers' library."""
    if not any(adapter.has_text_files for adapter in adapters):
        return None
    from multilora_cli.text.adapter_text import TextChecker

    return TextChecker(geometry.vocab_size)


def _chosen(adapters: Sequence[Adapter], only: Collection[str]) -> list[Adapter]:
    """Those named by `only`; all where it names none."""
    known = {adapter.name for adapter in adapters}
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise BadInput(
                f"--only {name}: no adapter of the fleet"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    return [adapter for adapter in adapters if not only or adapter.name in only]

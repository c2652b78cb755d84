"""`mlora lock`: write down which content every remote adapter has now."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetArgument, JsonOption, QuietOption, SetOption

if TYPE_CHECKING:
    from multilora_cli.adapters.store import DiskStore
    from multilora_cli.fleet.load import LoadedFleet
    from multilora_cli.fleet.lockfile import FleetLock, LockedAdapter
    from multilora_cli.fleet.schema import Adapter

_PARALLEL = 8


def lock(
    fleet: FleetArgument = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record commit and digest of every adapter from a hub or a bucket, beside the fleet file.

    Asks every origin, fetches what is new, and writes fleet.lock.json; from then on serve takes
    exactly that content, from the disk cache where it is there, or refuses.

    Example: mlora lock fleet.yaml
    """
    from multilora_cli.fleet.declared import declared_patterns
    from multilora_cli.fleet.load import load_fleet
    from multilora_cli.fleet.lockfile import lock_path, read_lock, write_lock

    console = Console(as_json=as_json, quiet=quiet)
    loaded = load_fleet(fleet, settings or ())
    old = read_lock(loaded.path) if lock_path(loaded.path).exists() else None
    new = _ask_all(loaded, console)
    path = write_lock(loaded.path, new)
    rows = list(_changes(old, new))
    console.value(
        {
            "path": str(path),
            "adapters": {
                name: locked.model_dump() | {"change": change} for name, locked, change in rows
            },
        }
    )
    if quiet:
        console.line(str(path))
        return
    for pattern in declared_patterns(loaded):
        console.note(f"names of the pattern {pattern.pattern} are not locked: nobody lists them")
    cells = [(n, a.revision[:20], a.digest[:19], change) for n, a, change in rows]
    if cells:
        console.table(("adapter", "revision", "digest", "change"), cells)
    console.note(f"{path}: {len(cells)} remote adapters locked")


def _ask_all(loaded: "LoadedFleet", console: Console) -> "FleetLock":
    """Every remote adapter as it is now. Raises the first MloraError, after all were asked."""
    from multilora_cli.adapters.source import is_remote
    from multilora_cli.cli.base import open_store
    from multilora_cli.errors import MloraError
    from multilora_cli.fleet.expand import expand_adapters
    from multilora_cli.fleet.lockfile import FleetLock

    adapters = [a for a in expand_adapters(loaded, locked=False) if is_remote(a.source)]
    store = open_store(loaded, adapters)
    found: dict[str, LockedAdapter] = {}
    failed: list[tuple[str, MloraError]] = []
    if store is not None:

        def ask(adapter: "Adapter") -> "LockedAdapter | MloraError":
            try:
                return _ask(adapter, loaded, store)
            except MloraError as error:
                return error

        with console.progress() as report, ThreadPoolExecutor(_PARALLEL) as pool:
            answers = zip(adapters, pool.map(ask, adapters), strict=True)
            for done, (adapter, answer) in enumerate(answers, 1):
                report("asking origins", done, len(adapters))
                if isinstance(answer, MloraError):
                    failed.append((adapter.name, answer))
                else:
                    found[adapter.name] = answer
        store.close()
    for name, error in failed[1:]:
        console.error(error.of_adapter(name), error.hint)
    if failed:
        name, error = failed[0]
        error.message = f"{error.of_adapter(name)}; the lock file is as it was"
        raise error
    return FleetLock(adapters=dict(sorted(found.items())))


def _ask(adapter: "Adapter", loaded: "LoadedFleet", store: "DiskStore") -> "LockedAdapter":
    from multilora_cli.adapters.source import REMOTE, SourceContext
    from multilora_cli.errors import AdapterError, AdapterUnavailable
    from multilora_cli.fleet.lockfile import LockedAdapter
    from multilora_cli.server.changes import request_of

    scheme, _, rest = adapter.source.partition(":")
    files = request_of(adapter).text_files
    context = SourceContext(loaded.folder, store=store, text_files=files)
    fetched = REMOTE[scheme].fetch(rest, context)
    if fetched.stale:
        raise AdapterUnavailable("; ".join(store.notes_on(fetched.folder)))
    digest = f"sha256:{fetched.digest}"
    if adapter.digest not in (None, digest):
        raise AdapterError(
            f"digest: found {digest}, the fleet file expects {adapter.digest}", reason="digest"
        )
    return LockedAdapter(source=adapter.source, revision=fetched.revision, digest=digest)


def _changes(
    old: "FleetLock | None", new: "FleetLock"
) -> "Iterator[tuple[str, LockedAdapter, str]]":
    before = old.adapters if old is not None else {}
    for name, locked in new.adapters.items():
        if name not in before:
            yield name, locked, "added"
        else:
            yield name, locked, "unchanged" if before[name] == locked else "changed"

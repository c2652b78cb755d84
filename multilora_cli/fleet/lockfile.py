"""The lock file beside a fleet: revision and content of each remote adapter.

`fleet.yaml` has `fleet.lock.json`. Where it is there, a locked adapter is that content or refused;
adapters it does not name are free.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import LoadedFleet, first_problem
from multilora_cli.fleet.replace_file import replace_file
from multilora_cli.fleet.schema import Adapter, AdapterName, Digest, Part, Text

_BYTES_MAX = 64 * 2**20
_HUB = "hf://"


class LockedAdapter(Part):
    """One adapter as it was: `revision` is the Hub's commit, else a digest of object versions."""

    source: Text
    revision: Text
    digest: Digest


class FleetLock(Part):
    """All remote adapters by name."""

    format: Literal[1] = 1
    adapters: dict[AdapterName, LockedAdapter] = Field(default_factory=dict)


def lock_path(fleet: Path) -> Path:
    """Where the lock of the fleet file lies: `fleet.lock.json` beside `fleet.yaml`."""
    return fleet.with_suffix(".lock.json")


def read_lock(fleet: Path) -> FleetLock | None:
    """The lock beside a fleet file; None where there is none. Raises FleetError."""
    path = lock_path(fleet)
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FleetError(f"{path}: not readable: {error.strerror or error}") from None
    try:
        if len(raw) > _BYTES_MAX:
            raise FleetError(f"{path}: more than {_BYTES_MAX:,} bytes", hint=_hint(fleet))
        return FleetLock.model_validate_json(raw)
    except ValidationError as error:
        raise FleetError(f"{path}: {first_problem(error)}", hint=_hint(fleet)) from None


def write_lock(fleet: Path, lock: FleetLock) -> Path:
    """Replace the lock beside a fleet file as a whole. Raises FleetError."""
    path = lock_path(fleet)
    text = lock.model_dump_json(indent=2) + "\n"
    try:
        replace_file(path, text.encode(), 0o644)  # meant to be committed and read by others
    except OSError as error:
        raise FleetError(f"{path}: not writable: {error.strerror or error}") from None
    return path


def apply_lock(loaded: LoadedFleet, adapters: Sequence[Adapter]) -> list[Adapter]:
    """`adapters`, the locked ones bound to commit and digest. Raises FleetError on a difference."""
    lock = read_lock(loaded.path)
    if lock is None:
        return list(adapters)
    return [_bound(loaded, adapter, lock.adapters.get(adapter.name)) for adapter in adapters]


def _bound(loaded: LoadedFleet, adapter: Adapter, locked: LockedAdapter | None) -> Adapter:
    if locked is None:
        return adapter
    for key, found, expected in (
        ("source", adapter.source, locked.source),
        ("digest", adapter.digest or locked.digest, locked.digest),
    ):
        if found != expected:
            raise FleetError(
                f"{loaded.path}: adapter {adapter.name}: {key} {found!r}, but"
                f" {lock_path(loaded.path).name} has {expected!r}",
                hint=_hint(loaded.path),
            )
    source = adapter.source
    if source.startswith(_HUB):
        source = f"{source.partition('@')[0]}@{locked.revision}"
    return adapter.model_copy(update={"source": source, "digest": locked.digest})


def _hint(fleet: Path) -> str:
    return f"write it anew: mlora lock {fleet.name}"

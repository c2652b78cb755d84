"""The state file: what operators changed while a fleet ran, so that a restart does not forget it.

`fleet.yaml` has `fleet.state.json` beside it, or `server.state_file`. A change holds the
fingerprint of what the file said about that adapter when it was made; where the file says something
else now, the file wins and the change is gone (docs/adr/0008).
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import LoadedFleet, first_problem
from multilora_cli.fleet.replace_file import replace_file, sync_folder
from multilora_cli.fleet.schema import AdapterName, Digest, Part, TemplateOwner, Text

_BYTES_MAX = 64 * 2**20
OFF = "off"


class StateAdapter(Part):
    """What a name stands for instead of what the file says."""

    source: Text
    via: Literal["fleet", "api", "pattern"]
    pin: Literal["hot", "warm"] | None = None
    ttl: float | None = Field(default=None, gt=0)
    priority: int = 0
    digest: Digest | None = None
    tokenizer: Literal["base", "adapter"] | None = None
    chat_template: TemplateOwner | None = None


class Change(Part):
    """One change. `declared`: of the file's entry at that time; null: the file had none."""

    declared: Digest | None
    adapter: StateAdapter | None  # null: unloaded


class FleetState(Part):
    """All changes by name."""

    kind: Literal["mlora fleet state"] = "mlora fleet state"
    format: Literal[1] = 1
    fleet: Text  # the file that it belongs to
    changes: dict[AdapterName, Change] = Field(default_factory=dict)


def state_path(loaded: LoadedFleet) -> Path | None:
    """Where the state of a fleet lies; None: nothing is kept."""
    configured = loaded.fleet.server.state_file
    if configured == OFF:
        return None
    if configured is None:
        return loaded.path.with_suffix(".state.json")
    return loaded.folder.absolute() / Path(configured).expanduser()


class StateFile:
    """The state of one fleet on disk. The first server that writes it keeps it until it ends."""

    def __init__(self, path: Path, fleet: Path) -> None:
        self.path = path
        self._fleet = fleet
        self._seen: tuple[int, int, int] | None = None  # the version that was read or written
        self._lock = -1

    def read(self) -> dict[str, Change]:
        """The changes by name, none where there is no file. Raises FleetError."""
        path = self.path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _refused(path, f"not readable: {error.strerror or error}") from None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _check_owner(path, status)
            raw = file.read(_BYTES_MAX + 1)
        if len(raw) > _BYTES_MAX:
            raise _refused(path, f"more than {_BYTES_MAX:,} bytes")
        try:
            state = FleetState.model_validate_json(raw)
        except ValidationError as error:
            raise _refused(path, first_problem(error)) from None
        if state.fleet != str(self._fleet) and path.parent != self._fleet.parent:
            raise _refused(path, f"belongs to {state.fleet}, expected {self._fleet}")
        self._seen = _version(status)
        return dict(state.changes)

    def write(self, changes: Mapping[str, Change]) -> None:
        """Replace the whole: after a power cut it is the old or the new.

        Raises OSError; FleetError where another server keeps it or wrote it since it was read.
        """
        self._take()
        path, state = self.path, FleetState(fleet=str(self._fleet), changes=dict(changes))
        text = state.model_dump_json(indent=2) + "\n"
        self._seen = _version(replace_file(path, text.encode(), 0o600))
        sync_folder(path.parent)

    def close(self) -> None:
        """Let another server write it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self) -> None:
        if self._lock >= 0:
            return
        name = self.path.with_name(f".{self.path.name}.lock")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                found = _version(os.lstat(self.path))
            except FileNotFoundError:
                found = None
            if found != self._seen:
                raise FleetError(f"{self.path}: written by another server since this one started")
        except BlockingIOError:
            os.close(lock)
            raise FleetError(f"{self.path}: kept by another server of this fleet") from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_owner(path: Path, status: os.stat_result) -> None:
    """What anybody else can write says nothing about our operators."""
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "is no regular file")
    if status.st_uid != os.geteuid():
        raise _refused(path, f"belongs to user {status.st_uid}, expected {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise FleetError(
            f"{path}: mode {mode:04o} lets other users in, expected 0600",
            hint=f"make sure that its content is yours, then: chmod 600 {path}",
        )


def _refused(path: Path, why: str) -> FleetError:
    return FleetError(
        f"{path}: {why}",
        hint="move it away to start with what the fleet file says, or set server.state_file",
    )

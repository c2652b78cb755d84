"""A fleet file on disk to a checked `Fleet`, every mistake one line with its place."""

import difflib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from multilora_cli.errors import FleetError
from multilora_cli.fleet.schema import (
    PATTERNS,
    Adapter,
    AdapterFolder,
    AdapterPattern,
    ApiKey,
    Fleet,
)
from multilora_cli.fleet.yaml import Document, KeyPath, parse_yaml, read_yaml, scalar

DEFAULT_FILES = ("fleet.yaml", "fleet.example.yaml")
MAX_ERRORS = 20
_SECRET_BYTES_MAX = 64 * 2**10


class LoadedFleet(NamedTuple):
    """A fleet, and the folder that its relative paths start from."""

    fleet: Fleet
    path: Path

    @property
    def folder(self) -> Path:
        """Where relative paths of the file start."""
        return self.path.parent


def find_fleet(path: Path | None) -> Path:
    """The file to use: `path`, else ./fleet.yaml, else ./fleet.example.yaml."""
    if path is not None:
        return path
    for name in DEFAULT_FILES:
        if Path(name).is_file():
            return Path(name)
    raise FleetError(
        f"no fleet file: neither {' nor '.join(DEFAULT_FILES)} is in {Path.cwd()}",
        hint="name a file, or write a fleet.yaml there: README.md shows one",
    )


def load_fleet(path: Path | None = None, overrides: Sequence[str] = ()) -> LoadedFleet:
    """Read, override and check a fleet file. Raises FleetError, one line per mistake."""
    file = find_fleet(path).absolute()
    return _checked(read_yaml(file), file, overrides)


def make_fleet(
    values: dict[str, Any], overrides: Sequence[str] = (), *, name: str = "command line"
) -> LoadedFleet:
    """A fleet that no file holds, relative paths from the working folder; `name` for errors."""
    return _checked(Document(values, {}), Path.cwd() / name, overrides)


def _checked(document: Document, file: Path, overrides: Sequence[str]) -> LoadedFleet:
    if not isinstance(document.value, dict):
        found = _shown(document.value)
        raise FleetError(f"{file}:1:1: found {found}, expected keys such as `base:`")
    given = {_apply(document.value, override): f"--set {override}" for override in overrides}
    try:
        fleet = Fleet.model_validate(document.value)
    except ValidationError as error:
        raise _as_fleet_error(
            error, lambda path: _place(path, document, str(file), given)
        ) from None
    return LoadedFleet(fleet, file)


def resolve_secret(reference: str, folder: Path) -> str:
    """The secret behind `env:NAME` or `file:PATH`; trailing line ends are dropped."""
    kind, _, name = reference.partition(":")
    if kind == "env":
        value = os.environ.get(name, "")
        if not value:
            raise FleetError(f"environment variable {name} is not set", hint=f"export {name}=...")
        return value
    path = folder / name
    try:
        value = _read_small(path).decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f"{path}: secret not readable: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not value:
        raise FleetError(f"{path}: the secret is empty")
    return value


def secret_notes(references: Iterable[str], folder: Path) -> Iterator[str]:
    """A line for every secret in a file that other users of the machine may read."""
    for reference in references:
        kind, _, name = reference.partition(":")
        with suppress(OSError):
            mode = stat.S_IMODE(os.stat(folder / name).st_mode) if kind == "file" else 0
            if mode & 0o077:
                yield f"{folder / name}: mode {mode:04o} lets other users read a key; chmod 600 it"


def _read_small(path: Path) -> bytes:
    """A regular file of at most 64 KiB: neither a pipe nor a device may hold or fill a server."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(_SECRET_BYTES_MAX + 1)
    if len(content) > _SECRET_BYTES_MAX:
        raise OSError(errno.EFBIG, "larger than 64 KiB")
    return content


def fleet_json_schema() -> str:
    """JSON Schema of a fleet file, for editors."""
    return json.dumps(Fleet.model_json_schema(), indent=2)


def _apply(data: dict[str, Any], override: str) -> KeyPath:
    """Set one `key.path=value` in place; the path. Raises FleetError."""
    path, sign, value = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise FleetError(f"--set {override}: expected KEY.PATH=VALUE, as base.quantization=fp8")
    for key in keys[:-1]:
        child = data.setdefault(key, {})
        if not isinstance(child, dict):
            raise FleetError(f"--set {override}: {key} holds no keys")
        data = child
    value = value.strip()
    is_nested = value[:1] in ("[", "{")
    data[keys[-1]] = (
        parse_yaml(value.encode(), f"--set {path}").value if is_nested else scalar(value)
    )
    return tuple(keys)


def _as_fleet_error(error: ValidationError, place: Callable[[KeyPath], str]) -> FleetError:
    lines = []
    for item in error.errors(include_url=False)[:MAX_ERRORS]:
        path, message = _describe(dict(item))
        lines.append(f"{place(path)}: {'.'.join(map(str, path)) or 'fleet'}: {message}")
    more = error.error_count() - len(lines)
    if more > 0:
        lines.append(f"and {more} more")
    return FleetError("\n".join(lines))


def first_problem(error: ValidationError) -> str:
    """What is wrong first in a file that a program wrote, without the value that was found."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"


def _place(path: KeyPath, document: Document, file: str, given: Mapping[KeyPath, str]) -> str:
    """The flag that set it, else `file:line:column` of the nearest thing that the file holds."""
    above = [path[:end] for end in range(len(path), -1, -1)]
    for place in above:  # a flag stands in for all that the file holds below its key
        if place in given:
            return given[place]
    for place in above:
        if place in document.positions:
            position = document.positions[place]
            return f"{file}:{position.line}:{position.column}"
    return file


def _describe(item: dict[str, Any]) -> tuple[KeyPath, str]:
    path = _plain_path(item["loc"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), _known_keys(path), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return path, f"unknown key{hint}"
    if item["type"] == "missing":
        return path[:-1], f"required key {path[-1]!r} is missing"
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error" and not path:  # of the whole file: it names the key itself
        key, _, problem = message.partition(": ")
        return tuple(int(part) if part.isdigit() else part for part in key.split(".")), problem
    found = item["input"]
    secret = any(part in ("api_keys", "admin_key") for part in path)
    shown = "a value (not shown)" if secret else _shown(found)
    if item["type"] == "value_error" and " is not a " in message:  # says what it found
        return path, message
    if item["type"] == "string_type" and isinstance(found, bool | int | float):
        message = 'a text; write it in quotes: "..."'
    if item["type"] == "string_pattern_mismatch":
        message = PATTERNS[item["ctx"]["pattern"]]
    if item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        known = _known_keys((*path, ""))
        message = f"keys below it, such as {known[0]}: ..." if known else "keys below it"
    if item["type"] in ("list_type", "tuple_type"):
        message = "a list, such as [a, b]"
    return path, f"found {shown}, expected {message}"


def _shown(found: object) -> str:
    if isinstance(found, dict | list | tuple):
        return {"dict": "keys", "list": "a list", "tuple": "a list"}[type(found).__name__]
    text = json.dumps(found, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_path(loc: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the union tags it adds after an adapter's index."""
    path = list(loc)
    if len(path) > 2 and path[0] == "adapters" and path[2] in ("name", "folder", "pattern"):
        del path[2]
    if len(path) > 3 and path[1] == "api_keys" and path[3] in ("key", "secret"):
        del path[3]
    return tuple(path)


def _known_keys(path: KeyPath) -> list[str]:
    if len(path) >= 3 and path[0] == "adapters":
        kinds = (Adapter, AdapterFolder, AdapterPattern)
        return sorted({key for kind in kinds for key in kind.model_fields})
    if path[:2] == ("server", "api_keys"):
        return list(ApiKey.model_fields)
    model: type[BaseModel] = Fleet
    for key in path[:-1]:
        field = model.model_fields.get(str(key))
        if field is None or not isinstance(field.annotation, type):
            return []
        model = field.annotation
    return list(model.model_fields)

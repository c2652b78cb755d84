"""The files of a base model: which tensors lie in which safetensors file, and their identity.

Everything here reads headers only. Files are read by position, never mapped: a mapped file that
is cut short while it is read kills the process.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from multilora_cli.adapters.safetensors_header import (
    Limits,
    SafetensorsError,
    SafetensorsHeader,
    TensorEntry,
    open_file,
    read_header,
)
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_INDEX_BYTES_MAX = 64 * 2**20
_LIMITS = Limits(header_bytes=64 * 2**20, tensors=500_000, file_bytes=None)


@dataclass(frozen=True)
class Checkpoint:
    """The headers of all safetensors files of a base, by file."""

    headers: Mapping[Path, SafetensorsHeader]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries())

    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor, file by file in the order in which it lies there."""
        for header in self.headers.values():
            yield from sorted(header.tensors.values(), key=lambda entry: entry.offset)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checked headers of the base in `folder`. Raises ModelError naming file and tensor."""
    files, index = shard_files(folder)
    with model_errors():
        headers = {file: read_header(file, _LIMITS, follow_symlinks=True) for file in files}
    where: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in where:
                raise ModelError(
                    f"{file}: tensor {quoted(name)} is in {where[name].name} as well, expected once"
                )
            where[name] = file
    for name, file_name in index.items():
        if name not in where or where[name].name != file_name:
            raise ModelError(
                f"{folder / INDEX_NAME}: tensor {quoted(name)} should be in {file_name},"
                f" found in {where[name].name if name in where else 'no file'}"
            )
    return Checkpoint(headers)


def shard_files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The safetensors files of the base in `folder` and its index (tensor -> file name).

    As transformers does: model.safetensors where it is, else the files the index names.
    """
    single = folder / SINGLE_NAME
    if single.exists():
        return [single], {}
    if not (folder / INDEX_NAME).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        raise ModelError(
            f"{folder.absolute()}: neither {SINGLE_NAME} nor {INDEX_NAME}",
            hint="pickled weights are never read: convert the model with save_pretrained"
            if pickled
            else "a base is a folder in Hugging Face format",
        )
    index = read_index(folder / INDEX_NAME)
    return [folder / name for name in sorted(set(index.values()))], index


def read_index(path: Path) -> Mapping[str, str]:
    """The weight map of an index file: tensor name -> name of a file beside it."""
    try:
        if path.stat().st_size > _INDEX_BYTES_MAX:
            raise ModelError(f"{path}: larger than {_INDEX_BYTES_MAX:,} bytes")
        index = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map: expected an object that names tensors and files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_file_name(name):
            raise ModelError(
                f"{path}: weight_map: {quoted(tensor)}: found {quoted(name)}, expected the name of"
                " a .safetensors file in the same folder"
            )
    return weight_map


def base_digest(folder: Path, load_format: str = "auto") -> str:
    """The identity of a base: sha256 hex over config.json and the headers of its files.

    Weights themselves are not hashed: 16 GB would take 16 s at every start. Dummy weights are a
    function of the config alone.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    files = [] if load_format == "dummy" else shard_files(folder)[0]
    digest.update(load_format.encode() if load_format == "dummy" else b"files")
    with model_errors():
        with open_file(config, follow_symlinks=True) as file:
            digest.update(hashlib.sha256(file.read(0, file.identity.size)).digest())
        for path in files:
            with open_file(path, follow_symlinks=True) as file:
                length = int.from_bytes(file.read(0, 8), "little")
                if length > min(_LIMITS.header_bytes, file.identity.size):
                    raise ModelError(f"{path}: claims a header of {length:,} bytes")
                digest.update(
                    hashlib.sha256(path.name.encode() + file.read(0, 8 + length)).digest()
                )
    return digest.hexdigest()


@contextmanager
def model_errors() -> Iterator[None]:
    """Turns errors of the safetensors reader into ModelError."""
    try:
        yield
    except SafetensorsError as error:
        raise ModelError(error.message, hint=error.hint) from None


def _is_plain_file_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and "/" not in name
        and "\\" not in name
    )

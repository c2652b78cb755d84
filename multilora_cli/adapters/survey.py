"""What registration and planning ask of an adapter, for thousands of them.

The adapters of a fleet repeat a few shapes: same trainer, same settings, other weights. What a
header says follows from its bytes, the config's and the size of the data, so each such triple is
taken apart and checked once (4 ms for 448 tensors) and recognised afterwards (0.15 ms). What was
found is kept on disk by device, inode, size and times of the two files, so that the next start only
looks at those (0.05 ms). Every refusal is `read_adapter`'s; the engine reads and checks every
adapter in full before it serves it, whatever was remembered here.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from multilora_cli.adapters.peft import (
    BIN_NAME,
    INDEX_NAME,
    SHARD,
    WEIGHTS_NAME,
    AdapterFile,
    read_adapter,
)
from multilora_cli.adapters.peft_config import CONFIG_BYTES_MAX, CONFIG_NAME
from multilora_cli.adapters.safetensors_header import (
    FileIdentity,
    OpenFile,
    SafetensorsError,
    identity_of,
    open_file,
    read_header_bytes,
)
from multilora_cli.adapters.strict_json import JsonError, parse_json
from multilora_cli.fleet.replace_file import replace_file
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import VECTOR_ITEMSIZE, Extras, MatrixName, VectorKind

_FORMAT = 2  # grows when the file below changes, or what adapters are checked for
_METADATA = re.compile(rb'\{"__metadata__":(\{[^{}\\]*\}),(?=")')
_Key = tuple[int, int, int, int, int]


class Shape(msgspec.Struct, frozen=True):
    """What config and headers say, the same for many adapters."""

    ranks_by_module: dict[str, list[int]]  # true rank in every layer, 0 where it is not adapted
    vectors: tuple[tuple[int, str, VectorKind], ...]  # layer, module and kind, in order
    matrices: tuple[tuple[MatrixName, int, int], ...]  # name, rows and row length, in order
    max_rank: int  # of any module
    num_weights: int  # numbers in all factors and matrices
    num_vector_elements: int  # numbers in all vectors
    base_model_name: str | None
    notes: tuple[str, ...]

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        """True rank by (layer, module)."""
        return {
            (layer, module): rank
            for module, ranks in self.ranks_by_module.items()
            for layer, rank in enumerate(ranks)
            if rank
        }

    @property
    def extras(self) -> Extras:
        """What its image holds beside the factors."""
        return Extras(frozenset(self.vectors), frozenset(self.matrices))

    def num_bytes(self, itemsize: int) -> int:
        """As `AdapterFile.num_bytes`."""
        return self.num_weights * itemsize + self.num_vector_elements * VECTOR_ITEMSIZE

    @property
    def modules(self) -> tuple[str, ...]:
        """The kinds of projections that are adapted, in the base's order."""
        return tuple(self.ranks_by_module)

    @property
    def num_bound(self) -> int:
        """Adapted (layer, module) pairs, and embedding and head where they are."""
        edges = {name.partition(".")[0] for name, _, _ in self.matrices}
        pairs = sum(rank > 0 for ranks in self.ranks_by_module.values() for rank in ranks)
        return pairs + len(edges)


@dataclass(frozen=True, slots=True)
class Survey:
    """One adapter whose config and headers fit the base."""

    folder: Path
    files: tuple[FileIdentity, ...]  # the config, then the weight files by name
    shape: Shape

    @property
    def keys(self) -> tuple[_Key, ...]:
        """The versions of the files."""
        return tuple(file.key for file in self.files)


class _Known(msgspec.Struct, frozen=True):
    """A folder that was surveyed: its files' identities, and the place of its shape."""

    files: tuple[_Key, _Key]
    shape: int


class _Memory(msgspec.Struct):
    """What is kept on disk."""

    shapes: list[Shape] = []
    folders: dict[str, _Known] = {}


class Surveyor:
    """Surveys adapters for one base; any thread may call it.

    Args:
        geometry, max_rank, base_folder: as for `read_adapter`.
        memory: folder that keeps what was found for the next start; None: nothing is kept.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        max_rank: int,
        base_folder: Path | None = None,
        memory: Path | None = None,
    ) -> None:
        self._geometry = geometry
        self._max_rank = max_rank
        self._base_folder = base_folder
        self._shapes: dict[bytes, Shape] = {}
        self._lock = threading.Lock()
        self._file = None if memory is None else memory / f"{self._base_key()}.msgpack"
        self._old = _read_memory(self._file)
        self._folders: dict[str, tuple[tuple[_Key, _Key], Shape]] = {}

    def survey(self, folder: Path) -> Survey:
        """The adapter in `folder`. Raises AdapterError."""
        folder = folder.expanduser().absolute()
        if not _is_plain(folder):
            return _survey_of(self._read(folder))
        config, weights = identity_of(folder / CONFIG_NAME), identity_of(folder / WEIGHTS_NAME)
        if config is not None and weights is not None:
            shape = self._remembered(str(folder), (config.key, weights.key))
            if shape is not None:
                return Survey(folder, (config, weights), shape)
        return self._look(folder)

    def save(self) -> None:
        """Keep what was found since the last start, for the next; a full disk is no failure."""
        if self._file is None:
            return
        with self._lock:
            folders = {
                **{f: (k.files, self._old.shapes[k.shape]) for f, k in self._old.folders.items()},
                **self._folders,
            }
            if not self._folders:
                return
            self._folders = {}
        places: dict[int, int] = {}
        memory = _Memory()
        for folder, (files, shape) in folders.items():
            if not os.path.isdir(folder):
                continue
            place = places.setdefault(id(shape), len(memory.shapes))
            if place == len(memory.shapes):
                memory.shapes.append(shape)
            memory.folders[folder] = _Known(files, place)
        self._old = memory
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file, msgspec.msgpack.encode(memory), 0o600)

    def _remembered(self, folder: str, files: tuple[_Key, _Key]) -> Shape | None:
        known = self._old.folders.get(folder)
        if known is None or known.files != files:
            return None
        return self._old.shapes[known.shape]

    def _look(self, folder: Path) -> Survey:
        """Read config and header; take them apart only where these bytes were not seen before."""
        try:
            with (
                open_file(folder / CONFIG_NAME) as config,
                open_file(folder / WEIGHTS_NAME) as file,
            ):
                key = _content_key(config, file)
                config.check_unchanged()
                file.check_unchanged()
                files = (config.identity, file.identity)
        except SafetensorsError:
            return _survey_of(self._read(folder))  # which says what is wrong
        shape = self._shapes.get(key) if key is not None else None
        if shape is None:
            adapter = self._read(folder)
            shape = _shape_of(adapter)
            if [file.key for file in adapter.files] != [file.key for file in files]:
                key = None  # replaced between the two looks
            if key is None or not _follows_from_header(adapter):
                return Survey(adapter.folder, adapter.files, shape)
            shape = self._shapes.setdefault(key, shape)
        with self._lock:
            self._folders[str(folder)] = ((files[0].key, files[1].key), shape)
        return Survey(folder, files, shape)

    def _read(self, folder: Path) -> AdapterFile:
        return read_adapter(
            folder, self._geometry, max_rank=self._max_rank, base_folder=self._base_folder
        )

    def _base_key(self) -> str:
        """What the answers depend on besides the adapter."""
        text = repr((_FORMAT, self._geometry, self._max_rank, str(self._base_folder)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_plain(folder: Path) -> bool:
    """Whether the folder holds one config, one weight file, and nothing that `read_adapter` would
    have a word to say about."""
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except (OSError, ValueError):
        return False
    others = {INDEX_NAME, BIN_NAME} & names or any(map(SHARD.fullmatch, names))
    return {CONFIG_NAME, WEIGHTS_NAME} <= names and not others


def _content_key(config: OpenFile, weights: OpenFile) -> bytes | None:
    """Digest of all that decides what the header says; None where it is too large."""
    if config.identity.size > CONFIG_BYTES_MAX:
        return None
    header = read_header_bytes(weights)
    digest = hashlib.sha256(hashlib.sha256(config.read(0, config.identity.size)).digest())
    digest.update((weights.identity.size - len(header)).to_bytes(8, "little"))
    digest.update(_without_metadata(header))
    return digest.digest()


def _without_metadata(header: bytes) -> bytes:
    """The header less its free text, which trainers fill with dates and names of runs."""
    match = _METADATA.match(header)
    if match is None or b"__metadata__" in header[match.end() :] or b"\\" in header:
        return header
    try:
        metadata = parse_json(match[1])
    except JsonError:
        return header
    is_text = all(isinstance(value, str) for value in metadata.values())
    return header[match.end() :] if is_text else header


def _follows_from_header(adapter: AdapterFile) -> bool:
    """Tensors beside the factors may be copies of the base's, which only their values tell."""
    return all(".lora_" in name or name.endswith(".bias") for name in adapter.tensors)


def _survey_of(adapter: AdapterFile) -> Survey:
    return Survey(adapter.folder, adapter.files, _shape_of(adapter))


def _shape_of(adapter: AdapterFile) -> Shape:
    ranks: Mapping[tuple[int, str], int] = adapter.ranks
    num_layers = 1 + max((layer for layer, _ in ranks), default=-1)
    return Shape(
        ranks_by_module={
            module: [ranks.get((layer, module), 0) for layer in range(num_layers)]
            for module in adapter.modules
        },
        vectors=tuple(sorted(adapter.extras.vectors)),
        matrices=tuple(sorted(adapter.extras.matrices)),
        max_rank=adapter.max_rank,
        num_weights=adapter.num_weights,
        num_vector_elements=adapter.num_vector_elements,
        base_model_name=adapter.base_model_name,
        notes=adapter.notes,
    )


def _read_memory(file: Path | None) -> _Memory:
    """What an earlier start kept; anything unreadable counts as nothing."""
    try:
        memory = msgspec.msgpack.decode(file.read_bytes() if file else b"", type=_Memory)
    except (OSError, msgspec.MsgspecError):
        return _Memory()
    places = range(len(memory.shapes))
    return memory if all(k.shape in places for k in memory.folders.values()) else _Memory()

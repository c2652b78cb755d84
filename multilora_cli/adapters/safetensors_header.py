"""Reads safetensors headers without trusting a byte of them.

Every number in a header is checked against the file's real size before anything is allocated, and
data is read by pread alone: a truncated memory map kills the process, a short pread is an error.
What this reader accepts, the safetensors library accepts too. It is stricter in that it refuses
duplicate keys, unknown fields, a header that does not start with an opening brace, names that are
empty, longer than 512 characters or not printable, more than 8 dimensions, and whatever exceeds
`Limits`; files that are not regular files (symlinks included, unless asked) are refused as well.
"""

import errno
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from multilora_cli.adapters.strict_json import JsonError, parse_json, quoted
from multilora_cli.errors import BadInput

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
        "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    }
)  # fmt: skip

_LENGTH_BYTES = 8
_PARTS_MAX = 1024  # of one read, by the system
_NAME_MAX = 512
_DIMENSIONS_MAX = 8
_DIMENSION_MAX = 2**48
_NEGATIVE = re.compile(rb"[\[,:]\s*-")
# A file written within the clock's tick (4 ms on Linux) of being read can change once more without
# a new mtime, so younger files are waited for.
_SETTLED_NS = 20_000_000


class SafetensorsError(BadInput):
    """A file that is refused: `reason` is one word, `tensor` the name concerned, if any."""

    def __init__(self, message: str, *, reason: str, tensor: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may claim at most; `file_bytes` None: any size."""

    header_bytes: int = 4 * 2**20
    tensors: int = 20_000
    file_bytes: int | None = 4 * 2**30


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file this is and in which version, as far as the file system can tell."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int  # moves even where mtime was set back

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """The identity without the path, which may have been spelled differently."""
        return (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns)


class TensorEntry(NamedTuple):
    """One tensor in a file: `offset` and `nbytes` are absolute and lie within the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def rows(self, start: int, stop: int) -> "TensorEntry":
        """Rows `start` to `stop` of the first dimension: their own shape, offset and bytes."""
        row_bytes = self.nbytes // self.shape[0]
        return self._replace(
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
        )


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Everything a file says about itself."""

    identity: FileIdentity
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


class OpenFile:
    """A regular file held open, read by position. Use `open_file`."""

    def __init__(self, descriptor: int, identity: FileIdentity) -> None:
        self._descriptor = descriptor
        self.identity = identity

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`. Raises SafetensorsError when the file is shorter."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        """Fill `buffers` (bytes), one after the other, from `offset` on. Raises SafetensorsError
        when the file is shorter."""
        left = deque(buffer for buffer in buffers if len(buffer))
        while left:
            try:
                count = os.preadv(self._descriptor, list(islice(left, _PARTS_MAX)), offset)
            except OSError as error:
                raise _unreadable(self.identity.path, error) from None
            if count == 0:
                raise SafetensorsError(
                    f"{self.identity.path}: ends at byte {offset:,} while it is read; it had"
                    f" {self.identity.size:,} bytes when it was opened",
                    reason="changed",
                )
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if left:
                left[0] = left[0][count:]

    def check_unchanged(self) -> None:
        """Raises SafetensorsError when the file was written to since it was opened."""
        now = _identity(self.identity.path, os.fstat(self._descriptor))
        if now.key != self.identity.key:
            raise SafetensorsError(
                f"{self.identity.path}: changed while it was read", reason="changed"
            )


@contextmanager
def open_file(path: Path, *, follow_symlinks: bool = False) -> Iterator[OpenFile]:
    """A regular file for reading; a symlink, FIFO, device or folder in its place is refused."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow_symlinks else flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        status = _settled(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SafetensorsError(
                f"{path}: is a {_kind(status.st_mode)}, expected a regular file",
                reason="not_a_file",
            )
        yield OpenFile(descriptor, _identity(path, status))
    finally:
        os.close(descriptor)


def identity_of(path: Path) -> FileIdentity | None:
    """The regular file at `path`, which is not opened; None where there is none."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return _identity(path, status) if stat.S_ISREG(status.st_mode) else None


def read_header(
    path: Path, limits: Limits = Limits(), *, follow_symlinks: bool = False
) -> SafetensorsHeader:
    """The checked header of the file at `path`. Raises SafetensorsError."""
    with open_file(path, follow_symlinks=follow_symlinks) as file:
        raw = read_header_bytes(file, limits)
        header = _Parser(file.identity, limits).parse(raw)
        file.check_unchanged()
    return header


def read_json(path: Path, max_bytes: int = 16 * 2**20) -> Any:
    """The content of a JSON file such as a shard index; duplicate keys are refused."""
    with open_file(path) as file:
        if file.identity.size > max_bytes:
            raise SafetensorsError(
                f"{path}: {file.identity.size:,} bytes, the limit is {max_bytes:,}",
                reason="too_large",
            )
        raw = file.read(0, file.identity.size)
    try:
        return parse_json(raw)
    except JsonError as error:
        raise SafetensorsError(f"{path}: {error}", reason="json") from None


def read_header_bytes(file: OpenFile, limits: Limits = Limits()) -> bytes:
    """The header as it is written, its length checked. Raises SafetensorsError."""
    path, size = file.identity.path, file.identity.size
    if size < _LENGTH_BYTES:
        raise SafetensorsError(
            f"{path}: {size} bytes, expected at least 8: not a safetensors file", reason="too_short"
        )
    if limits.file_bytes is not None and size > limits.file_bytes:
        raise SafetensorsError(
            f"{path}: {size:,} bytes, the limit is {limits.file_bytes:,}", reason="too_large"
        )
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if length > size - _LENGTH_BYTES:
        raise SafetensorsError(
            f"{path}: claims a header of {length:,} bytes, the file has {size:,}: cut short, or not"
            " a safetensors file",
            reason="header_length",
        )
    if length > limits.header_bytes:
        raise SafetensorsError(
            f"{path}: header of {length:,} bytes, the limit is {limits.header_bytes:,}",
            reason="header_length",
        )
    return file.read(_LENGTH_BYTES, length)


class _Parser:
    """Turns header bytes into entries, every error naming file, tensor, found and expected."""

    def __init__(self, identity: FileIdentity, limits: Limits) -> None:
        self._identity = identity
        self._path = identity.path
        self._limits = limits

    def parse(self, raw: bytes) -> SafetensorsHeader:
        """All tensors, proven to fill the rest of the file without hole or overlap."""
        fields = self._decode(raw)
        metadata = self._metadata(fields.pop("__metadata__", None))
        if len(fields) > self._limits.tensors:
            self._fail(
                f"{len(fields):,} tensors, the limit is {self._limits.tensors:,}",
                "too_many_tensors",
            )
        start = _LENGTH_BYTES + len(raw)
        tensors = {name: self._entry(name, info, start) for name, info in fields.items()}
        self._check_coverage(tensors, start)
        return SafetensorsHeader(self._identity, metadata, MappingProxyType(tensors))

    def _decode(self, raw: bytes) -> dict[str, Any]:
        if not raw.startswith(b"{"):
            self._fail("header does not start with {", "header_json")
        parse_int = _unsigned if _NEGATIVE.search(raw) else None
        try:
            fields = parse_json(raw, parse_int=parse_int)
        except JsonError as error:
            reason = "duplicate" if error.key else "header_json"
            self._fail(f"header: {error}", reason, error.key)
        return fields  # type: ignore[no-any-return]  # starts with {: an object or an error

    def _metadata(self, value: object) -> Mapping[str, str]:
        if value is None:
            return MappingProxyType({})
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self._fail("__metadata__ is not an object of strings", "metadata")
        return MappingProxyType(value)

    def _entry(self, name: str, info: object, start: int) -> TensorEntry:
        if not name or len(name) > _NAME_MAX or not name.isprintable():
            self._fail(
                f"tensor name {quoted(name)}: expected 1 to {_NAME_MAX} printable characters",
                "name",
                name,
            )
        if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail(
                f"tensor {quoted(name)}: expected dtype, shape and data_offsets, found"
                f" {quoted(sorted(info) if isinstance(info, dict) else info)}",
                "entry",
                name,
            )
        bits = self._bits(name, info["dtype"], info["shape"])
        begin, end = self._offsets(name, info["data_offsets"])
        if bits != (end - begin) * 8:
            self._fail(
                f"tensor {quoted(name)}: {info['dtype']} {info['shape']} takes {bits / 8:,g} bytes,"
                f" data_offsets give {end - begin:,}",
                "size",
                name,
            )
        shape = tuple(info["shape"])
        return TensorEntry(name, self._path, info["dtype"], shape, start + begin, end - begin)

    def _bits(self, name: str, dtype: object, shape: object) -> int:
        bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            self._fail(f"tensor {quoted(name)}: unknown dtype {quoted(dtype)}", "dtype", name)
        if not isinstance(shape, list) or len(shape) > _DIMENSIONS_MAX:
            self._fail(
                f"tensor {quoted(name)}: shape {quoted(shape)}, expected a list of at most"
                f" {_DIMENSIONS_MAX} sizes",
                "shape",
                name,
            )
        for size in shape:
            if type(size) is not int or not 0 <= size < _DIMENSION_MAX:
                self._fail(
                    f"tensor {quoted(name)}: shape {quoted(shape)}, expected sizes from 0 to 2^48",
                    "shape",
                    name,
                )
            bits *= size
        return bits

    def _offsets(self, name: str, offsets: object) -> tuple[int, int]:
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or type(offsets[0]) is not int
            or type(offsets[1]) is not int
            or not 0 <= offsets[0] <= offsets[1] <= self._identity.size
        ):
            self._fail(
                f"tensor {quoted(name)}: data_offsets {quoted(offsets)}, expected a begin and an"
                f" end within the file of {self._identity.size:,} bytes",
                "offsets",
                name,
            )
        return offsets[0], offsets[1]

    def _check_coverage(self, tensors: Mapping[str, TensorEntry], start: int) -> None:
        """The tensors' bytes follow one another from the header to the end of the file."""
        position = start
        for entry in sorted(tensors.values(), key=lambda e: (e.offset, e.nbytes)):
            if entry.offset != position:
                gap = entry.offset - position
                self._fail(
                    f"tensor {quoted(entry.name)}: begins {abs(gap):,} bytes"
                    f" {'after' if gap > 0 else 'before'} the end of the tensor before it",
                    "hole" if gap > 0 else "overlap",
                    entry.name,
                )
            position += entry.nbytes
        rest = self._identity.size - position
        if rest:
            self._fail(
                f"the header describes {position - start:,} bytes of tensors, the file holds"
                f" {self._identity.size - start:,}",
                "trailing" if rest > 0 else "truncated",
            )

    def _fail(self, message: str, reason: str, tensor: str = "") -> NoReturn:
        raise SafetensorsError(f"{self._path}: {message}", reason=reason, tensor=tensor)


def _unsigned(text: str) -> int:
    """The format's numbers are unsigned: the library refuses even -0. Others fail by tensor."""
    if text == "-0":
        raise ValueError("negative number -0")
    return int(text)


def _settled(descriptor: int) -> os.stat_result:
    """The file's status, once it has not been written to for 20 ms (waits at most that long)."""
    status = os.fstat(descriptor)
    age = time.time_ns() - status.st_mtime_ns
    if stat.S_ISREG(status.st_mode) and 0 <= age < _SETTLED_NS:
        time.sleep((_SETTLED_NS - age) / 1e9)
        status = os.fstat(descriptor)
    return status


def _identity(path: Path, status: os.stat_result) -> FileIdentity:
    return FileIdentity(
        path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "folder"),
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return name
    return "special file"


def _unreadable(path: Path, error: OSError | ValueError) -> SafetensorsError:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return SafetensorsError(
            f"{path}: is a symlink, expected a regular file", reason="not_a_file"
        )
    if isinstance(error, FileNotFoundError):
        return SafetensorsError(f"{path}: no such file", reason="missing")
    text = error.strerror if isinstance(error, OSError) else str(error)
    return SafetensorsError(f"{path}: not readable: {text}", reason="unreadable")

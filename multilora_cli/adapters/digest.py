"""The identity of an adapter: a digest of its config and weights, whatever its name or folder."""

import hashlib
import threading
from collections.abc import Iterable

from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import FileIdentity, SafetensorsError, open_file
from multilora_cli.errors import AdapterError

_CHUNK_BYTES = 2**20
_REMEMBERED_MAX = 100_000
_Key = tuple[tuple[int, int, int, int, int], ...]


class DigestMemory:
    """Digests already computed, by device, inode, size and times of every file."""

    def __init__(self) -> None:
        self._digests: dict[_Key, str] = {}
        self._lock = threading.Lock()

    def get(self, files: Iterable[FileIdentity]) -> str | None:
        """The digest of exactly these file versions, if it was computed before."""
        return self._digests.get(tuple(file.key for file in files))

    def put(self, files: Iterable[FileIdentity], digest: str) -> None:
        """Remember `digest`; the oldest entry makes room."""
        with self._lock:
            if len(self._digests) >= _REMEMBERED_MAX:
                self._digests.pop(next(iter(self._digests)))
            self._digests[tuple(file.key for file in files)] = digest


_MEMORY = DigestMemory()


def known_digest(adapter: AdapterFile, memory: DigestMemory = _MEMORY) -> str | None:
    """The content's digest where it was computed before from the same files; reads nothing."""
    return memory.get(adapter.files)


def remember_digest(
    adapter: AdapterFile, digest: str, files: _Key, memory: DigestMemory = _MEMORY
) -> None:
    """Take over a digest that another process computed from `files`, where they are these."""
    if files and files == tuple(file.key for file in adapter.files):
        memory.put(adapter.files, digest)


def content_digest(adapter: AdapterFile, memory: DigestMemory = _MEMORY) -> str:
    """SHA-256 (hex) over the config and the weight files, about 1 ms per MB the first time.

    Raises AdapterError when a file is no longer the one that was read.
    """
    return files_digest(adapter.files, memory)


def files_digest(files: tuple[FileIdentity, ...], memory: DigestMemory = _MEMORY) -> str:
    """`content_digest` of an adapter of `files`: the config, then the weight files by name."""
    digest = memory.get(files)
    if digest is None:
        digest = _hash(files)
        memory.put(files, digest)
    return digest


def _hash(files: tuple[FileIdentity, ...]) -> str:
    """Names and sizes go in too, so that no two sets of files run together."""
    total = hashlib.sha256(b"mlora adapter\0")
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for identity in files:
        total.update(f"{identity.path.name}\0{identity.size}\0".encode())
        try:
            with open_file(identity.path) as file:
                if file.identity.key != identity.key:
                    raise changed(identity)
                for offset in range(0, identity.size, _CHUNK_BYTES):
                    part = buffer[: min(_CHUNK_BYTES, identity.size - offset)]
                    file.read_into(offset, part)
                    total.update(part)
                file.check_unchanged()
        except SafetensorsError as error:
            raise AdapterError(error.message, reason=error.reason) from None
    return total.hexdigest()


def changed(identity: FileIdentity) -> AdapterError:
    """The refusal of a file that is not the one whose header was read."""
    return AdapterError(
        f"{identity.path}: changed since its header was read",
        reason="changed",
        hint="publish a new version by renaming a finished folder into place",
    )

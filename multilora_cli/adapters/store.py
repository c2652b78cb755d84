"""The stored tier: verified copies of remote adapters on disk, each named by its content digest.

    entries/DIGEST/     an adapter and its manifest.json, complete or not there
    refs/KEY            what a source stood for when it was last asked
    partial/USER-N      what a running process is writing
    users/USER          the digests one running process uses; locked as long as it lives
    locks/              one process at a time fetches a source, or publishes or evicts a digest

Several processes may share one store. An entry appears by one rename, after everything in it is on
the medium, its manifest last. It is hashed again when a process first uses it; one that is not what
its name says is removed and counted.
"""

import errno
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from multilora_cli.adapters.digest import files_digest
from multilora_cli.adapters.disk import Disk, locked, private_folder
from multilora_cli.adapters.peft import INDEX_NAME
from multilora_cli.adapters.peft_config import CONFIG_NAME
from multilora_cli.adapters.safetensors_header import FileIdentity, open_file, read_json
from multilora_cli.adapters.store_use import StoreUse, live_users
from multilora_cli.errors import AdapterError, AdapterUnavailable, BadInput
from multilora_cli.units import format_size

FORMAT = 1  # of manifests and refs; entries of another one are fetched again
_MANIFEST = "manifest.json"
_MANIFEST_BYTES_MAX = 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FOLDERS = ("entries", "refs", "partial", "users", "locks")
_DISK = Disk()


@dataclass(frozen=True, slots=True)
class Ref:
    """What a source stood for at `fetched_at` (seconds since the epoch)."""

    source: str
    revision: str  # commit, or a digest over the object versions
    digest: str
    fetched_at: float


@dataclass(slots=True)
class StoreCounts:
    """What happened since the store was opened."""

    corrupt: int = 0  # entries that were not what their name said
    evicted: int = 0
    orphans: int = 0  # left by processes that died


class Staging:
    """A folder that becomes an entry; `write` what belongs into it, then `DiskStore.publish`."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self._disk = disk

    @contextmanager
    def writing(self, name: str) -> Iterator["StagedFile"]:
        """A new file in place of any earlier one; on the medium when the block ends well."""
        path = self.folder / name
        self._disk.remove(path)
        descriptor = self._disk.create(path)
        try:
            yield StagedFile(descriptor, self._disk)
            self._disk.sync(descriptor)
        except BaseException:
            self._disk.remove(path)
            raise
        finally:
            self._disk.close(descriptor)


class StagedFile:
    """Takes bytes and their SHA-256."""

    def __init__(self, descriptor: int, disk: Disk) -> None:
        self._descriptor = descriptor
        self._disk = disk
        self._sha256 = hashlib.sha256()
        self.size = 0

    def write(self, part: bytes) -> None:
        """Append `part`."""
        self._disk.write(self._descriptor, memoryview(part))
        self._sha256.update(part)
        self.size += len(part)

    @property
    def sha256(self) -> str:
        """Of everything written so far, in hex."""
        return self._sha256.hexdigest()


class DiskStore:
    """Entries by digest, least recently used out first. Every method may be called by any thread.

    Args:
        root: made with mode 0700; anything laxer, or another user's folder, is refused.
        budget_bytes: what all entries may take together.
        wait_s: the longest wait for another process.
    """

    def __init__(
        self, root: Path, budget_bytes: int, *, disk: Disk = _DISK, wait_s: float = 600.0
    ) -> None:
        self._root = private_folder(root)
        self._budget_bytes = budget_bytes
        self._disk = disk
        self._wait_s = wait_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # bytes by digest, of entries that were seen
        self._stale: dict[Path, str] = {}
        self.counts = StoreCounts()
        with self._in_words("opening it"):
            for name in _FOLDERS:
                private_folder(self._root / name)
            with self._held("users"):
                self._sweep()
                self._use = StoreUse(self._root / "users")

    @property
    def root(self) -> Path:
        """The folder of the store."""
        return self._root

    def close(self) -> None:
        """Give up the use of every entry."""
        self._use.close()

    # ---- what sources ask

    def acquire(self, digest: str) -> Path | None:
        """The folder of a verified entry, in use from now on; None: not stored (any more)."""
        folder = self._entry(digest)
        if not folder.is_dir():
            return None
        with self._in_words("reading it"), self._held(f"digest-{digest[:2]}"):
            if not folder.is_dir():
                return None
            self._use.add(digest)
            if not self._is_intact(folder, digest):
                self.counts.corrupt += 1
                self._discard(digest)
                self._use.discard(digest)
                return None
            os.utime(folder / _MANIFEST)
        return folder

    @contextmanager
    def fetching(self, source: str) -> Iterator[None]:
        """One thread of one process fetches `source`; others wait. Raises AdapterUnavailable."""
        with self._held(f"source-{_key(source)[:3]}"):
            yield

    @contextmanager
    def staging(self, num_bytes: int) -> Iterator[Staging]:
        """Room for `num_bytes` and a folder to write them to, which is gone afterwards."""
        with self._in_words(f"writing {format_size(num_bytes)}", num_bytes):
            self.make_room(num_bytes)
            folder = self._temporary()
            self._disk.make_folder(folder)
            try:
                yield Staging(folder, self._disk)
            finally:
                self._disk.remove(folder)

    def digest_of(self, staging: Staging) -> str:
        """The content digest of the staged files. Raises BadInput where they are no adapter."""
        return _read_files(staging.folder, sorted(os.listdir(staging.folder)))[1]

    def publish(self, staging: Staging, source: str, revision: str) -> Ref:
        """Make the staged files an entry in use, and remember what `source` stands for."""
        folder = staging.folder
        with self._in_words("publishing an adapter"):
            files, digest = _read_files(folder, sorted(os.listdir(folder)))
            manifest = {
                "format": FORMAT,
                "digest": digest,
                "files": files,
                "source": source,
                "revision": revision,
            }
            self._disk.write_file(folder / _MANIFEST, msgspec.json.encode(manifest))
            self._disk.sync_folder(folder)
            with self._held(f"digest-{digest[:2]}"):
                self._use.add(digest)
                entry = self._entry(digest)
                if entry.is_dir() and not self._is_intact(entry, digest):
                    self._discard(digest)
                if not entry.is_dir():
                    self._disk.rename(folder, entry)
                self._disk.sync_folder(entry.parent)
            with self._lock:
                self._sizes[digest] = sum(int(file["size"]) for file in files.values())
            ref = Ref(source, revision, digest, time.time())
            self._remember(ref)
        return ref

    def lookup(self, source: str) -> Ref | None:
        """What `source` stood for when it was last fetched, if that is known."""
        path = self._root / "refs" / _key(source)
        fields = _read_json_object(path)
        try:
            ref = msgspec.convert(fields, Ref)
        except msgspec.ValidationError:
            return None
        good = _has_format(fields) and ref.source == source
        return ref if good and _DIGEST.fullmatch(ref.digest) else None

    def mark_stale(self, folder: Path, why: str) -> None:
        """Say beside the adapter in `folder` that its origin could not be asked."""
        self._stale[folder] = why

    def clear_stale(self, folder: Path) -> None:
        """The origin was asked again."""
        self._stale.pop(folder, None)

    def notes_on(self, folder: Path) -> tuple[str, ...]:
        """What is to be said about the adapter in `folder`."""
        why = self._stale.get(folder)
        return (f"stale: {why}",) if why else ()

    def revision_of(self, folder: Path) -> str | None:
        """What the entry in `folder` was fetched as: a commit, or a digest of object versions."""
        found = _read_json_object(folder / _MANIFEST).get("revision")
        return found if isinstance(found, str) else None

    # ---- room

    def release(self, digest: str) -> None:
        """This process no longer uses the entry."""
        self._use.discard(digest)

    def total_bytes(self) -> int:
        """What all entries take, those of other processes included."""
        return sum(self._scan().values())

    def make_room(self, num_bytes: int) -> None:
        """Evict until `num_bytes` more fit budget and disk. Raises AdapterUnavailable."""
        sizes = self._scan()
        over = sum(sizes.values()) + num_bytes - self._budget_bytes
        lacking = num_bytes - self._disk.free_bytes(self._root)
        if over <= 0 and lacking <= 0:
            return
        for digest in self._by_age(sizes):
            if over <= 0 and lacking <= 0:
                return
            if self._evict(digest):
                over -= sizes[digest]
                lacking -= sizes[digest]
        if over > 0:
            raise AdapterUnavailable(
                f"disk cache {self._root}: {format_size(num_bytes)} needed,"
                f" {format_size(max(num_bytes - over, 0))} left of the budget of"
                f" {format_size(self._budget_bytes)}: the rest is in use"
            )
        if lacking > 0:
            raise self._disk_full(num_bytes)

    def check_integrity(self) -> None:
        """Every entry is whole and nothing of a dead process is left. Raises ValueError."""
        for digest in os.listdir(self._root / "entries"):
            if not self._is_intact(self._entry(digest), digest):
                raise ValueError(f"entry {digest} is not what its name says")
        live = self._use.live()
        for name in os.listdir(self._root / "partial"):
            if name.rpartition("-")[0] not in live:
                raise ValueError(f"partial/{name} belongs to nobody")

    # ---- inside

    def _entry(self, digest: str) -> Path:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest!r} is not a digest")
        return self._root / "entries" / digest

    def _temporary(self) -> Path:
        return self._root / "partial" / f"{self._use.user}-{next(self._numbers)}"

    def _remember(self, ref: Ref) -> None:
        data = msgspec.json.encode({"format": FORMAT, **msgspec.to_builtins(ref)})
        self._disk.replace_file(self._root / "refs" / _key(ref.source), self._temporary(), data)

    def _is_intact(self, folder: Path, digest: str) -> bool:
        """Whether the files are those of the manifest and hash to the entry's name."""
        manifest = _read_json_object(folder / _MANIFEST)
        files = manifest.get("files")
        if not _has_format(manifest) or not isinstance(files, dict):
            return False
        try:
            if set(os.listdir(folder)) != {*files, _MANIFEST}:
                return False
            found, found_digest = _read_files(folder, sorted(files))
        except (BadInput, OSError):
            return False
        return found == files and found_digest == digest

    def _scan(self) -> dict[str, int]:
        """Bytes by digest of all entries now; manifests are read once."""
        names = {name for name in os.listdir(self._root / "entries") if _DIGEST.fullmatch(name)}
        with self._lock:
            for digest in self._sizes.keys() - names:
                del self._sizes[digest]
            new = names - self._sizes.keys()
        for digest in new:
            size = _entry_bytes(self._entry(digest))
            with self._lock:
                self._sizes[digest] = size
        with self._lock:
            return {digest: self._sizes[digest] for digest in names & self._sizes.keys()}

    def _by_age(self, sizes: Mapping[str, int]) -> list[str]:
        """Entries that may go, the least recently used first."""
        times = {}
        for digest in sizes.keys() - self._use.all():
            try:
                times[digest] = os.stat(self._entry(digest) / _MANIFEST).st_mtime_ns
            except FileNotFoundError:
                times[digest] = 0
        return sorted(times, key=lambda digest: (times[digest], digest))

    def _evict(self, digest: str) -> bool:
        """Remove an entry unless somebody took it into use since, or works on it now."""
        with locked(self._root / "locks" / f"digest-{digest[:2]}", wait_s=0) as held:
            if not held or digest in self._use.all():
                return False
            self._discard(digest)
        with self._lock:
            self._sizes.pop(digest, None)
        self.counts.evicted += 1
        return True

    def _discard(self, digest: str) -> None:
        """Out of sight by one rename, then removed."""
        temporary = self._temporary()
        self._disk.rename(self._entry(digest), temporary)
        self._disk.remove(temporary)

    def _sweep(self) -> None:
        """Remove what processes that died have left. The caller holds the lock of users."""
        live = live_users(self._root / "users")
        for path in (self._root / "users").iterdir():
            if path.name not in live:
                path.unlink(missing_ok=True)
        for path in (self._root / "partial").iterdir():
            if path.name.rpartition("-")[0] not in live:
                self.counts.orphans += 1
                self._disk.remove(path)
        for path in (self._root / "entries").iterdir():
            if _DIGEST.fullmatch(path.name) is None or not (path / _MANIFEST).is_file():
                self.counts.orphans += 1
                self._disk.remove(path)

    @contextmanager
    def _held(self, name: str) -> Iterator[None]:
        with locked(self._root / "locks" / name, wait_s=self._wait_s) as held:
            if not held:
                raise AdapterUnavailable(
                    f"disk cache {self._root}: another process holds {name} for more than"
                    f" {self._wait_s:g} s"
                )
            yield

    @contextmanager
    def _in_words(self, doing: str, num_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full(num_bytes) from None
            raise AdapterUnavailable(
                f"disk cache {self._root}: {doing}: {error.strerror or error}"
            ) from None

    def _disk_full(self, num_bytes: int) -> AdapterUnavailable:
        need = f"{format_size(num_bytes)} needed, " if num_bytes else ""
        have = format_size(self._disk.free_bytes(self._root))
        return AdapterUnavailable(
            f"disk cache {self._root}: no space left: {need}{have} free in its file system"
        )


class StoreOpener:
    """A disk store that is opened when the first remote adapter needs it."""

    def __init__(self, open_store: Callable[[], DiskStore | None]) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self.opened: DiskStore | None = None

    @classmethod
    def of(cls, store: DiskStore | None) -> "StoreOpener":
        """One that is open, or that has nothing to open."""
        opener = cls(lambda: store)
        opener.opened = store
        return opener

    def __call__(self) -> DiskStore | None:
        """The store. Raises BadInput for an unsafe folder."""
        with self._lock:
            if self.opened is None:
                self.opened = self._open()
            return self.opened

    def revision_of(self, folder: Path) -> str | None:
        """As the store's; None for a folder that is none of its entries."""
        store = self.opened
        ours = store is not None and folder.parent == store.root / "entries"
        return store.revision_of(folder) if store is not None and ours else None


def _key(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _has_format(fields: Mapping[str, Any]) -> bool:
    found = fields.get("format")
    return type(found) is int and found == FORMAT


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path, _MANIFEST_BYTES_MAX)
    except BadInput:
        return {}
    return value if isinstance(value, dict) else {}


def _entry_bytes(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0


def _read_files(folder: Path, names: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Sizes (and the index's SHA-256) by name, and the content digest. Raises BadInput."""
    files: dict[str, dict[str, Any]] = {}
    weights: list[FileIdentity] = []
    config: list[FileIdentity] = []
    for name in names:
        with open_file(folder / name) as file:
            files[name] = {"size": file.identity.size}
            if name == INDEX_NAME:
                raw = file.read(0, file.identity.size)
                files[name]["sha256"] = hashlib.sha256(raw).hexdigest()
            else:
                (config if name == CONFIG_NAME else weights).append(file.identity)
    if not config or not weights:
        raise AdapterError(f"{folder}: no {CONFIG_NAME} or no weights", reason="missing")
    return files, files_digest((*config, *weights))

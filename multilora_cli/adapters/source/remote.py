"""From an origin to a verified folder in the disk store: asked, fetched, checked, published."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilora_cli.adapters.peft import BIN_NAME, INDEX_NAME, SHARD, WEIGHTS_NAME
from multilora_cli.adapters.peft_config import CONFIG_BYTES_MAX, CONFIG_NAME
from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.source.fetch import (
    ChangedError,
    CorruptError,
    FetchError,
    FetchLimits,
    MissingError,
    Origin,
    RefusedError,
    RemoteFile,
    TransientError,
    Tries,
)
from multilora_cli.adapters.store import DiskStore, Ref, Staging
from multilora_cli.adapters.strict_json import JsonError, parse_json, quoted
from multilora_cli.adapters.text_files import BYTES_MAX
from multilora_cli.errors import AdapterError, AdapterUnavailable

_INDEX_BYTES_MAX = 16 * 2**20
_NAMES = (CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, BIN_NAME)
_PARALLEL_MAX = 8
_LIMITS = FetchLimits()
_ROUNDS = 3  # objects that change while they are read: looked up this often


@dataclass(frozen=True, slots=True)
class Address:
    """A remote adapter: `spec` is its one spelling, `is_fixed` that it can never change."""

    spec: str
    host: str
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter in the disk store; `stale` that its origin could not be asked."""

    folder: Path
    digest: str
    revision: str
    stale: bool = False


_Open = Callable[[Address, FetchLimits], AbstractContextManager[Origin]]


class RemoteSource:
    """Adapters that are fetched into the disk store before they are read."""

    def __init__(
        self, parse: Callable[[str], Address], connect: _Open, limits: FetchLimits = _LIMITS
    ) -> None:
        self._parse = parse
        self._open = connect
        self._limits = limits
        self._slots = threading.BoundedSemaphore(_PARALLEL_MAX)
        self._down: dict[str, tuple[float, str]] = {}  # by host: until when, why

    def resolve(self, text: str, context: SourceContext) -> Path:
        """The folder of the stored copy, fetched where it is missing or not the newest."""
        return self.fetch(text, context).folder

    def fetch(self, text: str, context: SourceContext) -> Fetched:
        """`resolve`, and what was found. Raises AdapterError, AdapterUnavailable."""
        address = self._parse(text)
        store = context.store
        if store is None:
            raise AdapterError(
                f"source {address.spec}: there is no disk cache to fetch it into", reason="source"
            )
        fetch = _Fetch(address, store, context)
        with store.fetching(fetch.source):
            return fetch.run(self._ask, self._limits)

    @contextmanager
    def _ask(self, address: Address) -> Iterator[Origin]:
        """The origin, unless it was found down a moment ago. Raises FetchError."""
        until, why = self._down.get(address.host, (0.0, ""))
        if time.monotonic() < until:
            raise TransientError(why, no_contact=True)
        try:
            with self._slots, self._open(address, self._limits) as origin:
                yield origin
        except TransientError as error:
            if error.no_contact:
                until = time.monotonic() + self._limits.down_s
                self._down[address.host] = (until, error.message)
            raise
        self._down.pop(address.host, None)


class _Fetch:
    """One adapter, once."""

    def __init__(self, address: Address, store: DiskStore, context: SourceContext) -> None:
        self._address = address
        self._store = store
        self._expected = context.digest
        self._text_files = context.text_files
        # With files of its text it is other content: it has a ref and an entry of its own.
        self.source = " + ".join((address.spec, *context.text_files))
        self._ref: Ref | None = None

    def run(
        self, ask: Callable[[Address], AbstractContextManager[Origin]], limits: FetchLimits
    ) -> Fetched:
        """The stored copy where it cannot be out of date, else what the origin has."""
        self._ref = self._store.lookup(self.source)
        stored = self._stored_for_good()
        if stored is not None:
            return stored
        try:
            with ask(self._address) as origin:
                return self._refresh(origin, Tries(limits), limits)
        except TransientError as error:
            return self._stored_or_raise(error)
        except FetchError as error:
            raise AdapterError(self._words(error), reason=_reason(error), hint=error.hint) from None

    def _stored_for_good(self) -> Fetched | None:
        """A copy that needs no question: of the expected digest, or at a commit."""
        digest = self._expected
        if digest is None and self._address.is_fixed and self._ref is not None:
            digest = self._ref.digest
        return self._acquire(digest) if digest is not None else None

    def _stored_or_raise(self, error: TransientError) -> Fetched:
        ref = self._ref
        if ref is not None and self._expected is None:
            stored = self._acquire(ref.digest)
            if stored is not None:
                at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(ref.fetched_at))
                why = f"{self._words(error)}; the copy fetched on {at} UTC is used"
                self._store.mark_stale(stored.folder, why)
                return Fetched(stored.folder, stored.digest, stored.revision, stale=True)
        raise AdapterUnavailable(self._words(error)) from None

    def _acquire(self, digest: str) -> Fetched | None:
        folder = self._store.acquire(digest)
        if folder is None:
            return None
        self._store.clear_stale(folder)
        ref = self._ref
        revision = ref.revision if ref is not None and ref.digest == digest else ""
        return Fetched(folder, digest, revision)

    def _refresh(self, origin: Origin, tries: Tries, limits: FetchLimits) -> Fetched:
        """What the origin has now; a version that changes while it is read is looked up again."""
        for _ in range(_ROUNDS):
            try:
                plan = _Plan.make(origin, tries, limits, self._text_files)
                same = self._ref is not None and self._ref.revision == plan.revision
                if self._ref is not None and same and self._expected in (None, self._ref.digest):
                    stored = self._acquire(self._ref.digest)
                    if stored is not None:
                        return stored
                return self._download(origin, plan, tries, same)
            except ChangedError as error:
                last = error
        raise TransientError(f"changes all the time: {last.message}")

    def _download(self, origin: Origin, plan: "_Plan", tries: Tries, same: bool) -> Fetched:
        expected = self._expected or (self._ref.digest if self._ref is not None and same else None)
        for is_last in (False, True):
            with self._store.staging(plan.num_bytes) as staging:
                for file in plan.files:
                    _fetch_file(origin, file, staging, tries)
                digest = self._store.digest_of(staging)
                if expected is None or digest == expected:
                    ref = self._store.publish(staging, self.source, plan.revision)
                    return self._published(ref)
            if is_last:
                break
        raise CorruptError(f"digest: found sha256:{digest}, expected sha256:{expected}")

    def _published(self, ref: Ref) -> Fetched:
        self._ref = ref
        fetched = self._acquire(ref.digest)
        if fetched is None:
            raise TransientError("the stored copy was damaged at once")
        return fetched

    def _words(self, error: FetchError) -> str:
        return f"source {self._address.spec}: {self._address.host}: {error.message}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which files an adapter is made of, and at which revision."""

    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @staticmethod
    def make(
        origin: Origin, tries: Tries, limits: FetchLimits, text_files: Sequence[str] = ()
    ) -> "_Plan":
        """Looked up by name: the config and the one weight file, or the index and its shards; and
        those of `text_files` that are there."""
        commit = tries.run(origin.revision)
        found = tries.run(lambda: origin.look_up((*_NAMES, *text_files)))
        if CONFIG_NAME not in found:
            raise MissingError(f"no {CONFIG_NAME} directly in the folder")
        files = [_limited(found[CONFIG_NAME], CONFIG_BYTES_MAX)]
        if WEIGHTS_NAME in found:
            files.append(_limited(found[WEIGHTS_NAME], limits.file_bytes))
        elif INDEX_NAME in found:
            index = _limited(found[INDEX_NAME], _INDEX_BYTES_MAX)
            files += [index, *_shards(origin, index, tries, limits)]
        elif BIN_NAME in found:
            raise RefusedError(
                f"{BIN_NAME}: a pickle can run code when it is read; expected {WEIGHTS_NAME}"
            )
        else:
            raise MissingError(f"no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME}")
        files += [_limited(found[n], BYTES_MAX[n]) for n in text_files if n in found]
        return _Plan(commit or _versions(files), tuple(files))


def _shards(
    origin: Origin, index: RemoteFile, tries: Tries, limits: FetchLimits
) -> list[RemoteFile]:
    """The shards that the index names, and no other file."""
    try:
        value: Any = parse_json(tries.run(lambda: b"".join(origin.read(index))))
    except JsonError as error:
        raise RefusedError(f"{INDEX_NAME}: {error}") from None
    where = value.get("weight_map") if isinstance(value, dict) else None
    names = set(where.values()) if isinstance(where, dict) else set()
    if not names or not all(isinstance(name, str) and SHARD.fullmatch(name) for name in names):
        raise RefusedError(f"{INDEX_NAME}: weight_map: expected names of shards")
    if len(names) > limits.shards:
        raise RefusedError(f"{INDEX_NAME}: {len(names)} shards, the limit is {limits.shards}")
    found: Mapping[str, RemoteFile] = tries.run(lambda: origin.look_up(sorted(names)))
    missing = sorted(names - found.keys())
    if missing:
        raise MissingError(f"{missing[0]}: named by {INDEX_NAME}, but not there")
    return [_limited(found[name], limits.file_bytes) for name in sorted(names)]


def _limited(file: RemoteFile, max_bytes: int) -> RemoteFile:
    if file.size > max_bytes:
        raise RefusedError(f"{file.name}: {file.size:,} bytes, the limit is {max_bytes:,}")
    return file


def _versions(files: list[RemoteFile]) -> str:
    """One word for the versions of all objects, where there is no commit."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file.size}\0{file.version}\0".encode())
    return f"objects:{total.hexdigest()}"


def _fetch_file(origin: Origin, file: RemoteFile, staging: Staging, tries: Tries) -> None:
    """Into the staging folder, its SHA-256 computed on the way; wrong bytes are fetched twice."""

    def attempt() -> None:
        with staging.writing(file.name) as target:
            for part in origin.read(file):
                target.write(part)
            if target.size != file.size:
                raise TransientError(f"{target.size:,} of {file.size:,} bytes came")
            if file.sha256 is not None and target.sha256 != file.sha256:
                raise CorruptError(f"SHA-256: found {target.sha256}, expected {file.sha256}")

    try:
        try:
            tries.run(attempt)
        except CorruptError:
            tries.run(attempt)
    except FetchError as error:
        error.message = f"{quoted(file.name)[1:-1]}: {error.message}"
        raise


def _reason(error: FetchError) -> str:
    kinds = ((CorruptError, "digest"), (MissingError, "missing"), (RefusedError, "refused"))
    return next((word for kind, word in kinds if isinstance(error, kind)), "source")

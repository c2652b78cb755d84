"""The names that requests may use, and the adapter version each stands for.

Reading happens outside the lock, one reader a name; what readers of other threads see changes in
one assignment. A name's entry is replaced whole, never edited, and every new version has a larger
generation. Registration reads config and headers only, and keeps a summary: 5,000 names are cheap.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.adapters.source import resolve_source
from multilora_cli.adapters.source.local import allowed_folder
from multilora_cli.adapters.store import DiskStore
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError, AdapterUnavailable, MloraError, RequestError
from multilora_cli.fleet.schema import is_adapter_name
from multilora_cli.sizing.geometry import ModelGeometry

Pin = Literal["hot", "warm"]
Outcome = Literal["added", "replaced", "unchanged"]


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter as a fleet file or an operator names it."""

    name: str
    source: str  # folder, demo:NAME, dummy:..., hf://... or s3://...
    pin: Pin | None = None
    priority: int = 0
    digest: str | None = None  # sha256 hex or sha256:hex; anything else is refused


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One name and the version it stands for. Times are seconds since the epoch."""

    name: str
    source: str
    path: str  # folder that was read; empty where it could not be resolved
    generation: int
    registered_at: float
    files: tuple[tuple[int, int, int, int, int], ...] = ()  # FileIdentity.key of each file
    digest: str | None = None  # sha256 hex; None until it is first needed
    rank: int = 0  # the largest of any module
    modules: tuple[str, ...] = ()
    num_bound: int = 0  # adapted (layer, module) pairs
    num_bytes: int = 0  # of all factors in the compute dtype, nothing padded
    base_model_name: str | None = None
    notes: tuple[str, ...] = ()
    pin: Pin | None = None
    priority: int = 0
    state: Literal["ready", "failed"] = "ready"
    detail: str = ""  # why it failed
    failed_at: float = 0.0
    retry_at: float | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """What a registration did."""

    entry: AdapterEntry
    outcome: Outcome
    previous: AdapterEntry | None = None  # the version that was replaced


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base that all adapters of a registry belong to."""

    geometry: ModelGeometry
    name: str  # how requests name it; no adapter may take it
    max_rank: int = 512  # larger adapters are refused
    itemsize: int = 2  # bytes per weight in the compute dtype
    folder: Path | None = None  # its files, to compare copies that PEFT put into an adapter
    model: str | None = None  # Hub id or folder, to note adapters that name another base

    def notes_on(self, adapter: AdapterFile) -> tuple[str, ...]:
        """A warning where the adapter names a base whose last part differs from this one's."""
        made_for = adapter.base_model_name
        if not made_for or not self.model or _last_part(made_for) == _last_part(self.model):
            return ()
        return (f"made for {quoted(made_for)}, served on {quoted(self.model)}: shapes fit",)


class Registry:
    """Names to versions for one base. Every method may be called from any thread.

    Args:
        base: what adapters are checked against.
        relative_to: what relative source folders are relative to.
        roots: where `load` may read.
        cache: where `dummy:` adapters are written.
        store: where remote adapters are kept; None: there are none.
    """

    def __init__(
        self,
        base: ServedBase,
        *,
        relative_to: Path = Path(),
        roots: Sequence[Path] = (),
        cache: Path | None = None,
        store: DiskStore | None = None,
    ) -> None:
        self._base = base
        self._relative_to = relative_to
        self._roots = tuple(roots)
        self._cache = cache
        self._store = store
        self._entries: dict[str, AdapterEntry] = {}  # by lower-case name, in order of arrival
        self._lock = threading.Lock()
        self._reading: dict[str, tuple[threading.Lock, int]] = {}
        self._generation = 0

    # ---- what requests ask

    def resolve(self, name: str) -> AdapterEntry:
        """The current version of `name`.

        Raises RequestError (404) for an unknown name, AdapterUnavailable for a failed one.
        """
        entry = self.get(name)
        if entry is None:
            raise RequestError(
                f"The model {quoted(name)} does not exist.",
                status=404,
                code="model_not_found",
                param="model",
            )
        if entry.state == "failed":
            raise AdapterUnavailable(
                f"adapter {name} cannot be had: {entry.detail}", retry_at_s=entry.retry_at
            )
        return entry

    def get(self, name: str) -> AdapterEntry | None:
        """The entry of exactly this name, failed or not."""
        entry = self._entries.get(name.lower())
        return entry if entry is not None and entry.name == name else None

    def entries(self) -> tuple[AdapterEntry, ...]:
        """All entries, failed ones included, in order of registration."""
        with self._lock:
            return tuple(self._entries.values())

    def with_digest(self, name: str) -> AdapterEntry:
        """`resolve`, with the digest computed if it was not yet known: reads the files.

        A folder that changed before its first use is checked again and becomes a new generation.
        """
        entry = self.resolve(name)
        if entry.digest is not None:
            return entry
        with self._one_reader(name):
            entry = self.resolve(name)
            if entry.digest is None:
                adapter = self._read(Path(entry.path))
                digest = content_digest(adapter)
                request = AdapterRequest(name, entry.source, entry.pin, entry.priority)
                entry = self._put(request, adapter, digest, same_as=entry)
        return entry

    # ---- what operators do

    def register(
        self,
        request: AdapterRequest,
        *,
        replacing: bool = False,
        expected_generation: int | None = None,
    ) -> Registered:
        """Make `request.name` stand for what its source holds now. Reads config and headers.

        The same content under the same name is `unchanged`; other content needs `replacing`, or a
        failed entry in its place. Raises AdapterError, AdapterUnavailable.
        """
        self._check_name(request.name)
        with self._one_reader(request.name):
            self._check_free(request.name)
            path = resolve_source(
                request.source,
                relative_to=self._relative_to,
                geometry=self._base.geometry,
                cache=self._cache,
                store=self._store,
                digest=request.digest,
            )
            return self._enter(request, path, replacing, expected_generation)

    def load(
        self,
        name: str,
        path: str,
        *,
        replacing: bool = False,
        expected_generation: int | None = None,
        pin: Pin | None = None,
    ) -> Registered:
        """`register` for a client: `path` must be a real folder below one of the roots."""
        self._check_name(name)
        folder = allowed_folder(path, self._roots)
        request = AdapterRequest(name, str(folder), pin=pin)
        with self._one_reader(name):
            self._check_free(name)
            return self._enter(request, folder, replacing, expected_generation)

    def register_all(
        self, requests: Iterable[AdapterRequest], *, num_threads: int = 2
    ) -> tuple[tuple[str, MloraError], ...]:
        """Register many; the bad ones are entered as failed and given back with their errors."""

        def attempt(request: AdapterRequest) -> tuple[str, MloraError] | None:
            try:
                self.register(request)
            except MloraError as error:
                self._enter_failed(request, error)
                return (request.name, error)
            return None

        with ThreadPoolExecutor(num_threads, thread_name_prefix="register") as pool:
            return tuple(failure for failure in pool.map(attempt, requests) if failure)

    def unregister(self, name: str, expected_generation: int | None = None) -> AdapterEntry:
        """Forget `name`; gives what it stood for. Raises RequestError (404)."""
        with self._lock:
            entry = self.get(name)
            if entry is None:
                raise RequestError(
                    f"The adapter {quoted(name)} does not exist.",
                    status=404,
                    code="model_not_found",
                    param="lora_name",
                )
            _check_generation(entry, expected_generation)
            del self._entries[name.lower()]
        return entry

    def mark_failed(
        self, entry: AdapterEntry, detail: str, retry_at: float | None = None
    ) -> AdapterEntry | None:
        """Show that this version could not be loaded; None: the name stands for another now."""
        now = time.time()
        return self._update(
            entry,
            lambda e: replace(e, state="failed", detail=detail, failed_at=now, retry_at=retry_at),
        )

    def take_back(self, done: Registered) -> None:
        """Undo a registration whose content proved broken: the name stands for what it stood for
        before, or for nothing. Where another version has come since, that one stays."""
        name = done.entry.name.lower()
        with self._lock:
            current = self._entries.get(name)
            if current is None or current.generation != done.entry.generation:
                return
            if done.previous is not None:
                self._entries[name] = done.previous
            elif done.outcome == "added":
                del self._entries[name]

    def set_pin(self, name: str, pin: Pin | None) -> AdapterEntry | None:
        """Remember where `name` is kept, for the next start of the engine; None: no such name."""
        entry = self.get(name)
        return None if entry is None else self._update(entry, lambda e: replace(e, pin=pin))

    def mark_ready(self, entry: AdapterEntry) -> AdapterEntry | None:
        """Show that this version can be had again; None: the name stands for another now."""
        return self._update(
            entry,
            lambda e: replace(e, state="ready", detail="", failed_at=0.0, retry_at=None),
        )

    # ---- inside

    def _enter(
        self,
        request: AdapterRequest,
        path: Path,
        replacing: bool,
        expected_generation: int | None,
    ) -> Registered:
        adapter = self._read(path)
        digest = self._expected_digest(request, adapter)
        previous = self.get(request.name)
        _check_generation(previous, expected_generation)
        if previous is not None and previous.state == "ready":
            digest = digest or content_digest(adapter)
            moved = replacing and previous.path != str(adapter.folder)
            if digest == self._digest_of(previous) and not moved:
                return Registered(self.get(request.name) or previous, "unchanged")
            if not replacing:
                raise AdapterError(
                    f"adapter {request.name}: already registered from {previous.path} with other"
                    " content",
                    reason="adapter_exists",
                    field="lora_name",
                    hint="unload it first, or load it in place",
                )
        entry = self._put(request, adapter, digest)
        return Registered(entry, "replaced" if previous else "added", previous)

    def _put(
        self,
        request: AdapterRequest,
        adapter: AdapterFile,
        digest: str | None,
        same_as: AdapterEntry | None = None,
    ) -> AdapterEntry:
        """Enter what was read; the generation stays where `same_as` is the same file version."""
        files = tuple(file.key for file in adapter.files)
        with self._lock:
            if same_as is not None and same_as.files == files:
                generation = same_as.generation
            else:
                self._generation += 1
                generation = self._generation
            entry = AdapterEntry(
                name=request.name,
                source=request.source,
                path=str(adapter.folder),
                generation=generation,
                registered_at=time.time(),
                files=files,
                digest=digest,
                rank=adapter.max_rank,
                modules=adapter.modules,
                num_bound=len(adapter.weights),
                num_bytes=adapter.num_weights * self._base.itemsize,
                base_model_name=adapter.base_model_name,
                notes=(*self._notes_on(adapter), *adapter.notes),
                pin=request.pin,
                priority=request.priority,
            )
            self._entries[request.name.lower()] = entry
        return entry

    def _notes_on(self, adapter: AdapterFile) -> tuple[str, ...]:
        stored = self._store.notes_on(adapter.folder) if self._store is not None else ()
        return (*stored, *self._base.notes_on(adapter))

    def _enter_failed(self, request: AdapterRequest, error: MloraError) -> None:
        now = time.time()
        with self._lock:
            if request.name.lower() in self._entries or not is_adapter_name(request.name):
                return
            self._generation += 1
            self._entries[request.name.lower()] = AdapterEntry(
                name=request.name,
                source=request.source,
                path="",
                generation=self._generation,
                registered_at=now,
                pin=request.pin,
                priority=request.priority,
                state="failed",
                detail=error.message,
                failed_at=now,
            )

    def _read(self, path: Path) -> AdapterFile:
        base = self._base
        return read_adapter(path, base.geometry, max_rank=base.max_rank, base_folder=base.folder)

    def _expected_digest(self, request: AdapterRequest, adapter: AdapterFile) -> str | None:
        if request.digest is None:
            return None
        found, expected = content_digest(adapter), request.digest.removeprefix("sha256:")
        if found != expected:
            raise AdapterError(
                f"adapter {request.name}: digest: found {found}, expected {expected}",
                reason="digest",
                field="digest",
            )
        return found

    def _digest_of(self, entry: AdapterEntry) -> str | None:
        """The digest of a registered version; None where its files are gone or changed."""
        if entry.digest is None:
            try:
                adapter = self._read(Path(entry.path))
                if tuple(file.key for file in adapter.files) != entry.files:
                    return None
                digest = content_digest(adapter)
            except AdapterError:
                return None
            self._update(entry, lambda e: replace(e, digest=digest))
            return digest
        return entry.digest

    def _update(
        self, entry: AdapterEntry, change: Callable[[AdapterEntry], AdapterEntry]
    ) -> AdapterEntry | None:
        """Replace the entry if its name still stands for the same generation."""
        with self._lock:
            current = self._entries.get(entry.name.lower())
            if current is None or current.generation != entry.generation:
                return None
            updated = change(current)
            self._entries[entry.name.lower()] = updated
            return updated

    def _check_name(self, name: str) -> None:
        if not is_adapter_name(name):
            raise AdapterError(
                f"adapter name {quoted(name)}: expected letters, digits, '.', '_' and '-', starting"
                " with a letter or digit, in at most two parts joined by /",
                reason="name",
                field="lora_name",
            )
        if name.lower() == self._base.name.lower():
            raise AdapterError(
                f"adapter name {name}: the base is called {self._base.name}",
                reason="name_taken",
                field="lora_name",
            )

    def _check_free(self, name: str) -> None:
        twin = self._entries.get(name.lower())
        if twin is not None and twin.name != name:
            raise AdapterError(
                f"adapter name {name}: differs only by case from {twin.name}",
                reason="name_taken",
                field="lora_name",
            )

    @contextmanager
    def _one_reader(self, name: str) -> Iterator[None]:
        """One thread a name reads and enters; others of that name wait, other names do not."""
        key = name.lower()
        with self._lock:
            lock, waiting = self._reading.get(key, (threading.Lock(), 0))
            self._reading[key] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._reading[key]
                if waiting == 1:
                    del self._reading[key]
                else:
                    self._reading[key] = (lock, waiting - 1)


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()


def _check_generation(entry: AdapterEntry | None, expected: int | None) -> None:
    found = entry.generation if entry is not None else 0
    if expected is not None and found != expected:
        raise AdapterError(
            f"expected_generation: found {found}, expected {expected}: somebody else replaced it",
            reason="generation",
            field="expected_generation",
        )

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
from dataclasses import replace
from pathlib import Path

from multilora_cli.adapters.digest import files_digest
from multilora_cli.adapters.entries import Entries
from multilora_cli.adapters.entry import (
    AdapterEntry,
    AdapterRequest,
    Candidate,
    Pin,
    Registered,
    ServedBase,
    already_there,
    check_generation,
    covers_text,
)
from multilora_cli.adapters.keyed_locks import KeyedLocks
from multilora_cli.adapters.source import is_remote, resolve_source
from multilora_cli.adapters.source.local import allowed_folder
from multilora_cli.adapters.store import DiskStore, StoreOpener
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.survey import Survey
from multilora_cli.errors import AdapterError, AdapterUnavailable, MloraError, RequestError
from multilora_cli.fleet.schema import is_adapter_name

RETRY_S = (5.0, 300.0)  # first and longest pause before a source that was down is asked again


class Registry:
    """Names to versions for one base. Every method may be called from any thread.

    Args:
        base: what adapters are checked against.
        relative_to: what relative source folders are relative to.
        roots: where `load` may read.
        cache: where `dummy:` adapters are written.
        store: where remote adapters are kept, or what opens it when the first one comes.
        surveys: where `remember` keeps what headers said, for the next start.
    """

    def __init__(
        self,
        base: ServedBase,
        *,
        relative_to: Path = Path(),
        roots: Sequence[Path] = (),
        cache: Path | None = None,
        store: "DiskStore | StoreOpener | None" = None,
        surveys: Path | None = None,
    ) -> None:
        self.base = base
        self._surveyor = base.surveyor(surveys)
        self._relative_to = relative_to
        self._roots = tuple(roots)
        self._cache = cache
        self._store = store if isinstance(store, StoreOpener) else StoreOpener.of(store)
        self._releasable: set[str] = set()  # digests that lost a name
        self._copies: dict[str, set[str]] = {}  # digest -> entries with more files in the store
        self._promised: dict[int, str | None] = {}  # digests of candidates, by generation
        self._entries = Entries()
        self._lock = threading.Lock()
        self._reading = KeyedLocks()
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
            raise AdapterUnavailable(f"adapter {name}: {entry.detail}", retry_at_s=entry.retry_at)
        return entry

    def get(self, name: str) -> AdapterEntry | None:
        """The entry of exactly this name, failed or not."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.name == name else None

    def entries(self) -> tuple[AdapterEntry, ...]:
        """All entries, failed ones included, in order of registration."""
        with self._lock:
            return self._entries.all()

    @property
    def num_resolved(self) -> int:
        """Names that patterns brought in."""
        return self._entries.num_resolved

    def holds(self, digest: str) -> bool:
        """Whether any name stands for this content."""
        with self._lock:
            return self._entries.holds(digest)

    def of_digest(self, digest: str) -> list[AdapterEntry]:
        """The entries that stand for this content, the latest last."""
        with self._lock:
            return self._entries.of_digest(digest)

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
                adapter = self._surveyor.survey(Path(entry.path))
                digest = files_digest(adapter.files)
                version = self._version(entry.request, adapter, digest, same_as=entry)
                if self._update(entry, lambda _: version) is None:
                    return self.resolve(name)  # unloaded meanwhile
                entry = version
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
        self.base.check_name(request.name)
        with self._one_reader(request.name):
            candidate = self._candidate(request, replacing, expected_generation)
            with self._lock:
                return self._put(candidate)

    def candidate(
        self,
        request: AdapterRequest,
        *,
        replacing: bool = False,
        expected_generation: int | None = None,
        digested: bool = False,
    ) -> Candidate:
        """What `register` would enter, read but not entered; `digested`: with its digest."""
        self.base.check_name(request.name)
        with self._one_reader(request.name):
            return self._candidate(request, replacing, expected_generation, digested)

    def enter(
        self, candidates: Sequence[Candidate], gone: Sequence[AdapterEntry] = ()
    ) -> tuple[Registered, ...]:
        """Let candidates take their names, and forget `gone`: all in one step, or nothing.

        Raises AdapterError where a name stands for another version than it did when its candidate
        was read.
        """
        with self._lock:
            for name, before in (
                *((c.entry.name, c.previous) for c in candidates),
                *((entry.name, entry) for entry in gone),
            ):
                self._check_still(name, before)
            for entry in gone:
                self._entries.remove(entry.name)
            return tuple(map(self._put, candidates))

    def discard(self, candidate: Candidate) -> None:
        """A candidate that will not be entered."""
        with self._lock:
            digest = self._promised.pop(candidate.entry.generation, None)
        if digest is not None:
            self.release(digest)

    def from_client(self, name: str, path: str, pin: Pin | None = None) -> AdapterRequest:
        """The request for a folder that a client names. Raises AdapterError outside the roots."""
        self.base.check_name(name)
        return AdapterRequest(name, str(self._allowed(path)), pin=pin, via="api")

    def check_root(self, path: str) -> None:
        """Raise AdapterError where a folder lies below none of the roots."""
        self._allowed(path)

    def register_all(
        self, requests: Iterable[AdapterRequest], *, num_threads: int = 2
    ) -> tuple[tuple[str, MloraError], ...]:
        """Register many; the bad ones are entered as failed and given back with their errors.

        They are listed in the order of `requests`, whichever was read first.
        """
        requests = list(requests)

        def attempt(request: AdapterRequest) -> tuple[str, MloraError] | None:
            try:
                self.register(request)
            except MloraError as error:
                self.enter_failed(request, error)
                return (request.name, error)
            return None

        with ThreadPoolExecutor(num_threads, thread_name_prefix="register") as pool:
            failures = tuple(failure for failure in pool.map(attempt, requests) if failure)
        with self._lock:
            self._entries.arrange(request.name for request in requests)
        return failures

    def remember(self) -> None:
        """Keep what headers said, so that the next start need not read them again."""
        self._surveyor.save()

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
            check_generation(entry, expected_generation)
            self._entries.remove(name)
        return entry

    def retry(self, name: str) -> AdapterEntry:
        """Ask the source of a failed adapter again. Raises what is still wrong, and notes it."""
        failed = self.get(name)
        if failed is None or failed.state != "failed":
            return self.resolve(name)
        try:
            return self.register(failed.request, expected_generation=failed.generation).entry
        except MloraError as error:
            self.enter_failed(failed.request, error)
            raise

    def enter_failed(self, request: AdapterRequest, error: MloraError) -> None:
        """Show that what `request` names cannot be had; a version that is served stays.

        A source that does not answer is asked again later; a refusal stands until somebody asks.
        """
        if not is_adapter_name(request.name):
            return
        now, down = time.time(), isinstance(error, AdapterUnavailable)
        with self._lock:
            old = self._entries.get(request.name)
            if old is not None and (old.state == "ready" or old.name != request.name):
                return
            attempts = old.attempts + 1 if old is not None else 1
            pause = min(RETRY_S[0] * 2.0 ** min(attempts - 1, 16), RETRY_S[1])
            if old is None:
                self._generation += 1
            self._entries.put(
                AdapterEntry(
                    request=request,
                    path="",
                    generation=old.generation if old is not None else self._generation,
                    registered_at=old.registered_at if old is not None else now,
                    state="failed",
                    detail=error.message,
                    failed_at=now,
                    attempts=attempts,
                    retry_at=time.monotonic() + pause if down else None,
                )
            )

    def set_kept(self, name: str, pin: Pin | None, ttl: float | None) -> AdapterEntry | None:
        """Remember where and how long `name` is kept; None: no such name."""
        entry = self.get(name)
        if entry is None:
            return None
        return self._update(
            entry, lambda e: replace(e, request=replace(e.request, pin=pin, ttl=ttl))
        )

    def release(self, digest: str) -> None:
        """Let the disk store evict a version, unless a name stands for it."""
        with self._lock:
            self._releasable.add(digest)
        self._release_unused()

    # ---- inside

    def _candidate(
        self,
        request: AdapterRequest,
        replacing: bool,
        expected_generation: int | None,
        digested: bool = False,
    ) -> Candidate:
        """The caller is the one reader of the name."""
        self._check_free(request.name)
        path = self._folder(request)
        try:
            adapter = self._surveyor.survey(path)
            digest = self._digest_at(request, path, adapter)
            if digested and digest is None:
                digest = files_digest(adapter.files)
            previous = self.get(request.name)
            check_generation(previous, expected_generation)
            if previous is not None and previous.state == "ready":
                digest = digest or files_digest(adapter.files)
                moved = replacing and previous.path != str(adapter.folder)
                kept = self.base.text_of(request, adapter.folder) == previous.text and not moved
                if kept and digest == self._digest_of(previous):
                    same = self.get(request.name) or previous
                    return Candidate(replace(same, request=request), previous, "unchanged")
                if not replacing:
                    raise already_there(previous)
            entry = self._version(request, adapter, digest)
        except AdapterError:
            self._unused(path)
            raise
        with self._lock:
            self._promised[entry.generation] = digest
        return Candidate(entry, previous, "replaced" if previous else "added")

    def _allowed(self, path: str) -> Path:
        return allowed_folder(path, self._roots, self._relative_to)

    def _folder(self, request: AdapterRequest) -> Path:
        """The folder that the request's source stands for. Raises AdapterError, *Unavailable."""
        if request.via == "api":
            return self._allowed(request.source)
        return resolve_source(
            request.source,
            relative_to=self._relative_to,
            geometry=self.base.geometry,
            cache=self._cache,
            store=self._store() if is_remote(request.source) else None,
            digest=request.digest,
            text_files=request.text_files,
        )

    def _version(
        self,
        request: AdapterRequest,
        adapter: Survey,
        digest: str | None,
        same_as: AdapterEntry | None = None,
    ) -> AdapterEntry:
        """What was read; the generation stays where `same_as` is the same file version."""
        shape, files = adapter.shape, adapter.keys
        text = self.base.text_of(request, adapter.folder)
        if same_as is not None and (same_as.files, same_as.text) == (files, text):
            generation = same_as.generation
        else:
            with self._lock:
                self._generation += 1
                generation = self._generation
        return AdapterEntry(
            request=request,
            path=str(adapter.folder),
            generation=generation,
            registered_at=time.time(),
            files=files,
            digest=digest,
            text=text,
            rank=shape.max_rank,
            modules=shape.modules,
            num_bound=shape.num_bound,
            num_bytes=shape.num_bytes(self.base.itemsize),
            base_model_name=shape.base_model_name,
            notes=(*self._notes_on(adapter), *shape.notes),
            revision=self._store.revision_of(adapter.folder),
        )

    def _notes_on(self, adapter: Survey) -> tuple[str, ...]:
        store = self._store.opened
        stored = store.notes_on(adapter.folder) if store is not None else ()
        return (*stored, *self.base.notes_on(adapter.shape.base_model_name))

    def _put(self, candidate: Candidate) -> Registered:
        """The caller holds the lock."""
        entry, outcome = candidate.entry, candidate.outcome
        self._entries.put(entry)
        self._promised.pop(entry.generation, None)
        return Registered(entry, outcome, None if outcome == "unchanged" else candidate.previous)

    def _digest_at(self, request: AdapterRequest, path: Path, adapter: Survey) -> str | None:
        """The digest where it is known or expected; None: not yet. Raises AdapterError."""
        if is_remote(request.source):  # the store has read every byte: nothing is hashed again
            digest = files_digest(adapter.files)
            if request.text_files:  # the store's name is over those too
                with self._lock:
                    self._copies.setdefault(digest, set()).add(path.name)
            elif digest != path.name:
                raise covers_text(request.name, path.name)
            return digest
        if request.digest is None:
            return None
        found, expected = files_digest(adapter.files), request.digest.removeprefix("sha256:")
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
                adapter = self._surveyor.survey(Path(entry.path))
                if adapter.keys != entry.files:
                    return None
                digest = files_digest(adapter.files)
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
            current = self._entries.get(entry.name)
            if current is None or current.generation != entry.generation:
                return None
            updated = change(current)
            self._entries.put(updated)
            return updated

    def _check_still(self, name: str, before: AdapterEntry | None) -> None:
        """The name stands for what it did. The caller holds the lock."""
        found = self._entries.get(name)
        if (found.generation if found else 0) != (before.generation if before else 0):
            raise AdapterError(
                f"adapter {name}: somebody else changed it meanwhile",
                reason="generation",
                field="lora_name",
                hint="try again",
            )

    def _unused(self, path: Path) -> None:
        """A refused version: its copy in the disk store may go."""
        store = self._store.opened
        used = any(entry.path == str(path) for entry in self.entries())
        if store is not None and path.parent == store.root / "entries" and not used:
            self.release(path.name)

    def _release_unused(self) -> None:
        """Release what nobody reads: a reader may be about to enter any of it."""
        store = self._store.opened
        with self._lock:
            if store is None or not self._reading.idle:
                return
            promised = set(self._promised.values())
            for digest in self._releasable - promised:
                if not self._entries.holds(digest):
                    for copy in (digest, *self._copies.pop(digest, ())):
                        store.release(copy)
            self._releasable &= promised

    def _check_free(self, name: str) -> None:
        twin = self._entries.get(name)
        if twin is not None and twin.name != name:
            raise AdapterError(
                f"adapter name {name}: differs only by case from {twin.name}",
                reason="name_taken",
                field="lora_name",
            )

    @contextmanager
    def _one_reader(self, name: str) -> Iterator[None]:
        """One thread a name reads and enters."""
        try:
            with self._reading.holding(name.lower()):
                yield
        finally:
            if self._releasable:
                self._release_unused()

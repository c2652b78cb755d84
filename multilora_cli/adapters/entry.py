"""What a name of the registry is asked to stand for, and the version it stands for."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from multilora_cli.adapters.base_match import match_base
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.survey import Surveyor
from multilora_cli.adapters.text_files import text_files
from multilora_cli.errors import AdapterError
from multilora_cli.fleet.schema import is_adapter_name, is_template_file
from multilora_cli.sizing.geometry import ModelGeometry

Pin = Literal["hot", "warm"]
Outcome = Literal["added", "replaced", "unchanged"]
# fleet: the file names it; api: an operator loaded it from a folder; pattern: a request asked for
# it, and a pattern of the file says where such names are.
Via = Literal["fleet", "api", "pattern"]
Owner = Literal["base", "adapter"]


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter as a fleet file or an operator names it."""

    name: str
    source: str  # folder, demo:NAME, dummy:..., hf://... or s3://...
    pin: Pin | None = None
    priority: int = 0
    digest: str | None = None  # sha256 hex or sha256:hex; anything else is refused
    ttl: float | None = None  # seconds; back to cold, unpinned, when unused that long
    via: Via = "fleet"
    tokenizer: Owner | None = None  # whose files make tokens and text; None: the base's
    chat_template: str | None = None  # base, adapter or a file; None: whose the tokenizer is

    @property
    def uses_own_tokenizer(self) -> bool:
        """Whether its text becomes tokens, and tokens text, by the adapter's own files."""
        return self.tokenizer == "adapter"

    @property
    def uses_own_template(self) -> bool:
        """Whether its conversations are rendered by the adapter's own template."""
        return (self.chat_template or self.tokenizer) == "adapter"

    @property
    def template_file(self) -> str | None:
        """The operator's file with its template, absolute."""
        return self.chat_template if is_template_file(self.chat_template) else None

    @property
    def has_own_text(self) -> bool:
        """Whether its text is made by other files than the base's alone."""
        return bool(self.text_files) or self.template_file is not None

    @property
    def text_files(self) -> tuple[str, ...]:
        """Files of its own folder that make its text; none where it uses the base's."""
        return text_files(tokenizer=self.uses_own_tokenizer, template=self.uses_own_template)

    def fingerprint(self) -> str:
        """The same for two requests that ask for the same, under whatever name (sha256:hex)."""
        fields: list[object] = [self.source, self.pin, self.priority, self.digest, self.ttl]
        if self.text_files:
            fields += [self.uses_own_tokenizer, self.uses_own_template]
        if self.template_file is not None:
            fields.append(self.template_file)
        return f"sha256:{hashlib.sha256(json.dumps(fields).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One name and the version it stands for. Times are seconds since the epoch."""

    request: AdapterRequest
    path: str  # folder that was read; empty where it could not be resolved
    generation: int
    registered_at: float
    files: tuple[tuple[int, int, int, int, int], ...] = ()  # FileIdentity.key of each file
    digest: str | None = None  # sha256 hex; None until it is first needed
    text: str | None = None  # sha256 hex of its own tokenizer and template; None: the base's
    rank: int = 0  # the largest of any module
    modules: tuple[str, ...] = ()
    num_bound: int = 0  # adapted (layer, module) pairs
    num_bytes: int = 0  # of all factors in the compute dtype, nothing padded
    base_model_name: str | None = None
    notes: tuple[str, ...] = ()
    revision: str | None = None  # a remote one's: commit, or a digest over its object versions
    state: Literal["ready", "failed"] = "ready"
    detail: str = ""  # why it failed
    failed_at: float = 0.0
    attempts: int = 0  # that failed in a row
    retry_at: float | None = None  # monotonic; None: not before somebody asks for it

    @property
    def name(self) -> str:
        """How requests name it."""
        return self.request.name

    @property
    def source(self) -> str:
        """Where it comes from."""
        return self.request.source

    @property
    def pin(self) -> Pin | None:
        """Where it is kept."""
        return self.request.pin

    @property
    def priority(self) -> int:
        """Evicted later when higher."""
        return self.request.priority


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that was read and may take its name; nothing stands for it yet."""

    entry: AdapterEntry
    previous: AdapterEntry | None  # what the name stands for now
    outcome: Outcome


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
    check_text: Callable[[Path, AdapterRequest], str] | None = None  # text.adapter_text.TextChecker

    def surveyor(self, memory: Path | None) -> Surveyor:
        """What reads headers of adapters for this base; `memory` as for Surveyor."""
        return Surveyor(
            self.geometry, max_rank=self.max_rank, base_folder=self.folder, memory=memory
        )

    def check_name(self, name: str) -> None:
        """Raise AdapterError where no adapter may be called so."""
        if not is_adapter_name(name):
            raise AdapterError(
                f"adapter name {quoted(name)}: expected letters, digits, '.', '_' and '-', starting"
                " with a letter or digit, in at most two parts joined by /",
                reason="name",
                field="lora_name",
            )
        if name.lower() == self.name.lower():
            raise AdapterError(
                f"adapter name {name}: the base is called {self.name}",
                reason="name_taken",
                field="lora_name",
            )

    def text_of(self, request: AdapterRequest, folder: Path) -> str | None:
        """The digest of its own text, None where the base's is used. Raises AdapterError."""
        if not request.has_own_text:
            return None
        if self.check_text is None:  # nothing here makes text, as in speed tests of the engine
            raise AdapterError(
                f"adapter {request.name}: tokenizer and chat_template must be the base's here",
                reason="tokenizer",
            )
        return self.check_text(folder, request)

    def has_other_template(self, entry: AdapterEntry) -> bool:
        """Whether the operator's file with its template is not what was read any more."""
        if entry.request.template_file is None or entry.state != "ready":
            return False
        try:
            return self.text_of(entry.request, Path(entry.path)) != entry.text
        except AdapterError:  # gone or broken: reading it anew says so
            return True

    def notes_on(self, made_for: str | None) -> tuple[str, ...]:
        """A warning where the adapter names another base than this one."""
        match = match_base(made_for, None, self.model, None) if self.model else None
        return (match.text,) if match is not None and match.is_warning else ()


def already_there(previous: AdapterEntry) -> AdapterError:
    """The refusal of other content under a name that is served."""
    return AdapterError(
        f"adapter {previous.name}: already registered from {previous.path} with other content",
        reason="adapter_exists",
        field="lora_name",
        hint="unload it first, or load it in place",
    )


def covers_text(name: str, digest: str) -> AdapterError:
    """The refusal of a locked copy with files that the fleet file does not ask for."""
    return AdapterError(
        f"adapter {name}: digest: {digest} covers a tokenizer or template that is not asked for"
        " any more",
        reason="digest",
        hint="write the lock file anew",
    )


def check_generation(entry: AdapterEntry | None, expected: int | None) -> None:
    """Raise AdapterError where a client expects another version than there is."""
    found = entry.generation if entry is not None else 0
    if expected is not None and found != expected:
        raise AdapterError(
            f"expected_generation: found {found}, expected {expected}: somebody else replaced it",
            reason="generation",
            field="expected_generation",
        )

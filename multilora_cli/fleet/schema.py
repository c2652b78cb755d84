"""The fleet file as frozen models; their JSON Schema is what `mlora schema` prints."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from multilora_cli.fleet.pattern import NamePattern
from multilora_cli.units import parse_duration, parse_size

MAX_ADAPTERS = 50_000
REMOTE_SCHEMES = ("hf://", "s3://")  # what is fetched into the disk store
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?")
_SECRET = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:[^\x00-\x1f]+")
_TEMPLATE_ENDINGS = (".jinja", ".j2")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_adapter_name(text: str) -> bool:
    """Whether `text` may name an adapter: one or two segments of letters, digits, `.`, `_`, `-`."""
    return _NAME.fullmatch(text) is not None


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _seconds(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


def _name(value: str) -> str:
    if not is_adapter_name(value):
        raise ValueError(
            "a name of letters, digits, '.', '_' and '-', at most two parts joined by '/'"
        )
    return value


def _secret(value: str) -> str:
    if _SECRET.fullmatch(value) is None:
        raise ValueError("env:NAME or file:PATH; a key is never written into the fleet file")
    return value


def _digest(value: str) -> str:
    if _DIGEST.fullmatch(value) is None:
        raise ValueError("sha256: and 64 hexadecimal digits")
    return value


def is_template_file(value: str | None) -> bool:
    """Whether a `chat_template` names a file; it is the base's or the adapter's own otherwise."""
    return value is not None and value.endswith(_TEMPLATE_ENDINGS)


def _template(value: str) -> str:
    if value not in ("base", "adapter") and not is_template_file(value):
        raise ValueError(f"base, adapter, or a file that ends in {' or '.join(_TEMPLATE_ENDINGS)}")
    return value


_SIZE_SCHEMA = WithJsonSchema(
    {"type": ["integer", "string"], "description": "bytes, or a number with KiB/MiB/GiB/KB/MB/GB"}
)
_DURATION_SCHEMA = WithJsonSchema(
    {"type": ["number", "string"], "description": "seconds, or a number with ms/s/m/h/d"}
)
Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=2**50), _SIZE_SCHEMA]
Duration = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=10**8), _DURATION_SCHEMA]
AdapterName = Annotated[str, AfterValidator(_name)]
Secret = Annotated[str, AfterValidator(_secret)]
Digest = Annotated[str, AfterValidator(_digest)]
_PLAIN, _DEVICE = r"^[^\x00-\x1f\x7f]+$", r"^(auto|cpu|cuda(:\d{1,2})?)$"
_GLOB = r"^[A-Za-z0-9._*?/-]{1,300}$"
PATTERNS = {  # what each asks for, in a person's words
    _PLAIN: "a text without control characters",
    _DEVICE: "auto, cpu, cuda or cuda:N",
    _GLOB: "a name of a model, or a glob such as acme/*",
}
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=_PLAIN)]


TemplateOwner = Annotated[Text, AfterValidator(_template)]
ModelGlob = Annotated[str, Field(pattern=_GLOB)]
Weight = Annotated[float, Field(ge=0.01, le=100, strict=False)]


class Part(BaseModel):
    """A section of a file of ours: frozen, closed, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Base(Part):
    """The base model."""

    model: Text = Field(description="folder, Hub id, or demo:base")
    name: AdapterName | None = Field(default=None, description="how requests name the base")
    revision: Text | None = Field(default=None, description="commit or tag, for the Hub")
    quantization: Literal["auto", "none", "fp8", "awq"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(
        None, ge=16, le=2**22, description="tokens a request may have"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights in the shape of config.json, for speed tests"
    )

    @property
    def served_name(self) -> str:
        """How requests name the base: `name`, or the last part of `model`."""
        return self.name or re.split(r"[/:]", self.model.rstrip("/"))[-1]


class Memory(Part):
    """Where bytes may go."""

    device: Annotated[str, Field(pattern=_DEVICE)] = "auto"
    device_fraction: float = Field(
        default=0.92, gt=0, le=1, description="share of device memory to use"
    )
    device_bytes: Size | None = Field(default=None, description="instead of device_fraction")
    host_adapters: Size = Field(
        default=8 * 2**30, description="warm tier: adapter images in host memory"
    )
    disk_cache: Size = Field(default=50 * 2**30, description="verified copies of remote adapters")
    kv_reserve: float = Field(
        default=0.25, ge=0, lt=1, description="share of the pool adapters never take"
    )
    prefetch: Size = Field(
        default=256 * 2**20,
        description="bytes a second of popular adapters brought up before anybody asks; 0: none",
    )


class Limits(Part):
    """What one step and one request may ask for."""

    max_num_seqs: int = Field(default=256, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=8192, ge=16, le=2**20)
    max_lora_rank: int = Field(default=512, ge=1, le=512)
    max_loras: int | None = Field(
        default=None, ge=1, le=4096, description="distinct adapters in one step"
    )
    max_adapter_bytes: Size | None = Field(
        default=None, description="of the distinct adapters in one step; null: any"
    )
    fairness: Literal["tenant", "adapter", "none"] = Field(
        default="tenant", description="who takes turns when more is asked than can run"
    )
    weights: dict[Text, Weight] = Field(
        default={},
        max_length=MAX_ADAPTERS,
        description="turns of a tenant, key (as in server.api_keys) or adapter; 1 if not named",
    )
    max_resolved: int = Field(
        default=10_000, ge=1, le=MAX_ADAPTERS, description="names of patterns known at a time"
    )


class Adapter(Part):
    """One adapter."""

    name: AdapterName
    source: Text = Field(description="folder, demo:NAME, dummy:..., hf://org/name@rev or s3://...")
    pin: Literal["hot", "warm"] | None = None
    ttl: Duration | None = Field(default=None, description="back to cold when unused that long")
    priority: int = Field(default=0, ge=-1000, le=1000, description="evicted later when higher")
    chat_template: TemplateOwner | None = Field(
        default=None,
        description="base, adapter, or a .jinja file; default: whose the tokenizer is",
    )
    tokenizer: Literal["base", "adapter"] | None = Field(
        default=None,
        description="adapter: tokenizer.json and tokenizer_config.json of its own folder;"
        " default: base",
    )
    digest: Digest | None = Field(default=None, description="refuse anything else")

    @property
    def uses_own_text(self) -> bool:
        """Whether tokenizer or chat template are the adapter's own."""
        return "adapter" in (self.tokenizer, self.chat_template)

    @property
    def has_text_files(self) -> bool:
        """Whether files beside the base's make its text: its own, or a template of the operator."""
        return self.uses_own_text or is_template_file(self.chat_template)


class AdapterFolder(Part):
    """Every folder matching a glob that holds an adapter_config.json, named after the folder."""

    folder: Text


class AdapterPattern(Part):
    """Names that are looked for at their source when they are first asked for."""

    pattern: Text = Field(description="such as {tenant}/{name}, one placeholder a part")
    source: Text = Field(description="with the same placeholders: a folder, hf:// or s3://")
    ttl: Duration | None = Field(default=None, description="back to cold when unused that long")
    priority: int = Field(default=0, ge=-1000, le=1000, description="evicted later when higher")

    @model_validator(mode="after")
    def _fits(self) -> "AdapterPattern":
        _ = self.compiled
        return self

    @property
    def compiled(self) -> NamePattern:
        """The pattern, ready to match."""
        return NamePattern(self.pattern, self.source, self.priority, self.ttl)


def _kind(entry: Any) -> str:
    keys = entry if isinstance(entry, dict) else getattr(entry, "model_fields_set", ())
    return next((key for key in ("folder", "pattern") if key in keys), "name")


AdapterEntry = Annotated[
    Annotated[Adapter, Tag("name")]
    | Annotated[AdapterFolder, Tag("folder")]
    | Annotated[AdapterPattern, Tag("pattern")],
    Discriminator(_kind),
]


class KeyLimits(Part):
    """How much the holders of a key may ask for; null: any."""

    max_requests: int | None = Field(default=None, ge=1, le=10**6, description="in flight at once")
    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(
        default=None, ge=1, le=10**12, description="of prompts and answers together"
    )


class ApiKey(KeyLimits):
    """A key, and what its holder may do."""

    key: Secret
    tenant: AdapterName | None = Field(
        default=None,
        description="whose key it is: its keys share turns, cached prefixes and limits",
    )
    models: tuple[ModelGlob, ...] = Field(
        default=("*",),
        min_length=1,
        max_length=1000,
        strict=False,
        description="names and globs of what it may ask for; the base by its name",
    )

    @property
    def limits(self) -> KeyLimits:
        """Its limits alone."""
        return KeyLimits(**{name: getattr(self, name) for name in KeyLimits.model_fields})


def _key_kind(entry: Any) -> str:
    return "key" if isinstance(entry, dict | ApiKey) else "secret"


KeyEntry = Annotated[
    Annotated[Secret, Tag("secret")] | Annotated[ApiKey, Tag("key")], Discriminator(_key_kind)
]


class Server(Part):
    """The HTTP front."""

    host: Text = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[KeyEntry, ...] = Field(default=(), max_length=10_000, strict=False)
    admin_key: Secret | None = None
    adapter_roots: tuple[Text, ...] = Field(default=(), max_length=100, strict=False)
    state_file: Text | None = Field(
        default=None,
        description="where changes at run time are kept; default: beside the fleet file; or off",
    )

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys, those that are no more than a secret included."""
        return tuple(
            entry if isinstance(entry, ApiKey) else ApiKey(key=entry) for entry in self.api_keys
        )

    @property
    def secrets(self) -> tuple[str, ...]:
        """Where all keys are to be had, the admin's included, each once."""
        admin = (self.admin_key,) if self.admin_key is not None else ()
        return tuple(sorted({*(key.key for key in self.keys), *admin}))

    @model_validator(mode="after")
    def _tenants_agree(self) -> "Server":
        limits: dict[str, KeyLimits] = {}
        for index, key in enumerate(self.keys):
            if key.tenant is not None and limits.setdefault(key.tenant, key.limits) != key.limits:
                raise ValueError(
                    f"api_keys.{index}: another key of {key.tenant!r} has other limits; they are"
                    " the tenant's"
                )
        return self


class Verify(Part):
    """Thresholds of `mlora verify`."""

    max_drift: float = Field(
        default=0.05,
        ge=0,
        le=100,
        description="mean KL divergence from the 16-bit base, in nats, above which --drift refuses",
    )


class Fleet(Part):
    """One base model, its adapters, and the limits they share."""

    base: Base
    memory: Memory = Memory()
    limits: Limits = Limits()
    adapters: tuple[AdapterEntry, ...] = Field(default=(), max_length=MAX_ADAPTERS, strict=False)
    server: Server = Server()
    verify: Verify = Verify()

    @model_validator(mode="after")
    def _names_differ(self) -> "Fleet":
        seen: dict[str, str] = {}
        served = self.base.served_name
        for index, entry in self.named_adapters():
            twin = seen.get(entry.name.lower())
            seen[entry.name.lower()] = entry.name
            if twin is not None:
                problem = (
                    "is taken" if twin == entry.name else f"differs from {twin!r} only by case"
                )
                raise ValueError(f"adapters.{index}.name: {entry.name!r} {problem}")
            if entry.name == served:
                raise ValueError(f"adapters.{index}.name: {entry.name!r} is the base's name")
        return self

    @model_validator(mode="after")
    def _digests_cover_all(self) -> "Fleet":
        for index, entry in self.named_adapters():
            is_folder = not entry.source.startswith(REMOTE_SCHEMES)
            if entry.digest is not None and entry.uses_own_text and is_folder:
                raise ValueError(
                    f"adapters.{index}.digest: of a folder it covers no tokenizer or chat template;"
                    " leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_used(self) -> "Fleet":
        weights, fairness = self.limits.weights, self.limits.fairness
        if fairness == "tenant":
            keys = self.server.keys
            strangers = set(weights) - {key.key for key in keys} - {key.tenant for key in keys}
        else:
            strangers = {name for name in weights if not is_adapter_name(name)}
        if fairness == "none":
            strangers = set(weights)
        if strangers:
            expected = {
                "tenant": "keys or tenants of server.api_keys",
                "adapter": "names of adapters",
                "none": "no weights without fairness",
            }
            raise ValueError(
                f"limits.weights: found {min(strangers)!r}, expected {expected[fairness]}"
            )
        return self

    @property
    def num_unlisted(self) -> int:
        """How many adapters its name patterns may add to those that are listed."""
        by_pattern = any(isinstance(entry, AdapterPattern) for entry in self.adapters)
        return self.limits.max_resolved if by_pattern else 0

    def named_adapters(self) -> Iterator[tuple[int, Adapter]]:
        """The entries that name one adapter, with their index in the file."""
        return ((i, entry) for i, entry in enumerate(self.adapters) if isinstance(entry, Adapter))

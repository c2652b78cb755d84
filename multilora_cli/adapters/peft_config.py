"""Reads adapter_config.json with a closed list of fields.

PEFT's own reader is not used: it can import modules that a config names, and it skips fields it
does not know. Here every field is one of three kinds: understood (it decides what is computed),
harmless (it says how the adapter was trained or shown), or refused by name because it changes the
mathematics in a way that is not computed here. Several of the last kind leave plain LoRA's tensor
names on disk, so only the config tells them apart. A field nobody has heard of is accepted while it
is empty and refused as soon as it carries a value.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from multilora_cli.adapters.module_pattern import PatternError, fully_matches, matches_key
from multilora_cli.adapters.strict_json import JsonError, parse_json, quoted
from multilora_cli.adapters.tensor_names import EDGES, EdgeModule
from multilora_cli.errors import AdapterError

_T = TypeVar("_T")

CONFIG_NAME = "adapter_config.json"
CONFIG_BYTES_MAX = 4 * 2**20

_LIST_MAX = 100_000
_ALL_LINEAR = "all-linear"
# PEFT's choice for Llama, Mistral, Qwen2 and Qwen3 where target_modules is absent or null.
_DEFAULT_TARGETS = frozenset({"q_proj", "v_proj"})
_PROJECTION = re.compile(r"(?:q|k|v|o|qkv|gate|up|gate_up|down)_proj")
# Initialisations that start from the base as it is and leave it alone.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_MOVING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_HARMLESS = frozenset(
    {
        "auto_mapping", "corda_config", "eva_config", "inference_mode",
        "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "merge_weights",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
_UNDERSTOOD = frozenset(
    {
        "alpha_pattern", "base_model_name_or_path", "bias", "ensure_weight_tying",
        "exclude_modules", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save",
        "peft_type", "r", "rank_pattern", "target_modules", "trainable_token_indices", "use_dora",
        "use_rslora",
    }
)  # fmt: skip
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "fan_in_fan_out": "the weights are stored transposed",
        "alora_invocation_tokens": "an activated LoRA applies only after its invocation tokens",
        "layer_replication": "the base is rebuilt from repeated layers",
        "target_parameters": "LoRA is applied to bare parameters",
        "use_qalora": "QALoRA pools the input before lora_A",
        "use_bdlora": "BD-LoRA makes the factors block-diagonal",
        "megatron_config": "the adapter was made for Megatron's parallel layers",
        "arrow_config": "Arrow routes every token over several adapters",
        "kasa_config": "KaSA truncates the base weight and adds singular values",
        "velora_config": "VeLoRA replaces the projection of lora_A",
        "monteclora_config": "MonteCLoRA samples around the weights",
        "enable_lora": "only parts of a fused projection are adapted",
    }
)
_EMPTY_LIST_MEANS_OFF = frozenset({"layer_replication", "target_parameters", "enable_lora"})


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says about the mathematics, checked."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: str | frozenset[str]  # a regular expression, or path suffixes
    exclude_modules: str | frozenset[str]
    layers_to_transform: frozenset[int] | None  # None: all
    layers_pattern: tuple[str, ...]
    random_init: bool  # PEFT fills what the file lacks with random numbers, not zeros
    bias: str  # none, all or lora_only
    use_dora: bool
    lora_bias: bool
    ensure_weight_tying: bool
    token_indices: Mapping[EdgeModule, tuple[int, ...]]  # whose rows are replaced, by module
    modules_to_save: tuple[str, ...]
    base_model_name: str | None
    notes: tuple[str, ...]

    def rank_of(self, path: str) -> int:
        """The rank PEFT gives the module at `path`, such as model.layers.0.self_attn.q_proj."""
        return _of_pattern(self.rank_pattern, path, self.rank)

    def scaling_of(self, path: str, rank: int) -> float:
        """alpha / rank of the module at `path`, or alpha / sqrt(rank) with use_rslora."""
        alpha = _of_pattern(self.alpha_pattern, path, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, path: str) -> bool:
        """Whether PEFT would put an adapter on the module at `path`."""
        excluded, wanted = self.exclude_modules, self.target_modules
        if fully_matches(excluded, path) if isinstance(excluded, str) else _named(excluded, path):
            return False
        if isinstance(wanted, str):
            if wanted.lower() == _ALL_LINEAR:
                return _PROJECTION.fullmatch(path.rpartition(".")[2]) is not None
            return fully_matches(wanted, path)
        if path in wanted:  # a full path is not narrowed by layers_to_transform
            return True
        return _named(wanted, path) and self._has_layer(path)

    def _has_layer(self, path: str) -> bool:
        if self.layers_to_transform is None:
            return True
        match = re.fullmatch(r"(.*)\.(\d+)\..*", path)
        if match is None or int(match[2]) not in self.layers_to_transform:
            return False
        if self.layers_pattern:
            return any(fully_matches(rf"(?:.*\.)?{p}", match[1]) for p in self.layers_pattern)
        return "." in match[1]


def _of_pattern(pattern: Mapping[str, _T], path: str, default: _T) -> _T:
    """The value of the first key that matches, in the file's order."""
    return next((value for key, value in pattern.items() if matches_key(key, path)), default)


def _named(names: frozenset[str], path: str) -> bool:
    """Whether `path` or one of its ends after a dot is in `names`."""
    return not names.isdisjoint(_ends(path))


@lru_cache(maxsize=65536)
def _ends(path: str) -> tuple[str, ...]:
    parts = path.split(".")
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


def parse_config(raw: bytes, where: str) -> AdapterConfig:
    """The checked content of an adapter_config.json; `where` names it in errors.

    Raises AdapterError whose `field` is the field concerned.
    """
    return _Reader(_decode(raw, where), where).config()


def _decode(raw: bytes, where: str) -> dict[str, Any]:
    try:
        fields = parse_json(raw)
    except JsonError as error:
        reason = "duplicate" if error.key else "json"
        raise AdapterError(f"{where}: {error}", reason=reason, field=error.key) from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{where}: found {type(fields).__name__}, expected a JSON object")
    return fields


class _Reader:
    """Typed reads of one adapter_config.json."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where
        self._notes: list[str] = []

    def config(self) -> AdapterConfig:
        """All fields, checked against one another."""
        self._check_type()
        self._check_refused()
        self._check_unknown()
        self._note_harmless()
        config = AdapterConfig(
            rank=self._rank("r", self._fields.get("r", 8)),
            alpha=self._alpha("lora_alpha", self._fields.get("lora_alpha", 8)),
            rank_pattern=self._pattern("rank_pattern", self._rank),
            alpha_pattern=self._pattern("alpha_pattern", self._alpha),
            use_rslora=self._flag("use_rslora"),
            target_modules=self._targets(),
            exclude_modules=self._modules("exclude_modules") or frozenset(),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            random_init=self._random_init(),
            bias=self._bias(),
            use_dora=self._flag("use_dora"),
            lora_bias=self._flag("lora_bias"),
            ensure_weight_tying=self._flag("ensure_weight_tying"),
            token_indices=self._token_indices(),
            modules_to_save=tuple(self._names("modules_to_save")),
            base_model_name=self._base_model_name(),
            notes=tuple(self._notes),
        )
        self._check_layers(config)
        if config.lora_bias and config.use_dora:
            self._fail("lora_bias", "cannot be combined with use_dora, as PEFT says too")
        return config

    def _fail(self, field: str, message: str, reason: str = "invalid") -> NoReturn:
        raise AdapterError(f"{self._where}: {field}: {message}", reason=reason, field=field)

    def _check_type(self) -> None:
        found = self._fields.get("peft_type")
        if found != "LORA":
            self._fail("peft_type", f"found {quoted(found)}, expected LORA", "peft_type")

    def _check_refused(self) -> None:
        for field, why in _REFUSED.items():
            value = self._fields.get(field)
            if value is None or value is False:
                continue
            if value == [] and field in _EMPTY_LIST_MEANS_OFF:
                continue
            self._fail(field, f"found {quoted(value)}: {why}; this is not supported", "unsupported")

    def _check_unknown(self) -> None:
        known = _HARMLESS | _UNDERSTOOD | _REFUSED.keys()
        for field, value in self._fields.items():
            if field in known or value is None or value is False or value in ("", [], {}):
                continue
            self._fail(
                quoted(field),
                f"found {quoted(value)}: a field not known here may change the result",
                "unknown_field",
            )

    def _note_harmless(self) -> None:
        task = self._fields.get("task_type")
        if task not in (None, "", "CAUSAL_LM"):
            self._notes.append(f"trained for {quoted(task)}, served for text generation")
        if "lora_alpha" not in self._fields:
            self._notes.append("no lora_alpha: PEFT's default 8 is used")

    def _flag(self, field: str) -> bool:
        value = self._fields.get(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            self._fail(field, f"found {quoted(value)}, expected true or false")
        return value

    def _rank(self, field: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 < value < 2**31:
            self._fail(field, f"found {quoted(value)}, expected a positive whole number", "rank")
        return value

    def _alpha(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(field, f"found {quoted(value)}, expected a positive number", "alpha")
        if value == 0:
            self._fail(field, "found 0, with which the adapter would answer as the base", "alpha")
        if not 0 < value < 2**31:
            self._fail(
                field, f"found {quoted(value)}, expected a positive number below 2^31", "alpha"
            )
        return float(value)

    def _pattern(self, field: str, read: Callable[[str, object], _T]) -> Mapping[str, _T]:
        value = self._fields.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > _LIST_MAX:
            self._fail(field, f"found {quoted(value)}, expected an object or null")
        for key in value:
            self._check_regex(field, key)
        return {key: read(f"{field}.{quoted(key)}", item) for key, item in value.items()}

    def _check_regex(self, field: str, pattern: str) -> None:
        """Patterns are tried once here, so that later matching cannot fail."""
        try:
            matches_key(pattern, "model.layers.0.self_attn.q_proj")
            fully_matches(pattern, "model.layers.0.mlp.gate_proj")
        except PatternError as error:
            self._fail(field, f"pattern {quoted(pattern)}: {error}", "pattern")

    def _names(self, field: str) -> list[str]:
        value = self._fields.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self._fail(field, f"found {quoted(value)}, expected a list of names or null")
        if len(value) > _LIST_MAX:
            self._fail(field, f"{len(value):,} entries, the limit is {_LIST_MAX:,}")
        return value

    def _modules(self, field: str) -> str | frozenset[str] | None:
        """A string is a shorthand or a regular expression, a list holds suffixes."""
        value = self._fields.get(field)
        if isinstance(value, str) and value:
            if value.lower() != _ALL_LINEAR:
                self._check_regex(field, value)
            return value
        return None if value in (None, "") else frozenset(self._names(field))

    def _targets(self) -> str | frozenset[str]:
        targets = self._modules("target_modules")
        if targets is None:
            self._notes.append("no target_modules: PEFT's default, q_proj and v_proj, is used")
            return _DEFAULT_TARGETS
        if not targets:
            self._fail("target_modules", "empty: no module is adapted")
        return targets

    def _layers(self) -> frozenset[int] | None:
        value = self._fields.get("layers_to_transform")
        values = [value] if isinstance(value, int) else [] if value is None else value
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            self._fail(
                "layers_to_transform", f"found {quoted(value)}, expected layer numbers or null"
            )
        return frozenset(values) or None

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self._fields.get("layers_pattern")
        patterns: tuple[str, ...] = (value,) if isinstance(value, str) and value else ()
        if not patterns and value not in (None, ""):
            patterns = tuple(self._names("layers_pattern"))
        for pattern in patterns:
            self._check_regex("layers_pattern", pattern)
        return patterns

    def _check_layers(self, config: AdapterConfig) -> None:
        """PEFT refuses the same combinations."""
        if config.layers_to_transform is not None and isinstance(config.target_modules, str):
            self._fail("layers_to_transform", "cannot be combined with a string target_modules")
        if config.layers_pattern and config.layers_to_transform is None:
            self._fail("layers_pattern", "needs layers_to_transform")

    def _random_init(self) -> bool:
        value = self._fields.get("init_lora_weights", True)
        if value is None or isinstance(value, bool):
            return not value
        name = value.lower() if isinstance(value, str) else ""
        if name in _PLAIN_INITS:
            return False
        if name.startswith(_BASE_MOVING_INITS):
            raise AdapterError(
                f"{self._where}: init_lora_weights: found {quoted(value)}: training changed the"
                " base weights, so the adapter is wrong on the original base",
                reason="unsupported",
                field="init_lora_weights",
                hint="save it again with path_initial_model_for_weight_conversion, which turns it"
                " into plain LoRA",
            )
        self._fail(
            "init_lora_weights",
            f"found {quoted(value)}, expected true, false or one of {sorted(_PLAIN_INITS)}",
            "unsupported",
        )

    def _bias(self) -> str:
        value = self._fields.get("bias")
        if value not in (None, "none", "all", "lora_only"):
            self._fail("bias", f"found {quoted(value)}, expected none, all or lora_only")
        return value or "none"

    def _token_indices(self) -> Mapping[EdgeModule, tuple[int, ...]]:
        """A list is for the embedding, an object names modules."""
        field = "trainable_token_indices"
        value = self._fields.get(field)
        if not value:
            return {}
        by_module = {"embed_tokens": value} if isinstance(value, list) else value
        if not isinstance(by_module, dict):
            self._fail(field, f"found {quoted(value)}, expected token ids by module, or null")
        found: dict[EdgeModule, tuple[int, ...]] = {}
        for name, tokens in by_module.items():
            module = next((m for m in EDGES if m == name.rpartition(".")[2]), None)
            if module is None:
                self._fail(field, f"found {quoted(name)}, expected embed_tokens or lm_head")
            if not isinstance(tokens, list) or any(type(t) is not int or t < 0 for t in tokens):
                self._fail(field, f"found {quoted(tokens)}, expected a list of token ids")
            found[module] = tuple(tokens)
        return found

    def _base_model_name(self) -> str | None:
        value = self._fields.get("base_model_name_or_path")
        if value is not None and not isinstance(value, str):
            self._fail("base_model_name_or_path", f"found {quoted(value)}, expected a name or null")
        if not value:
            self._notes.append("names no base model: tensor shapes decide")
        return value or None

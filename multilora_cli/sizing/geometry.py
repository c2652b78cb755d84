"""The shape of a base model, read from its config.json alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multilora_cli.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes where a config leaves a field out and the family differs from Llama.
_DEFAULTS: dict[Family, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_CONFIG_BYTES_MAX = 4 * 2**20
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, variant, and the variant's own numbers."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # 0 where the variant has none
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    truncate: bool = True  # yarn: correction range rounded to whole dimensions


@dataclass(frozen=True)
class ModelGeometry:
    """All that sizing, loading and the engine need to know of a decoder's shape."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens; None: full attention
    dtype: str  # as the checkpoint says: bfloat16, float16, float32
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Mapping[str, Any] | None  # quantization_config as it stands

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """(d_in, d_out) of the seven projections of a layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.q_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.q_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def biased_modules(self) -> frozenset[str]:
        """Projections whose output has a bias."""
        modules: tuple[str, ...] = ()
        if self.qkv_bias:
            modules += ("q_proj", "k_proj", "v_proj")
        if self.o_bias:
            modules += ("o_proj",)
        if self.mlp_bias:
            modules += ("gate_proj", "up_proj", "down_proj")
        return frozenset(modules)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize


def projection_name(layer: int, module: str) -> str:
    """The checkpoint's name of one projection: model.layers.3.self_attn.q_proj."""
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{block}.{module}"


def read_geometry(folder: Path) -> ModelGeometry:
    """The geometry of the model in `folder`. Raises ModelError naming file and field."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _CONFIG_BYTES_MAX:
            raise ModelError(f"{path}: larger than {_CONFIG_BYTES_MAX} bytes")
        config = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder.absolute()}: no config.json", hint="a base is a folder in Hugging Face format"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return geometry_from_config(config, str(path))


def geometry_from_config(config: Mapping[str, Any], where: str) -> ModelGeometry:
    """The geometry in a parsed config.json; `where` names its origin in errors."""
    return _ConfigReader(config, where).geometry()


class _ConfigReader:
    """Typed reads of one config.json, every error naming the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def geometry(self) -> ModelGeometry:
        """All fields, checked against one another."""
        family = self._family()
        self._config = {**_DEFAULTS[family], **self._config}
        hidden, heads = self._int("hidden_size"), self._int("num_attention_heads")
        kv_heads = self._int("num_key_value_heads", heads)
        head_dim = self._int("head_dim", hidden // heads)
        if heads % kv_heads:
            raise self._error("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise self._error("head_dim", head_dim, "a multiple of 16 from 16 to 256")
        num_layers = self._int("num_hidden_layers")
        self._check_activation()
        bias = self._flag("attention_bias", family == "qwen2")
        return ModelGeometry(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self._int("vocab_size"),
            max_position=self._int("max_position_embeddings"),
            rms_norm_eps=self._float("rms_norm_eps", 1e-6),
            rope=self._rope(),
            tie_word_embeddings=self._flag("tie_word_embeddings", False),
            qkv_bias=True if family == "qwen2" else bias and family != "mistral",
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=self._flag("mlp_bias", False) and family == "llama",
            qk_norm=family == "qwen3",
            sliding_windows=self._sliding_windows(family, num_layers),
            dtype=self._dtype(),
            eos_token_ids=self._token_ids("eos_token_id"),
            bos_token_id=next(iter(self._token_ids("bos_token_id")), None),
            quantization=self._mapping("quantization_config"),
        )

    def _error(self, field: str, found: object, expected: str) -> ModelError:
        return ModelError(f"{self._where}: {field}: found {found!r:.80}, expected {expected}")

    def _family(self) -> Family:
        if self._config.get("auto_map"):
            raise ModelError(
                f"{self._where}: auto_map: the model asks to run its own code, which is refused",
                hint="serve a model of a supported architecture without auto_map",
            )
        names = self._config.get("architectures") or []
        for name in names if isinstance(names, list) else []:
            if name in _FAMILIES:
                return _FAMILIES[name]
        raise self._error("architectures", names, "one of " + ", ".join(_FAMILIES))

    def _int(self, field: str, default: int | None = None) -> int:
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._error(field, value, "a positive integer")
        return value

    def _float(self, field: str, default: float, config: Mapping[str, Any] | None = None) -> float:
        value = (self._config if config is None else config).get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(field, value, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self._error(field, value, "a finite positive number")
        return float(value)

    def _flag(self, field: str, default: bool) -> bool:
        value = self._config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(field, value, "true or false")
        return value

    def _mapping(self, field: str) -> Mapping[str, Any] | None:
        value = self._config.get(field)
        if value is not None and not isinstance(value, dict):
            raise self._error(field, value, "an object or null")
        return value

    def _token_ids(self, field: str) -> tuple[int, ...]:
        value = self._config.get(field)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self._error(field, value, "a token id or a list of them")
        return tuple(values)

    def _dtype(self) -> str:
        value = self._config.get("dtype") or self._config.get("torch_dtype") or "float32"
        if value not in _DTYPES:
            raise self._error("dtype", value, "one of " + ", ".join(_DTYPES))
        return str(value)

    def _check_activation(self) -> None:
        value = self._config.get("hidden_act", "silu")
        if value != "silu":
            raise self._error("hidden_act", value, "silu")

    def _sliding_windows(self, family: Family, num_layers: int) -> tuple[int | None, ...]:
        """A window per layer. Llama has none; Qwen applies it only where use_sliding_window."""
        window = self._config.get("sliding_window")
        enabled = family != "llama" and window is not None
        if family in ("qwen2", "qwen3"):
            enabled = enabled and self._flag("use_sliding_window", False)
        if not enabled:
            return (None,) * num_layers
        width = self._int("sliding_window")
        kinds = self._config.get("layer_types")
        if family != "mistral" and isinstance(kinds, list) and len(kinds) == num_layers:
            return tuple(width if kind == "sliding_attention" else None for kind in kinds)
        first = 0
        if family in ("qwen2", "qwen3"):
            value = self._config.get("max_window_layers", 28)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self._error("max_window_layers", value, "a non-negative integer")
            first = value
        return tuple(width if layer >= first else None for layer in range(num_layers))

    def _rope(self) -> Rope:
        """Both spellings: rope_parameters (new) and rope_theta with rope_scaling (old)."""
        scaling = self._mapping("rope_parameters") or self._mapping("rope_scaling") or {}
        theta = self._float("rope_theta", 0.0, scaling) or self._float("rope_theta", 10000.0)
        if theta <= 1.0:
            raise self._error("rope_theta", theta, "a number above 1")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3", "yarn", "dynamic"):
            raise self._error("rope_type", kind, "default, linear, llama3, yarn or dynamic")
        for config in (self._config, scaling):
            if config.get("partial_rotary_factor") not in (None, 1.0):
                raise self._error("partial_rotary_factor", config["partial_rotary_factor"], "1.0")
        if kind == "default":
            return Rope(theta=theta)
        max_position = self._int("max_position_embeddings")
        original = self._float("original_max_position_embeddings", max_position, scaling)
        # YaRN alone has a factor of its own where none is given: the ratio of the two lengths.
        factor = self._float("factor", max_position / original if kind == "yarn" else 0.0, scaling)
        if factor < 1.0:
            raise self._error("factor", scaling.get("factor"), "a number of at least 1")
        low = self._float("low_freq_factor", 1.0, scaling)
        high = self._float("high_freq_factor", 4.0, scaling)
        if high <= low:
            raise self._error("high_freq_factor", high, f"more than low_freq_factor {low}")
        return Rope(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=int(original),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=self._float("beta_fast", 32.0, scaling),
            beta_slow=self._float("beta_slow", 1.0, scaling),
            attention_factor=self._attention_factor(scaling, factor) if kind == "yarn" else 1.0,
            truncate=bool(scaling.get("truncate", True)),
        )

    def _attention_factor(self, scaling: Mapping[str, Any], factor: float) -> float:
        """YaRN's scale of cos and sin: 0.1 ln(factor) + 1 unless the config says otherwise."""
        if scaling.get("attention_factor") is not None:
            return self._float("attention_factor", 1.0, scaling)

        def scale(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            return scale(float(mscale)) / scale(float(all_dim))
        return scale(1.0)

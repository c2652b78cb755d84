"""config.json as transformers understands it: differences would be wrong weights in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from multilora_cli.errors import ModelError
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config, read_geometry

CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "LlamaForCausalLM": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "MistralForCausalLM": (transformers.MistralConfig, {"sliding_window": 1000}),
    "Qwen2ForCausalLM": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    ),
    "Qwen3ForCausalLM": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
}
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def stored(architecture: str) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    config_class, changes = CONFIGS[architecture]
    config = config_class(**{**SHAPE, **changes}, architectures=[architecture])
    return dict(json.loads(config.to_json_string(use_diff=False)))


def theirs(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.json, in the words of ModelGeometry."""
    read = CONFIGS[architecture][0].from_dict(dict(config))
    heads = read.num_attention_heads
    window = getattr(read, "sliding_window", None)
    kinds = getattr(read, "layer_types", None)
    if architecture == "LlamaForCausalLM":
        window = None
    if architecture == "MistralForCausalLM" or not kinds:
        kinds = ["sliding_attention"] * read.num_hidden_layers
    return {
        "num_layers": read.num_hidden_layers,
        "hidden_size": read.hidden_size,
        "intermediate_size": read.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": read.num_key_value_heads,
        "head_dim": getattr(read, "head_dim", None) or read.hidden_size // heads,
        "vocab_size": read.vocab_size,
        "max_position": read.max_position_embeddings,
        "rms_norm_eps": read.rms_norm_eps,
        "tie_word_embeddings": read.tie_word_embeddings,
        "sliding_windows": tuple(window if kind.startswith("sl") else None for kind in kinds),
        "theta": read.rope_parameters["rope_theta"],
    }


def ours(geometry: ModelGeometry) -> dict[str, Any]:
    fields = {name: getattr(geometry, name) for name in geometry.__dataclass_fields__}
    return {**fields, "theta": geometry.rope.theta}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_agrees_with_transformers_whatever_key_is_left_out(architecture: str) -> None:
    """Every key of a full config.json dropped in turn: the same defaults, or a refusal."""
    full = stored(architecture)
    full.pop("layer_types", None)
    compared = 0
    for dropped in (None, *full):
        config = {key: value for key, value in full.items() if key != dropped}
        try:
            found = ours(geometry_from_config(config, "config.json"))
        except ModelError as error:
            assert dropped is not None and dropped in error.message
            continue
        compared += 1
        for name, expected in theirs(architecture, config).items():
            assert found[name] == expected, (dropped, name)
    assert compared > 15


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("LlamaForCausalLM", (True, True, True, False)),
        ("MistralForCausalLM", (False, False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False, False)),
        ("Qwen3ForCausalLM", (True, True, False, True)),
    ],
)
def test_flags_of_a_family(architecture: str, flags: tuple[bool, ...]) -> None:
    """Biases where the family has them, whatever the config asks for elsewhere."""
    config = {**stored(architecture), "attention_bias": True, "mlp_bias": True}
    geometry = geometry_from_config(config, "config.json")
    found = (geometry.qkv_bias, geometry.o_bias, geometry.mlp_bias, geometry.qk_norm)
    assert found == flags


def test_layer_types_count_where_transformers_counts_them() -> None:
    """Qwen reads the list; Mistral slides in every layer whatever the list says."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    qwen = {**stored("Qwen2ForCausalLM"), "layer_types": kinds}
    assert geometry_from_config(qwen, "x").sliding_windows == (None, 512, None, 512)
    mistral = {**stored("MistralForCausalLM"), "layer_types": kinds}
    assert geometry_from_config(mistral, "x").sliding_windows == (1000,) * 4
    off = {**qwen, "use_sliding_window": False}
    assert geometry_from_config(off, "x").sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_every_spelling_of_rope(spelling: dict[str, Any]) -> None:
    """Old and new field names mean the same."""
    config = stored("LlamaForCausalLM")
    config.pop("rope_parameters")
    rope = geometry_from_config({**config, **spelling}, "x").rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}},
            "high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 60}, "head_dim"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"dtype": "int8"}, "dtype"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    """One wrong field, one line that says which."""
    with pytest.raises(ModelError, match=named) as caught:
        geometry_from_config({**stored("LlamaForCausalLM"), **changes}, "base/config.json")
    assert caught.value.message.startswith("base/config.json: ")


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    """As transformers does: max_position_embeddings over the original length."""
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    geometry = geometry_from_config({**stored("LlamaForCausalLM"), "rope_parameters": rope}, "x")
    assert geometry.rope.factor == 4.0


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_broken_files(tmp_path: Path, content: bytes) -> None:
    """Not JSON, not an object: a ModelError that names the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_geometry(tmp_path)


def test_missing_and_huge_files(tmp_path: Path) -> None:
    """No config at all; one that is too large to be a config."""
    with pytest.raises(ModelError, match="no config"):
        read_geometry(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(ModelError, match="larger than"):
        read_geometry(tmp_path)


def test_derived_sizes() -> None:
    """Llama-3-8B: 128 KiB of KV a token in bf16, module shapes as PEFT sees them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    geometry = geometry_from_config(config, "x")
    assert geometry.kv_bytes_per_token(2) == 131072
    assert geometry.module_shapes["k_proj"] == (4096, 1024)
    assert geometry.module_shapes["down_proj"] == (14336, 4096)

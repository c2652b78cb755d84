"""Position sets against `re` on random patterns, and against PEFT's own matching functions."""

import random
import re
import warnings

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from multilora_cli.adapters.module_pattern import PatternError, fully_matches, matches_key
from multilora_cli.adapters.peft_config import AdapterConfig, parse_config

BLOCKS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
PATHS = [f"model.layers.{layer}.{block}" for layer in (0, 1, 10, 31) for block in BLOCKS]
PATHS += ["lm_head", "model.embed_tokens", "model.language_model.layers.3.mlp.up_proj"]
ATOMS = [
    "q", "v", "_proj", r"\.", ".", r"\d", "[qv]", "[^k]", r"(q|v)_proj", ".*", ".*?", r"\w+",
    "model", "layers", "(?:a|b)?", "(?!.*lm_head)", r"(?<!self_)attn", r"(?<=mlp\.)", r"\b", r"\B",
    "^", "$", r"\A", r"\Z", "[0-9]{1,2}", "(?=m)", "(mlp|self_attn)", r"\S*", r"(.*\.)?", r"\D+",
    "[a-m]{0,3}?", r"[\w.]+", "(?P<x>q)", "a{2,}", r"(?:\.\d+)+", "x*", "(|q)", r"\s?",
]  # fmt: skip


def test_agrees_with_re() -> None:
    """fullmatch, and PEFT's rule for keys, on 2,000 random patterns and 5 paths each."""
    seed = 4
    rng, matched = random.Random(seed), 0
    for _ in range(2_000):
        pattern = "".join(rng.choices(ATOMS, k=rng.randint(1, 6)))
        try:
            whole, key = re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")
        except re.error:  # the name x twice
            continue
        for path in rng.sample(PATHS, 5):
            expected = whole.fullmatch(path) is not None
            assert fully_matches(pattern, path) is expected, (seed, pattern, path)
            assert matches_key(pattern, path) is (key.match(path) is not None), (pattern, path)
            matched += expected
    assert matched > 300


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*(.*)*(.*)*x", "(" * 80 + ".*" + ")*" * 80 + "!"]
)
def test_exploding_patterns_end(pattern: str) -> None:
    """Patterns that keep `re` busy for hours are decided (the last one alone takes a second)."""
    assert fully_matches(pattern, PATHS[0] + "a" * 40) is False


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(q", "not a regular expression"),
        ("[", "not a regular expression"),
        (r"(.)\1", "groupref"),
        ("(?i)Q", "flags"),
        ("(?i:Q)", "flags"),
        ("(?>q)", "atomic_group"),
        ("q*+", "possessive_repeat"),
        ("(q)?(?(1)a|b)", "groupref_exists"),
        ("q" * 9000, "longer than"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
        ("(?:(?:a|b|c|d|e|f|.)?){9}" * 200, "takes too long"),
        ("a{99999999999999999999}", "not a regular expression"),
    ],
)  # fmt: skip
def test_refused_patterns(pattern: str, words: str) -> None:
    """What is not decided here is an error, never a guess."""
    with pytest.raises(PatternError, match=words):
        fully_matches(pattern, PATHS[0])


CONFIGS = [
    {"target_modules": ["q_proj"]},
    {
        "target_modules": [
            "model.layers.1.mlp.gate_proj",
            "attn.v_proj",
            "layers.0.self_attn.v_proj",
        ]
    },
    {"target_modules": ["q_proj", "gate_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "gate_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": r".*\.(q|gate)_proj"},
    {"target_modules": r".*mlp.*", "exclude_modules": ["down_proj"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 31]},
    {"target_modules": ["q_proj"], "layers_to_transform": 10},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "model.layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layer"},
    {"target_modules": ["model.layers.1.mlp.gate_proj"], "layers_to_transform": [0]},
    {"target_modules": ["up_proj"], "layers_to_transform": [3]},
]


def parsed(config: LoraConfig) -> AdapterConfig:
    import json

    fields = {k: v for k, v in config.to_dict().items() if v is not None}
    for name in ("target_modules", "exclude_modules"):
        if isinstance(fields.get(name), set):
            fields[name] = sorted(fields[name])
    return parse_config(json.dumps(fields, default=str).encode(), "adapter_config.json")


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_targets_agree_with_peft(fields: dict[str, object]) -> None:
    """Which modules are adapted is PEFT's own answer for every path."""
    config = LoraConfig(**fields)
    ours = parsed(config)
    for path in PATHS:
        result = check_target_module_exists(config, path)
        expected = bool(result) and type(result).__name__ != "_ExcludedModule"
        assert ours.targets(path) is expected, path


PATTERN_KEYS = [
    "q_proj", "attn.q_proj", "self_attn.q_proj", "^q_proj", r"^model\.layers\.0\..*", "layers.1.*",
    r"model\.layers\.(0|31)\.mlp\.gate_proj", ".*", "proj", "mlp", r"[qv]_proj", "(q|v)_proj$", "",
]  # fmt: skip


def test_pattern_keys_agree_with_peft() -> None:
    """The value by module is that of PEFT's first matching key, in the file's order."""
    rng = random.Random(11)
    for _ in range(300):
        keys = rng.sample(PATTERN_KEYS, rng.randint(1, 4))
        ranks = {key: 2 + index for index, key in enumerate(keys)}
        alphas = {key: 20 + index for index, key in enumerate(keys)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(
                r=8, lora_alpha=4, target_modules=["x"], rank_pattern=ranks, alpha_pattern=alphas
            )
        ours = parsed(config)
        for path in PATHS:
            rank = ranks.get(get_pattern_key(list(ranks), path), 8)
            alpha = alphas.get(get_pattern_key(list(alphas), path), 4)
            assert ours.rank_of(path) == rank, (keys, path)
            assert ours.scaling_of(path, rank) == alpha / rank, (keys, path)

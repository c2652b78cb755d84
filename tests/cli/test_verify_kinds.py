"""Adapters of every kind through all that `mlora verify` does, sound and mutated."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.adapter_oracle import CONFIG, WEIGHTS
from tests.cli.test_verify_malformed import Examiner, mutate, mutate_config, rewrite
from tests.models import tiny
from tests.models.peft_adapters import ALL, make_adapters

KINDS: dict[str, dict[str, Any]] = {
    "dora, saved": {"target_modules": ALL, "use_dora": True, "modules_to_save": ["lm_head"]},
    "biases": {"target_modules": ["q_proj"], "bias": "all", "lora_bias": True},
    "edges": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "token rows": {"target_modules": ["v_proj"], "trainable_token_indices": [9, 3, 210]},
}
FIELDS = (
    "trainable_token_indices", "modules_to_save", "use_dora", "lora_bias", "bias",
    "ensure_weight_tying", "target_modules",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, 0, "all", "lora_only", "x", ".*", "all-linear", [5], [9, 3, 210],
    {"lm_head": [1]}, {"embed_tokens": [9, 3, 210]}, {"embed_tokens": 5}, {"embed_tokens": [1e9]},
    ["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"], ["v_proj", "embed_tokens"],
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base, then an adapter of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    model = tiny.make_model("llama", seed=6, attention_bias=True)
    base = tiny.save_model(model, folder / "base")
    return [base, *make_adapters(model, folder, tuple(KINDS.values()))]


def test_mutants_of_every_kind(folders: list[Path], tmp_path: Path) -> None:
    """G02: refused by AdapterError, or examined and computed by the reference."""
    rng, examiner, accepted = random.Random(5), Examiner(folders[0]), 0
    target = tmp_path / "mutant"
    for number in range(128):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folders[1 + number % len(KINDS)], target)
        config, weights = (target / CONFIG).read_bytes(), (target / WEIGHTS).read_bytes()
        kind = number // len(KINDS) % 4
        if kind == 0:
            (target / CONFIG).write_bytes(mutate_config(config, rng))
        elif kind == 1:
            (target / WEIGHTS).write_bytes(mutate(weights, rng))
        elif kind == 2:
            (target / WEIGHTS).write_bytes(rewrite(weights, rng))
        else:
            changed = json.loads(config) | {rng.choice(FIELDS): rng.choice(VALUES)}
            (target / CONFIG).write_text(json.dumps(changed))
        accepted += examiner(target, compute=number % 16 == 0)
    assert 5 < accepted < 110

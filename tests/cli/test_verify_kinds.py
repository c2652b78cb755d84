"""`mlora verify` over every kind of adapter and every storage of a base, on a CPU and on a card.

Adapters here change the base a lot, so that 16-bit and FP8 rounding are felt: the reference's own
rounding has to tell them from faults.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from tests.engine.test_parity import SEVEN, perturb
from tests.models.quantized_kit import KINDS, requantise
from tests.signature import load_base, peft_adapter, tiny_base

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
KINDS_OF_ADAPTER: dict[str, dict[str, Any]] = {
    "plain": {"r": 16, "target_modules": SEVEN},
    "patterns": {"r": 4, "target_modules": SEVEN, "rank_pattern": {"v_proj": 40}},
    "dora": {"use_dora": True, "target_modules": SEVEN},
    "bias": {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "saved": {"modules_to_save": ["lm_head"]},
    "rows": {"trainable_token_indices": [7, 41, 200]},
}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "attention_bias": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of head size 64, the same in AWQ, and an adapter of every kind."""
    root = tmp_path_factory.mktemp("verify")
    base = tiny_base(root / "model", **SHAPE)
    requantise(tiny_base(root / "model-awq", **SHAPE), load_base(base), KINDS["awq-128"])
    for index, (name, how) in enumerate(KINDS_OF_ADAPTER.items()):
        peft_adapter(base, root / name, seed=index, b_scale=2.0, **how)
        if how.keys() & {"bias", "modules_to_save", "trainable_token_indices"}:
            perturb(root / name)
    return root


CASES = {
    "FP32": ("model", "base.dtype=float32"),
    "BF16": ("model", "base.dtype=bfloat16"),
    "FP8": ("model", "base.quantization=fp8"),
    "FP8 KV": ("model", "base.kv_cache_dtype=fp8"),
    "AWQ": ("model-awq", "base.dtype=float16"),
}


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "cpu") for case in ("FP32", "BF16", "FP8 KV")),
        *(pytest.param(case, "cuda:0", marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_served_answers_are_the_references(folder: Path, case: str, device: str) -> None:
    model, setting = CASES[case]
    fleet = folder / "fleet.yaml"
    entries = "".join(f"  - {{name: {n}, source: ./{n}}}\n" for n in KINDS_OF_ADAPTER)
    fleet.write_text(f"base: {{model: ./{model}, name: tiny}}\nadapters:\n{entries}")
    settings = ("--set", setting, "--set", f"memory.device={device}")
    result = CliRunner().invoke(app, ["verify", str(fleet), "--json", *settings])
    value = json.loads(result.stdout)
    shown = {a["name"]: (a["verdict"], a.get("parity"), a["reason"]) for a in value["adapters"]}
    assert result.exit_code == 0, shown
    for name, (_, parity, _) in shown.items():
        assert parity["largest"] <= parity["tolerance"] < parity["effect"], (name, shown)

"""The reference against PEFT on the very folder, for every kind of adapter and of base."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.adapters.safetensors_header import open_file, read_header
from multilora_cli.engine.parity import Passage, Reference
from multilora_cli.models.quantized import base_quantization
from multilora_cli.sizing.geometry import read_geometry
from tests.signature import load_adapted, load_base, peft_adapter, tiny_base

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = ([5, 9, 200, 31, 77, 12], [3], list(range(40, 70)))


def unread(folder: Path) -> AdapterFile:
    """The adapter in `folder` as the reference takes it, whether or not it is served."""
    identity = read_header(folder / "adapter_model.safetensors").identity
    with open_file(folder / "adapter_config.json") as file:
        config = file.identity
    tensors = read_header(identity.path).tensors
    return AdapterFile(folder, None, tensors, {}, (config, identity), ())  # type: ignore[arg-type]


def silent(phase: str, done: int, total: int) -> None:
    """No progress."""


def reference_logprobs(
    base: Path, adapters: list[AdapterFile], passages: list[Passage]
) -> list[torch.Tensor]:
    geometry = read_geometry(base)
    quantization = base_quantization(base, geometry, "auto")
    with Reference(base, geometry, quantization, adapters) as reference:
        return reference.logprobs(passages, silent)


def peft_logprobs(
    base: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    model = load_base(base) if adapter is None else load_adapted(base, adapter)
    with torch.no_grad():
        return [model(torch.tensor([list(p)])).logits[0].log_softmax(-1) for p in prompts]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_mixed_adapters(family: str, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", family, **FAMILIES[family])
    hows: tuple[dict[str, Any], ...] = (
        {"r": 8},
        {"r": 5, "target_modules": SEVEN, "use_rslora": True},
        {"r": 4, "target_modules": SEVEN, "rank_pattern": {"v_proj": 12},
         "alpha_pattern": {"layers.1.mlp.down_proj": 64, "v_proj": 3}},
        {"r": 16, "target_modules": SEVEN, "layers_to_transform": [1]},
    )  # fmt: skip
    folders = [peft_adapter(base, tmp_path / f"a{i}", seed=i, **h) for i, h in enumerate(hows)]
    geometry = read_geometry(base)
    adapters = [read_adapter(folder, geometry, max_rank=64) for folder in folders]
    owners = [None, 0, 1, 2, 3, 1, None]
    passages = [Passage(PROMPTS[i % 3], owner) for i, owner in enumerate(owners)]
    results = reference_logprobs(base, adapters, passages)
    for owner in (None, 0, 1, 2, 3):
        rows = [i for i in range(len(owners)) if owners[i] == owner]
        folder = None if owner is None else folders[owner]
        expected = peft_logprobs(base, folder, [passages[i].tokens for i in rows])
        for i, wanted in zip(rows, expected, strict=True):
            assert (results[i] - wanted).abs().max() < 1e-4, (family, owner)


KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True, "target_modules": SEVEN},
    "DoRA and rsLoRA": {"use_dora": True, "use_rslora": True},
    "biases of targets": {"bias": "lora_only", "target_modules": SEVEN},
    "all biases": {"bias": "all"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA on the head": {"target_modules": ["lm_head"], "use_dora": True},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "token rows": {"trainable_token_indices": [5, 9, 55]},
    "saved embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


# PEFT ties saved copies to a tied head in ways of its own.
TIED = [kind for kind in KINDS if "head" in kind and "saved" not in kind] + ["embedding"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "tied"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in TIED)]
)
def test_every_kind_of_adapter(kind: str, tied: bool, tmp_path: Path) -> None:
    how = KINDS[kind]
    base = tiny_base(
        tmp_path / "base", attention_bias=True, mlp_bias=True, tie_word_embeddings=tied
    )
    folder = peft_adapter(base, tmp_path / "a", **how)
    if how.keys() & {"bias", "modules_to_save", "trainable_token_indices"}:
        perturb(folder)
    passages = [Passage(prompt, 0) for prompt in PROMPTS]
    results = reference_logprobs(base, [unread(folder)], passages)
    for got, expected in zip(results, peft_logprobs(base, folder, PROMPTS), strict=True):
        assert (got - expected).abs().max() < 1e-4, kind


def perturb(folder: Path) -> None:
    """Move biases and saved matrices off the base's, as training does."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith(".bias") or "lora" not in name or "trainable_tokens" in name:
            tensor += 0.1 * torch.randn(tensor.shape)
    save_file(tensors, path)


def test_long_rope_variants(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "rope_theta": 10000.0}  # fmt: skip
    for index, rope in enumerate((scaling, yarn)):
        base = tiny_base(tmp_path / str(index), rope_parameters=rope)
        prompt = [(7 * i) % 250 for i in range(150)]
        (got,) = reference_logprobs(base, [], [Passage(prompt)])
        (expected,) = peft_logprobs(base, None, [prompt])
        assert (got - expected).abs().max() < 1e-4


def test_it_sees_one_wrong_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is 1 % off in one module of one layer is far outside the tolerance."""
    base = tiny_base(tmp_path / "base")
    how: dict[str, Any] = {"r": 8, "target_modules": SEVEN, "b_scale": 2.0}
    adapter = read_adapter(
        peft_adapter(base, tmp_path / "a", **how), read_geometry(base), max_rank=64
    )
    passages = [Passage(PROMPTS[0], 0)]
    (right,) = reference_logprobs(base, [adapter], passages)
    from multilora_cli.engine.parity_adapter import MergedAdapter

    scale: Callable[..., float] = MergedAdapter._scale

    def off(self: MergedAdapter, path: str, lora_a: Any) -> float:
        return scale(self, path, lora_a) * (1.01 if "layers.1" in path and "v_proj" in path else 1)

    monkeypatch.setattr(MergedAdapter, "_scale", off)
    (wrong,) = reference_logprobs(base, [adapter], passages)
    assert (right - wrong).abs().max() > 2e-3

"""Served answers beside the reference's: exact where they are, and found where they are not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import multilora_cli.layers.linear as linear
from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.engine.agreement import NOTHING, Agreement, compare
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.parity_run import Parity, ParityCheck, Subject, waves_of
from multilora_cli.sizing.geometry import read_geometry
from tests.engine.conftest import TinyFleet
from tests.engine.test_parity import SEVEN, perturb
from tests.signature import peft_adapter, tiny_base

PROMPTS = (list(range(40, 63)), [7, 9, 200], [3])


def silent(phase: str, done: int, total: int) -> None:
    """No progress."""


def subjects_of(base: Path, folders: Sequence[Path]) -> list[Subject]:
    geometry, found = read_geometry(base), []
    for folder in folders:
        adapter = read_adapter(folder, geometry, max_rank=64, base_folder=base)
        found.append(Subject(folder.name, adapter, content_digest(adapter), 16))
    return found


def parities(base: Path, subjects: Sequence[Subject], **config: Any) -> dict[str, Parity]:
    settings = EngineConfig(model_path=str(base), num_threads=1, **config)
    with ParityCheck(settings, subjects, PROMPTS, silent) as check:
        return dict(check.results())


def test_a_mixed_batch_is_exact(tiny: TinyFleet) -> None:
    subjects = subjects_of(tiny.base, [Path(ref.path) for ref in tiny.adapters])
    results = parities(tiny.base, subjects)
    assert list(results) == ["a0", "a1", "a2"]
    for parity in results.values():
        assert parity.is_exact and parity.tolerance == pytest.approx(1e-3)
        assert parity.agreement.largest < 1e-4 and parity.agreement.top1 == 1.0
        assert parity.agreement.positions == sum(len(prompt) - 1 for prompt in PROMPTS)
        assert parity.effect > 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_not_a_fault(tiny: TinyFleet, dtype: str) -> None:
    subjects = subjects_of(tiny.base, [Path(ref.path) for ref in tiny.adapters])
    for parity in parities(tiny.base, subjects, dtype=dtype).values():
        assert parity.is_exact and parity.agreement.largest > 1e-5


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_every_kind_in_one_batch_is_exact(tmp_path: Path) -> None:
    """A-CFG-11, A-CFG-12: DoRA and trained biases beside plain LoRA and the bare base."""
    base = tiny_base(tmp_path / "base", attention_bias=True, mlp_bias=True)
    hows: tuple[dict[str, Any], ...] = (
        {"r": 8},
        {"use_dora": True, "target_modules": SEVEN, "use_rslora": True},
        {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
        {"use_dora": True, "bias": "lora_only", "r": 3},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["v_proj", "embed_tokens"], "r": 4},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [7, 41, 200]},
    )
    folders = []
    for index, how in enumerate(hows):
        folders.append(peft_adapter(base, tmp_path / f"a{index}", seed=index, **how))
        if how.keys() & {"bias", "modules_to_save", "trainable_token_indices"}:
            perturb(folders[-1])
    results = parities(base, subjects_of(base, folders))
    for name, parity in results.items():
        assert parity.is_exact and parity.effect > 0.02, (name, parity)


@pytest.mark.parametrize("storage", ["fp8"])
def test_a_quantised_base_is_compared_with_its_dequantised_weights(
    tmp_path: Path, storage: str
) -> None:
    base = tiny_base(tmp_path / "base", hidden_size=128, dtype=torch.bfloat16)
    folder = peft_adapter(base, tmp_path / "a", target_modules=["q_proj", "down_proj"])
    results = parities(base, subjects_of(base, [folder]), quantization=storage)
    assert results["a"].agreement.largest < 1e-3


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *((fault, "float32") for fault in ("lost", "one percent", "one module")),
        *((fault, "bfloat16") for fault in ("lost", "one module")),
    ],
)
def test_a_fault_in_the_served_path_is_found(
    tiny: TinyFleet, monkeypatch: pytest.MonkeyPatch, fault: str, dtype: str
) -> None:
    honest = linear.add_lora

    def faulty(y: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        before = y.clone()
        honest(y, *rest)
        if fault == "lost":
            y.copy_(before)
        elif fault == "one percent":
            y.copy_(before + 1.01 * (y - before))
        elif rest[-2:] == (1, "qkv"):
            y.copy_(before)
        return None

    monkeypatch.setattr(linear, "add_lora", faulty)
    subjects = subjects_of(tiny.base, [Path(ref.path) for ref in tiny.adapters])
    results = parities(tiny.base, subjects, dtype=dtype)
    assert not any(parity.is_exact for parity in results.values())
    noise = 1e-4 if dtype == "float32" else 0.05
    assert all(parity.base.largest < noise for parity in results.values())


def test_waves_hold_what_memory_holds(tiny: TinyFleet) -> None:
    subjects = subjects_of(tiny.base, [Path(ref.path) for ref in tiny.adapters]) * 100
    prompts = [[1] * 20] * 3
    assert [len(wave) for wave in waves_of(subjects, prompts, 128_256)] == [8] * 37 + [4]
    assert len(waves_of(subjects, prompts, 300)) == 1


def test_agreement() -> None:
    torch.manual_seed(0)
    one, two = (torch.randn(4, 9).log_softmax(-1) for _ in range(2))
    assert compare(one, one) == Agreement(4, 0.0, pytest.approx(0.0, abs=1e-7), 1.0)
    found = compare(one, two)
    assert found.largest == pytest.approx(float((one - two).abs().max()))
    kl = torch.nn.functional.kl_div(one, two, log_target=True, reduction="batchmean")
    assert found.mean_kl == pytest.approx(float(kl), rel=1e-5)
    assert compare(one[:0], one[:0]) == NOTHING
    parts = compare(one[:1], two[:1]) + compare(one[1:], two[1:])
    assert parts.mean_kl == pytest.approx(found.mean_kl) and parts.top1 == found.top1
    broken = one.clone()
    broken[2, 3] = torch.nan
    assert compare(broken, one).largest == float("inf")

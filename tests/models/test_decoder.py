"""Log-probabilities against transformers in fp32: every family, every flag, every schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.sizing.geometry import read_geometry
from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    chunks_of,
    log_probability_gap,
    one_by_one,
    prefill_then_decode,
    ragged,
    random_prompts,
    whole,
)

TOLERANCE = 1e-3
LENGTHS = (1, 2, 15, 16, 17, 33, 100, 150)
SCHEDULES = {
    "whole": whole,
    "chunks of 16": chunks_of(16),
    "chunks of 7": chunks_of(7),
    "decode": one_by_one,
    "prefill then decode": prefill_then_decode(60),
    "ragged": ragged(5),
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no gqa": ("llama", {"num_key_value_heads": 4}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama llama3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "llama yarn": ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}),
    "llama yarn exact": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 64,
                "truncate": False,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            }
        },
    ),
    "llama dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
            "max_position_embeddings": 160,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2 window above layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def _with_theta(changes: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 wants theta among the rope parameters."""
    if "rope_parameters" not in changes:
        return changes
    return {**changes, "rope_parameters": {"rope_theta": 10000.0, **changes["rope_parameters"]}}


class Case:
    """One saved model with transformers' logits of the prompts."""

    def __init__(self, family: str, changes: dict[str, Any], folder: Path) -> None:
        model = tiny.make_model(family, seed=3, **_with_theta(changes))
        self.folder = tiny.save_model(model, folder)
        self.prompts = random_prompts(LENGTHS, tiny.VOCAB, seed=1)
        self.reference = tiny.reference_logits(model, self.prompts)
        self.decoder = tiny.load(self.folder)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, changes = MODELS[request.param]
    return Case(family, changes, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("chunker", SCHEDULES.values(), ids=SCHEDULES)
def test_equals_transformers_in_one_mixed_batch(case: Case, chunker: Chunker) -> None:
    """All prompts together, whole, in chunks, by decode steps and mixed."""
    rows = [Row(prompt) for prompt in case.prompts]
    results = PagedRunner(case.decoder).run(rows, chunker)
    gaps = [log_probability_gap(*pair) for pair in zip(results, case.reference, strict=True)]
    assert max(gaps) < TOLERANCE, gaps


def test_pages_are_given_back_and_reused(case: Case) -> None:
    """A second round on the same pool, whose pages the first one left as NaN."""
    runner = PagedRunner(case.decoder, num_pages=30)
    for _ in range(2):
        results = runner.run([Row(prompt) for prompt in case.prompts])
        assert len(runner.free) == 30
        gaps = [log_probability_gap(*pair) for pair in zip(results, case.reference, strict=True)]
        assert max(gaps) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("llama linear", {}),
        ("llama llama3", {}),
        ("llama yarn", {}),
        ("mistral window", {"sliding_window": None}),
        ("qwen2 window above layer", {"use_sliding_window": False}),
    ],
)
def test_the_flag_matters(name: str, plain: dict[str, Any]) -> None:
    """Without the variant, transformers itself is far from the reference: the test can fail."""
    family, changes = MODELS[name]
    prompts = random_prompts((150,), tiny.VOCAB, seed=1)
    model = tiny.make_model(family, seed=3, **_with_theta(changes))
    flagged = tiny.reference_logits(model, prompts)[0]
    without = {key: value for key, value in changes.items() if key != "rope_parameters"}
    other = tiny.make_model(family, seed=3, **{**without, **plain})
    assert log_probability_gap(tiny.reference_logits(other, prompts)[0], flagged) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_fp32_as_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """The mean gap to fp32 is that of transformers in the same dtype, within a quarter."""
    model = tiny.make_model("llama", seed=4)
    prompts = random_prompts((40, 70, 90), tiny.VOCAB, seed=2)
    decoder = tiny.load(tiny.save_model(model, tmp_path), dtype)
    exact = torch.cat(tiny.reference_logits(model, prompts)).log_softmax(-1)
    theirs = torch.cat(tiny.reference_logits(model.to(dtype), prompts)).log_softmax(-1)
    ours = torch.cat(PagedRunner(decoder).run([Row(prompt) for prompt in prompts], ragged(1)))
    assert ours.dtype == torch.float32
    gap = (ours.log_softmax(-1) - exact).abs().mean()
    assert gap < 1.25 * (theirs - exact).abs().mean()


def test_only_requested_rows_get_logits(tmp_path: Path) -> None:
    """logits() of some hidden rows equals those rows of all logits."""
    decoder = tiny.load(tiny.save_model(tiny.make_model("llama"), tmp_path))
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    picked = torch.tensor([8, 2])
    assert torch.allclose(decoder.logits(hidden)[picked], decoder.logits(hidden[picked]), atol=1e-5)
    assert decoder.logits(hidden[:0]).shape == (0, tiny.VOCAB)


def test_weight_bytes_count_a_tied_head_once(tmp_path: Path) -> None:
    """The plan's weight bytes are the parameters of the model."""
    for tied in (True, False):
        model = tiny.make_model("qwen3", tie_word_embeddings=tied)
        folder = tiny.save_model(model, tmp_path / str(tied))
        parameters = sum(p.numel() for p in model.parameters())
        assert tiny.load(folder).weight_bytes == 4 * parameters
        assert read_geometry(folder).tie_word_embeddings is tied

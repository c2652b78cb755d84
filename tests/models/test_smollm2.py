"""A real model: SmolLM2-135M-Instruct against transformers, its adapters against PEFT, in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from multilora_cli.models.decoder import Decoder
from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    chunks_of,
    log_probability_gap,
    prefill_then_decode,
    ragged,
    random_prompts,
    whole,
)
from tests.models.peft_adapters import CONFIGS, load_adapters, make_adapters, peft_logits

TOLERANCE = 1e-3
SLOTS = (0, 5, 1, 4, 0, 2, 3, 5, 1, 2, 3, 4, 0, 1, 5, 2)
LENGTHS = (9, 30, 17, 24, 16, 5, 33, 12, 7, 21, 1, 14, 40, 8, 18, 26)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    """transformers' model in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    """Our decoder of the same folder in fp32; the checkpoint holds bf16."""
    return tiny.load(smollm2)


@pytest.fixture(scope="module")
def adapters(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five PEFT adapters of ranks 4 to 64 on it."""
    return make_adapters(reference, tmp_path_factory.mktemp("smollm2-adapters"), CONFIGS, size=0.3)


Expected = tuple[list[list[int]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def plain(reference: Any) -> Expected:
    """Prompts of ordinary and rare tokens, and transformers' logits."""
    prompts = random_prompts((150, 64, 21), reference.config.vocab_size, seed=4)
    return prompts, tiny.reference_logits(reference, prompts)


@pytest.fixture(scope="module")
def tuned(reference: Any, adapters: list[Path]) -> Expected:
    """16 prompts and PEFT's logits under the adapters of SLOTS."""
    prompts = random_prompts(LENGTHS, reference.config.vocab_size, seed=5)
    return prompts, peft_logits(reference, adapters, list(zip(SLOTS, prompts, strict=True)))


def run(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    chunker: Chunker,
    slots: Sequence[int] | None = None,
    adapters: Sequence[Path] = (),
) -> list[torch.Tensor]:
    """Logits of all prompts in one batch, through pages."""
    runner = PagedRunner(decoder, num_pages=420)
    load_adapters(runner, adapters)
    rows = [Row(p, slot=s) for p, s in zip(prompts, slots or [0] * len(prompts), strict=True)]
    return runner.run(rows, chunker)


@pytest.mark.parametrize(
    "chunker",
    [whole, chunks_of(64), prefill_then_decode(140), ragged(1, most=90)],
    ids=["whole", "chunks of 64", "prefill then decode", "ragged"],
)
def test_logits_equal_transformers(decoder: Decoder, plain: Expected, chunker: Chunker) -> None:
    """Every position of three prompts computed together."""
    results = run(decoder, plain[0], chunker)
    gaps = [log_probability_gap(*pair) for pair in zip(results, plain[1], strict=True)]
    assert max(gaps) < TOLERANCE, gaps


@pytest.mark.parametrize("chunker", [whole, ragged(2)], ids=["whole", "ragged"])
def test_16_rows_of_five_adapters_equal_peft(
    decoder: Decoder, adapters: list[Path], tuned: Expected, chunker: Chunker
) -> None:
    """Base rows and ranks 4 to 64 in one batch, each row as PEFT computes it."""
    results = run(decoder, tuned[0], chunker, SLOTS, adapters)
    gaps = [log_probability_gap(*pair) for pair in zip(results, tuned[1], strict=True)]
    assert max(gaps) < TOLERANCE, gaps


def test_adapters_matter(decoder: Decoder, tuned: Expected) -> None:
    """The base's own logits are far from every adapter's, and equal to the base rows'."""
    results = run(decoder, tuned[0], whole)
    for slot, base, expected in zip(SLOTS, results, tuned[1], strict=True):
        assert (log_probability_gap(base, expected) > 0.1) == (slot != 0)


def test_bf16_is_as_near_fp32_as_transformers(smollm2: Path, plain: Expected) -> None:
    """The serving dtype: the mean gap to fp32 is that of transformers' bf16, within a quarter."""
    prompts, exact = plain[0][1:], torch.cat(plain[1][1:]).log_softmax(-1)
    half = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    theirs = torch.cat(tiny.reference_logits(half, prompts)).log_softmax(-1)
    ours = torch.cat(run(tiny.load(smollm2, torch.bfloat16), prompts, whole)).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.25 * (theirs - exact).abs().mean()

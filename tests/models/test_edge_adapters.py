"""LoRA on embedding and head, and whole saved matrices, against PEFT loading the same folder."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.models.decoder import Decoder
from tests.models import tiny
from tests.models.harness import (
    PagedRunner,
    Row,
    log_probability_gap,
    one_by_one,
    ragged,
    random_prompts,
    whole,
)
from tests.models.peft_adapters import ALL, load_adapters, make_adapters, peft_logits

TOLERANCE = 1e-3
BOTH = ["embed_tokens", "lm_head"]
QV = ["q_proj", "v_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "target_modules": ALL},
    "head": {"r": 4, "target_modules": [*QV, "lm_head"]},
    "embedding": {"r": 20, "target_modules": [*QV, "embed_tokens"]},
    "both, patterns": {
        "r": 8, "target_modules": [*QV, *BOTH], "rank_pattern": {"lm_head": 33},
        "alpha_pattern": {"embed_tokens": 3}, "use_rslora": True,
    },
    "head alone": {"r": 2, "target_modules": ["lm_head"]},
    "saved": {"r": 4, "target_modules": QV, "modules_to_save": BOTH},
    "saved head": {"r": 4, "target_modules": QV, "modules_to_save": ["lm_head"]},
    "saved embedding": {"r": 4, "target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "token rows": {"r": 4, "target_modules": QV, "trainable_token_indices": [9, 3, 210]},
    "rows of both": {
        "r": 4, "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [5, 70], "lm_head": [2, 5, 100]},
    },
    "dora and saved head": {
        "r": 4, "target_modules": ALL, "modules_to_save": ["lm_head"], "use_dora": True,
    },
}  # fmt: skip
SLOTS = [0, *range(1, len(KINDS) + 1), 0, 5, 4, 9]


class Case:
    """A base, one adapter of every kind, a prompt per row, and PEFT's logits."""

    def __init__(self, tied: bool, folder: Path) -> None:
        model = tiny.make_model("llama", seed=6, gain=1.0, tie_word_embeddings=tied)
        self.base_folder = tiny.save_model(model, folder / "base")
        self.decoder = tiny.load(self.base_folder)
        self.folders = make_adapters(model, folder, tuple(KINDS.values()), size=0.6)
        lengths = [random.Random(i).randrange(1, 24) for i in range(len(SLOTS))]
        self.prompts = random_prompts(lengths, tiny.VOCAB, seed=9)
        for prompt in self.prompts:  # tokens whose rows are replaced
            prompt[::3] = [9, 5, 3, 70, 2, 210, 8, 100][: len(prompt[::3])]
        pairs = list(zip(SLOTS, self.prompts, strict=True))
        self.reference = peft_logits(model, self.folders, pairs)
        self.base = peft_logits(model, [], [(0, prompt) for prompt in self.prompts])

    def runner(self, decoder: Decoder | None = None) -> PagedRunner:
        """A runner whose slots hold the adapters, in the order of KINDS."""
        decoder = decoder or self.decoder
        runner = PagedRunner(decoder, num_pages=1500, num_slots=len(KINDS) + 1)
        load_adapters(runner, self.folders, base_folder=self.base_folder)
        return runner

    def gaps(self, rows: list[int], chunker: Any, runner: PagedRunner | None = None) -> list[float]:
        """Differences to PEFT of `rows` computed together."""
        runner = runner or self.runner()
        results = runner.run([Row(self.prompts[i], slot=SLOTS[i]) for i in rows], chunker)
        pairs = zip(results, rows, strict=True)
        return [log_probability_gap(result, self.reference[i]) for result, i in pairs]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize("chunker", [one_by_one, ragged(4)], ids=["one", "ragged"])
def test_all_kinds_in_one_batch_equal_peft(case: Case, chunker: Any) -> None:
    """A-CFG-13, A-CFG-14: every kind beside all others, plain LoRA and the base."""
    found = case.gaps(list(range(len(SLOTS))), chunker)
    assert max(found) < TOLERANCE, dict(zip(SLOTS, found, strict=True))


def test_alone_equals_peft(case: Case) -> None:
    runner = case.runner()
    for row in range(1, len(KINDS) + 1):
        assert case.gaps([row], whole, runner)[0] < TOLERANCE, row


def test_every_kind_matters(case: Case) -> None:
    for slot, base, tuned in zip(SLOTS, case.base, case.reference, strict=True):
        gap = log_probability_gap(base, tuned)
        assert gap < 1e-6 if slot == 0 else gap > 0.1, (slot, gap)


def test_half_precision_is_near(case: Case) -> None:
    """Images in another dtype than the file: read by rows, transposed, rounded once."""
    runner = case.runner(tiny.load(case.base_folder, torch.bfloat16))
    rows = range(len(SLOTS))
    results = runner.run([Row(case.prompts[i], slot=SLOTS[i]) for i in rows], whole)
    for result, reference in zip(results, case.reference, strict=True):
        assert (result.log_softmax(-1) - reference.log_softmax(-1)).abs().mean() < 0.1

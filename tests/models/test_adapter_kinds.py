"""DoRA and biases against PEFT loading the same folder: alone, mixed in one batch, fp32."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

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
PLAIN: dict[str, Any] = {"r": 8, "lora_alpha": 8, "target_modules": ALL}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "dora": {**PLAIN, "use_dora": True},
    "dora attention": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "lora_bias": {**PLAIN, "r": 5, "lora_alpha": 10, "lora_bias": True},
    "bias all": {"r": 16, "target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "bias lora_only": {"r": 2, "target_modules": ["v_proj", "o_proj"], "bias": "lora_only"},
    "dora and bias": {**PLAIN, "r": 20, "use_dora": True, "bias": "all", "use_rslora": True},
    "both biases": {**PLAIN, "bias": "lora_only", "lora_bias": True},
    "dora one layer": {**PLAIN, "use_dora": True, "layers_to_transform": [1], "r": 3},
}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama without biases": ("llama", {}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
SLOTS = [0, *range(1, len(KINDS) + 1), 0, *range(len(KINDS), 0, -1)]


class Case:
    """A base, one adapter of every kind, a prompt per row, and PEFT's logits."""

    def __init__(self, name: str, folder: Path) -> None:
        family, changes = BASES[name]
        model = tiny.make_model(family, seed=6, gain=1.0, **changes)
        self.decoder = tiny.load(tiny.save_model(model, folder / "base"))
        self.folders = make_adapters(model, folder, tuple(KINDS.values()), size=0.6)
        lengths = [random.Random(i).randrange(1, 24) for i in range(len(SLOTS))]
        self.prompts = random_prompts(lengths, tiny.VOCAB, seed=9)
        pairs = list(zip(SLOTS, self.prompts, strict=True))
        self.reference = peft_logits(model, self.folders, pairs)
        self.base = peft_logits(model, [], [(0, prompt) for prompt in self.prompts])

    def runner(self) -> PagedRunner:
        """A runner whose slots hold the adapters, in the order of KINDS."""
        runner = PagedRunner(self.decoder, num_pages=900, num_slots=len(KINDS) + 1)
        load_adapters(runner, self.folders)
        return runner


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("kinds"))


def gaps(
    case: Case, rows: list[int], chunker: Any, runner: PagedRunner | None = None
) -> list[float]:
    """Differences to PEFT of `rows` computed together."""
    runner = runner or case.runner()
    results = runner.run([Row(case.prompts[i], slot=SLOTS[i]) for i in rows], chunker)
    return [log_probability_gap(r, case.reference[i]) for r, i in zip(results, rows, strict=True)]


@pytest.mark.parametrize("chunker", [one_by_one, ragged(4)], ids=["one", "ragged"])
def test_all_kinds_in_one_batch_equal_peft(case: Case, chunker: Any) -> None:
    """A-CFG-11, A-CFG-12: every kind beside all others, plain LoRA and the base."""
    found = gaps(case, list(range(len(SLOTS))), chunker)
    assert max(found) < TOLERANCE, dict(zip(SLOTS, found, strict=True))


def test_each_row_alone_equals_peft(case: Case) -> None:
    runner = case.runner()
    for i in range(len(SLOTS)):
        assert gaps(case, [i], whole, runner)[0] < TOLERANCE, SLOTS[i]


def test_every_kind_matters(case: Case) -> None:
    """Each moves log-probabilities far beyond the tolerance; base rows stay."""
    for slot, base, tuned in zip(SLOTS, case.base, case.reference, strict=True):
        gap = log_probability_gap(base, tuned)
        assert gap < 1e-6 if slot == 0 else gap > 0.1, (slot, gap)


def test_plain_rows_are_bit_equal_beside_the_others(case: Case) -> None:
    """Neither a base row nor a plain LoRA row changes by a bit where DoRA rows are beside it."""
    runner = case.runner()

    def run(*slots: int) -> list[torch.Tensor]:
        rows = [Row(case.prompts[i], slot=slot) for i, slot in enumerate(slots)]
        return runner.run(rows, one_by_one)[:2]

    beside_base, beside_dora = run(0, 1, 0, 0), run(0, 1, 2, 7)
    assert all(torch.equal(a, b) for a, b in zip(beside_base, beside_dora, strict=True))

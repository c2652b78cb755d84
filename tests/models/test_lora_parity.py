"""Adapters against PEFT loading the same folder, alone and mixed in one batch, in fp32."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    StepBuffers,
    chunks_of,
    log_probability_gap,
    one_by_one,
    ragged,
    random_prompts,
    whole,
)
from tests.models.peft_adapters import (
    CONFIGS,
    load_adapters,
    make_adapters,
    peft_logits,
)

TOLERANCE = 1e-3
SLOTS = (0, 1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0, 3, 5, 1)  # 16 rows, three of the base
LENGTHS = (5, 40, 17, 33, 64, 1, 16, 18, 3, 50, 2, 31, 70, 8, 21, 32)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


class Case:
    """A base, five adapters, 16 rows, and PEFT's logits of each row."""

    def __init__(self, family: str, folder: Path) -> None:
        model = tiny.make_model(family, seed=6, **MODELS[family])
        self.decoder = tiny.load(tiny.save_model(model, folder / "base"))
        self.folders = make_adapters(model, folder)
        self.prompts = random_prompts(LENGTHS, tiny.VOCAB, seed=9)
        pairs = list(zip(SLOTS, self.prompts, strict=True))
        self.reference = peft_logits(model, self.folders, pairs)
        self.base = peft_logits(model, [], [(0, prompt) for prompt in self.prompts])

    def runner(self) -> PagedRunner:
        """A runner whose slots 1 to 5 hold the adapters."""
        runner = PagedRunner(self.decoder, num_pages=600)
        load_adapters(runner, self.folders)
        return runner

    def gaps(self, order: list[int], chunker: Chunker) -> list[float]:
        """Differences to PEFT of rows computed together in `order`."""
        rows = [Row(self.prompts[i], slot=SLOTS[i]) for i in order]
        results = self.runner().run(rows, chunker)
        return [
            log_probability_gap(logits, self.reference[i])
            for i, logits in zip(order, results, strict=True)
        ]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    "chunker",
    [whole, chunks_of(16), chunks_of(9), one_by_one, ragged(2)],
    ids=["whole", "chunks of 16", "chunks of 9", "decode", "ragged"],
)
def test_one_batch_of_16_rows_equals_peft(case: Case, chunker: Chunker) -> None:
    """A-OUT-04, A-OUT-05, A-OUT-07, A-CFG-08, A-CFG-09, A-CFG-10, A-CFG-25, A-CFG-27.

    Base rows and five adapters (one with q and v only, one with patterns, one with rsLoRA, ranks
    4 to 64, one on a single layer) in one batch; each row as PEFT computes it.
    """
    gaps = case.gaps(list(range(16)), chunker)
    assert max(gaps) < TOLERANCE, gaps


@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_chunking(case: Case, seed: int) -> None:
    """Shuffled rows, ragged pieces, rows that pause."""
    order = list(range(16))
    random.Random(seed).shuffle(order)
    gaps = case.gaps(order, ragged(seed, most=30))
    assert max(gaps) < TOLERANCE, gaps


@pytest.mark.parametrize("shape", [(8, 0, 0), (12, 0, 0), (8, 4, 140)], ids=str)
def test_padding_of_a_fixed_step_changes_nothing(case: Case, shape: tuple[int, int, int]) -> None:
    """Spare decode rows, spare chunks and spare tokens beside rows of the base and of adapters."""
    runner = case.runner()
    rows = [Row(p, slot=s) for p, s in zip(case.prompts, SLOTS, strict=True)]
    runner.step([(row, row.left) for row in rows])
    buffers = StepBuffers(runner, *shape)
    for decodes in ([0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10], [11]):
        chunks = [(12, 70), (14, 9), (15, 32)][: shape[1] and len(decodes)]
        last = buffers.fill([rows[i] for i in decodes], [(rows[i], n) for i, n in chunks])
        logits = buffers.run()
        for at, i in zip(last, [*decodes, *(i for i, _ in chunks)], strict=True):
            assert log_probability_gap(logits[at : at + 1], case.reference[i][-1:]) < TOLERANCE


def test_each_row_alone_equals_peft(case: Case) -> None:
    """No row depends on its neighbours."""
    for i in range(16):
        assert case.gaps([i], whole)[0] < TOLERANCE


def test_adapters_matter(case: Case) -> None:
    """Each adapter moves log-probabilities far beyond the tolerance; base rows do not move."""
    for slot, base, tuned in zip(SLOTS, case.base, case.reference, strict=True):
        gap = log_probability_gap(base, tuned)
        assert gap < 1e-6 if slot == 0 else gap > 0.2, (slot, gap)


def test_a_base_batch_launches_no_adapter_work(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-PERF-02: with adapters loaded but only base rows, add_lora is not even called."""
    runner = case.runner()

    def unexpected(*args: object) -> None:
        raise AssertionError("add_lora was called")

    monkeypatch.setattr("multilora_cli.layers.linear.add_lora", unexpected)
    logits = runner.run([Row(case.prompts[12])])[0]
    assert log_probability_gap(logits, case.reference[12]) < TOLERANCE
    with pytest.raises(AssertionError, match="add_lora was called"):
        runner.run([Row(case.prompts[12], slot=1)])


def test_slots_can_be_reused(case: Case) -> None:
    """A-OUT-03: adapters swapped between slots, pages given back and reused, the same answers."""
    runner = case.runner()
    for slot in (1, 2, 3, 4, 5):
        runner.table.clear(slot)
    runner.table.flush()
    load_adapters(runner, case.folders[::-1])
    rows = [
        Row(prompt, slot=6 - slot if slot else 0)
        for slot, prompt in zip(SLOTS, case.prompts, strict=True)
    ]
    results = runner.run(rows, ragged(3))
    gaps = [log_probability_gap(*pair) for pair in zip(results, case.reference, strict=True)]
    assert max(gaps) < TOLERANCE, gaps


def test_every_decode_step_uses_the_adapter(case: Case) -> None:
    """A-OUT-06: token by token for 64 steps, each position's log-probabilities as PEFT's."""
    row = LENGTHS.index(64)
    assert SLOTS[row] != 0
    assert case.gaps([row], one_by_one)[0] < TOLERANCE


def test_base_rows_are_bit_equal_whatever_is_loaded(case: Case) -> None:
    """A-OUT-10: no adapter, one and five hot, and base rows beside adapter rows."""
    base = case.prompts[6]
    plain = PagedRunner(case.decoder, num_pages=600).run([Row(base)], chunks_of(16))[0]
    for count in (1, 5):
        runner = PagedRunner(case.decoder, num_pages=600)
        load_adapters(runner, case.folders[:count])
        assert torch.equal(runner.run([Row(base)], chunks_of(16))[0], plain)


def test_the_base_is_never_written_to(case: Case) -> None:
    """A-OUT-11: every base weight is bit for bit what it was, after mixed adapter traffic."""
    before = {name: tensor.clone() for name, tensor in case.decoder.tensors.items()}
    case.gaps(list(range(16)), ragged(8))
    assert all(torch.equal(case.decoder.tensors[name], before[name]) for name in before)


def test_long_prompts_with_adapters(tmp_path: Path) -> None:
    """A-OUT-08: 4,000 of 4,096 positions in chunks of 512 equal PEFT, base and adapter alike."""
    model = tiny.make_model("llama", seed=6, max_position_embeddings=4096, num_hidden_layers=2)
    folders = make_adapters(model, tmp_path, CONFIGS[:2])
    prompt = random_prompts([4000], tiny.VOCAB, seed=3)[0]
    pairs = [(0, prompt), (1, prompt), (2, prompt)]
    runner = PagedRunner(tiny.load(tiny.save_model(model, tmp_path / "base")), num_pages=800)
    load_adapters(runner, folders)
    results = runner.run([Row(tokens, slot=slot) for slot, tokens in pairs], chunks_of(512))
    for ours, theirs in zip(results, peft_logits(model, folders, pairs), strict=True):
        assert log_probability_gap(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_fp32_as_peft(tmp_path: Path, dtype: torch.dtype) -> None:
    """Scaling is folded into B and rounded once; the mean gap to fp32 is that of PEFT."""
    model = tiny.make_model("llama", seed=6)
    folders = make_adapters(model, tmp_path)
    prompts = list(zip(SLOTS, random_prompts(LENGTHS, tiny.VOCAB, seed=9), strict=True))
    exact = torch.cat(peft_logits(model, folders, prompts)).log_softmax(-1)
    theirs = torch.cat(peft_logits(model.to(dtype), folders, prompts)).log_softmax(-1)
    decoder = tiny.load(tiny.save_model(model, tmp_path / "base"), dtype)
    runner = PagedRunner(decoder, num_pages=600)
    load_adapters(runner, folders)
    ours = torch.cat(runner.run([Row(prompt, slot=slot) for slot, prompt in prompts]))
    gap = (ours.log_softmax(-1) - exact).abs().mean()
    assert gap < 1.25 * (theirs - exact).abs().mean()


def test_the_configs_span_what_is_promised() -> None:
    """Five adapters, ranks from 4 to 64, all seven modules."""
    assert len(CONFIGS) == 5 and {config["r"] for config in CONFIGS} >= {4, 64}
    assert len(set(SLOTS)) == 6 and len(SLOTS) == 16

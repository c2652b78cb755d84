"""The decoder, its adapters, the loader and the sampler on a CUDA device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.layers.sampler import SamplingBatch, sample
from multilora_kernels.paged_attention import AttentionBatch
from multilora_kernels.segments import Segments
from tests.layers.test_sampler import random_rows
from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    chunks_of,
    one_by_one,
    ragged,
    random_prompts,
    whole,
)
from tests.models.peft_adapters import load_adapters, make_adapters, peft_logits

pytestmark = pytest.mark.gpu

# Largest mean difference of log-probabilities to transformers in fp32 on the CPU.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
SCHEDULES: dict[str, Chunker] = {
    "whole": whole,
    "chunks of 16": chunks_of(16),
    "decode": one_by_one,
    "ragged": ragged(3),
}
SLOTS = (0, 1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0, 3, 5, 1)
LENGTHS = (5, 40, 17, 33, 64, 1, 16, 18, 3, 50, 2, 31, 70, 8, 21, 32)
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {},
}


class Case:
    """A base with five adapters and PEFT's logits of 16 rows."""

    def __init__(self, family: str, folder: Path) -> None:
        model = tiny.make_model(family, seed=6, gain=0.8, **SHAPE, **MODELS[family])
        self.base = tiny.save_model(model, folder / "base")
        self.adapters = make_adapters(model, folder, size=0.5)
        self.prompts = random_prompts(LENGTHS, tiny.VOCAB, seed=9)
        pairs = list(zip(SLOTS, self.prompts, strict=True))
        self.expected = torch.cat(peft_logits(model, self.adapters, pairs)).log_softmax(-1)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("chunker", SCHEDULES.values(), ids=SCHEDULES)
def test_equals_peft(case: Case, dtype: torch.dtype, chunker: Chunker) -> None:
    """Base rows and five adapters of ranks 4 to 64 in one batch."""
    runner = PagedRunner(tiny.load(case.base, dtype, "cuda"), num_pages=900)
    load_adapters(runner, case.adapters)
    rows = [Row(p, slot=s) for p, s in zip(case.prompts, SLOTS, strict=True)]
    ours = torch.cat(runner.run(rows, chunker)).cpu().log_softmax(-1)
    assert bool(ours.isfinite().all())
    gap = (ours - case.expected).abs()
    assert float(gap.mean()) < TOLERANCES[dtype]
    if dtype == torch.float32:
        assert float(gap.max()) < 1e-3


class DecodeBuffers:
    """A decode step of `size` rows in fixed memory, as a captured graph needs it."""

    def __init__(self, runner: PagedRunner, size: int, max_pages: int) -> None:
        self.runner, self.size, device = runner, size, runner.pool.device
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.segments = Segments(size, device, max_rank=64)
        seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.context = StepContext(
            pool=runner.pool,
            slot_mapping=torch.full_like(self.token_ids, -1),
            attention=AttentionBatch(
                query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
                seq_lens=seq_lens,
                page_table=torch.zeros(size, max_pages, dtype=torch.int32, device=device),
                num_decodes=size,
                max_query_len=1,
                max_seq_len=max_pages * 16,
            ),
            table=runner.table,
            segments=self.segments,
        )

    def fill(self, rows: list[Row]) -> None:
        """The last token of every row; what is left of the buffers is padding."""
        attention, padding = self.context.attention, self.size - len(rows)
        last = [len(row.tokens) - 1 for row in rows]
        places = [row.pages[at // 16] * 16 + at % 16 for row, at in zip(rows, last, strict=True)]
        self.token_ids.copy_(torch.tensor([row.tokens[-1] for row in rows] + [0] * padding))
        self.positions.copy_(torch.tensor(last + [0] * padding))
        self.context.slot_mapping.copy_(torch.tensor(places + [-1] * padding))
        attention.seq_lens.copy_(torch.tensor([at + 1 for at in last] + [0] * padding))
        for index, row in enumerate(rows):
            attention.page_table[index, : len(row.pages)] = torch.tensor(row.pages)
        self.segments.build([row.slot for row in rows] + [0] * padding)

    def run(self) -> torch.Tensor:
        """Logits [size, vocab]."""
        decoder = self.runner.decoder
        return decoder.logits(decoder.forward(self.token_ids, self.positions, self.context))


@pytest.mark.parametrize("size", [1, 8])
def test_a_captured_step_replays_for_other_rows(case: Case, size: int) -> None:
    """Other tokens, lengths, pages and adapters, and rows of padding: the eager step's bits."""
    runner = PagedRunner(tiny.load(case.base, torch.bfloat16, "cuda"), num_pages=900)
    load_adapters(runner, case.adapters)
    rows = [Row(p, slot=s) for p, s in zip(case.prompts, SLOTS, strict=True)]
    runner.step([(row, row.left) for row in rows])
    buffers = DecodeBuffers(runner, size, max_pages=8)
    buffers.fill(rows[:size])
    buffers.run()  # compiles, and allocates what a capture must not
    buffers.segments.prepare_capture(runner.table, size, rank=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = buffers.run()
    for start, count in ((0, size), (size, size), (5, max(1, size - 3)), (0, size)):
        buffers.fill(rows[start : start + count])
        graph.replay()
        replayed = logits[:count].clone()
        assert torch.equal(replayed, buffers.run()[:count])
        ends = torch.tensor([len(p) for p in case.prompts]).cumsum(0) - 1
        expected = case.expected[ends[start : start + count]]
        gap = (replayed.cpu().log_softmax(-1) - expected).abs().mean()
        assert float(gap) < 2 * TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_loads_bit_by_bit(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through page-locked buffers far smaller than a tensor: the same bits as on the CPU."""
    monkeypatch.setattr("multilora_cli.models.tensor_reader._BUFFER_BYTES", 4000)
    monkeypatch.setattr("multilora_cli.models.tensor_reader._SLICE_BYTES", 500)
    expected = tiny.load(case.base, dtype).tensors
    for name, tensor in tiny.load(case.base, dtype, "cuda").tensors.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_samples_the_same_tokens_as_the_cpu() -> None:
    """Noise, cuts and penalties are functions of the row: at most rounding may differ."""
    rows = random_rows(13, 400)
    logits = torch.randn(400, 97, generator=torch.Generator().manual_seed(1)) * 3
    here = sample(logits, SamplingBatch.build(rows, 97, torch.device("cpu")))
    there = sample(logits.cuda(), SamplingBatch.build(rows, 97, torch.device("cuda")))
    assert int((here.token_ids != there.token_ids.cpu()).sum()) <= 2
    assert bool(there.finite.all())
    assert here.logprobs is not None and there.logprobs is not None
    assert torch.allclose(here.logprobs.top, there.logprobs.top.cpu(), atol=1e-4)

"""The decoder, its adapters, the loader and the sampler on a CUDA device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.layers.sampler import SamplingBatch, sample
from tests.layers.test_sampler import random_rows
from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    StepBuffers,
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


@pytest.mark.parametrize("shape", [(1, 0, 0), (8, 0, 0), (4, 3, 100)], ids=str)
def test_a_captured_step_replays_for_other_rows(case: Case, shape: tuple[int, int, int]) -> None:
    """Other tokens, lengths, pages, adapters and padding, in decode steps and mixed ones."""
    decodes, chunks, chunk_tokens = shape
    runner = PagedRunner(tiny.load(case.base, torch.bfloat16, "cuda"), num_pages=900)
    load_adapters(runner, case.adapters)
    rows = [Row(p, slot=s) for p, s in zip(case.prompts, SLOTS, strict=True)]
    runner.step([(row, row.left) for row in rows])
    ends = torch.tensor([len(p) for p in case.prompts]).cumsum(0) - 1
    buffers = StepBuffers(runner, *shape)
    buffers.fill(rows[:decodes])
    buffers.segments.prepare_capture(runner.table, decodes + chunk_tokens, rank=64)
    buffers.run()  # compiles, and allocates what a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = buffers.run()
    for start, used in ((0, decodes), (4, decodes), (3, max(1, decodes - 3)), (0, decodes)):
        chunked = rows[12 : 12 + chunks][: chunks - start % 2]
        work = [(row, min(len(row.tokens), 2 + 11 * start)) for row in chunked]
        last = buffers.fill(rows[start : start + used], work)
        graph.replay()
        replayed = logits[last].clone()
        assert torch.equal(replayed, buffers.run()[last])
        members = [*range(start, start + used), *range(12, 12 + len(chunked))]
        gap = (replayed.cpu().log_softmax(-1) - case.expected[ends[members]]).abs().mean()
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
    assert bool((there.told >= 0).all())
    assert here.logprobs is not None and there.logprobs is not None
    assert torch.allclose(here.logprobs.top, there.logprobs.top.cpu(), atol=1e-4)

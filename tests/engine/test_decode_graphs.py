"""Captured decode steps without a device: the same inputs, layout and padding, run eagerly."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton

from multilora_cli.engine.decode_graphs import DecodeGraphs
from multilora_cli.engine.prompt_graphs import PromptGraphs
from multilora_cli.sizing.budget import PromptStep
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig


class Repeated:
    """Does the recorded work again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.replays = 0

    def replay(self) -> None:
        """As a graph does."""
        with torch.inference_mode():
            self.work()
        self.replays += 1


def with_graphs(
    rig: Rig,
    row_counts: tuple[int, ...],
    max_rank: int = 64,
    prompts: tuple[PromptStep, ...] = (),
) -> list[Repeated]:
    """Let `rig` run its decode steps from recorded ones, and those with prompts that fit."""
    recorded: list[Repeated] = []

    def record(work: Callable[[], None]) -> Repeated:
        recorded.append(Repeated(work))
        return recorded[-1]

    runner, parts = rig.engine.parts.runner, rig.engine.parts
    builder = runner._builder
    segments = builder.segments
    if triton.knobs.runtime.interpret:
        builder.table.settle(parts.pool.page_bytes, runner._decoder.dtype.itemsize)
        segments.reserve(builder.table)
    else:  # what it sizes are kernel launches, and without a device there are none
        segments.prepare_capture = lambda table, rows, rank, **sizes: segments.build(
            np.zeros(rows, np.int32)
        )
    graphs = DecodeGraphs(runner._decoder, builder, row_counts, parts.max_model_len, max_rank)
    graphs.record_all(record, lambda done, total: None)
    runner._graphs = graphs
    if prompts:
        chunks = PromptGraphs(runner._decoder, builder, prompts, parts.max_model_len, max_rank)
        chunks.record_all(record, lambda done, total: None)
        runner._prompt_graphs = chunks
    return recorded


PROMPTS = (PromptStep(2, 16), PromptStep(4, 64))


@pytest.mark.parametrize("prompts", [(), PROMPTS])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_recorded_steps_give_the_same_answers(
    fleet: SignatureFleet, steps_ahead: int, prompts: tuple[PromptStep, ...]
) -> None:
    signatures = [None, 0, 20, 95, 96, 150, 191]
    rig = Rig(fleet.base, steps_ahead=steps_ahead, max_chunk_beside_decode=20)
    recorded = with_graphs(rig, (1, 2, 4, 8), prompts=prompts)
    for k in signatures[1:]:  # loads take as long as they take: none comes between the steps
        rig.ask([1], fleet.adapter(k), max_tokens=1)
    requests = {}
    for i in range(12):  # more than the largest recorded step, and then fewer and fewer
        k = signatures[i % len(signatures)]
        adapter = None if k is None else fleet.adapter(k)
        requests[rig.submit([i] * (1 + 3 * i), adapter, max_tokens=5 + 3 * i)] = (k, i)
        rig.step()
    rig.run()
    for request, (k, i) in requests.items():
        count = 5 + 3 * i
        want = [i + 1 + j for j in range(count)] if k is None else [k + 1] * count
        assert rig.answer(request).tokens == want, (k, i)
    assert sum(work.replays > 0 for work in recorded) >= 4, "hardly any step was a recorded one"
    with_prompts = recorded[3 * 4 :]
    assert len(with_prompts) == 3 * len(prompts)
    assert sum(work.replays for work in with_prompts) >= 4 * bool(prompts)


def test_several_answers_and_prompt_logprobs_beside_recorded_steps(fleet: SignatureFleet) -> None:
    plain, graphed = Rig(fleet.base, steps_ahead=0), Rig(fleet.base)
    with_graphs(graphed, (1, 2, 4, 8, 16), prompts=(PromptStep(8, 64),))
    wanted = []
    for rig in (plain, graphed):
        how = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 2, "max_tokens": 20}
        several = rig.submit([3] * 16, fleet.adapter(20), n=5, **how)
        prompt = rig.submit([4] * 33, prompt_logprobs=1, max_tokens=9)
        said = rig.submit([5] * 3, presence_penalty=1.5, repetition_penalty=1.3, max_tokens=20)
        rig.run()
        wanted.append(
            [rig.answer(several, index) for index in range(5)]
            + [rig.answer(prompt), rig.answer(said)]
        )
    for one, other in zip(*wanted, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert [entry.token_id for entry in one.logprobs] == [
            entry.token_id for entry in other.logprobs
        ]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_a_page_that_was_exchanged_for_a_cached_one_is_read_no_more(fleet: SignatureFleet) -> None:
    """Equal answers side by side: the second goes on with the first one's blocks, its own are
    freed, and in this rig a freed page holds NaN."""
    rig = Rig(fleet.base, prefix_caching=True)
    with_graphs(rig, (1, 2, 4))
    requests = [rig.submit([9] * 20, fleet.adapter(30), max_tokens=60) for _ in range(3)]
    rig.run()
    assert [rig.answer(request).tokens for request in requests] == [[31] * 60] * 3


def test_a_fault_in_a_recorded_step_ends_its_own_request(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, failpoints={"forward:2": "raise@4+"})
    with_graphs(rig, (1, 2, 4))
    requests = [rig.submit([i] * 4, fleet.adapter(20 + i), max_tokens=12) for i in range(4)]
    rig.run()
    for index, request in enumerate(requests):
        answer = rig.answer(request)
        if request == 2:
            assert answer.fault is not None and answer.fault.code == "internal_error"
        else:
            assert answer.tokens == [21 + index] * 12

"""What only shows one step ahead: tokens, slots and rows of a step that has not ended."""

import pytest
import torch

from multilora_cli.engine.sequence import Status
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig
from tests.engine.test_decode_graphs import with_graphs


def sequence_of(rig: Rig, request: int) -> object:
    return next(s for s in rig.engine.parts.scheduler.sequences() if s.request_id == request)


@pytest.mark.parametrize("graphed", [False, True])
def test_halves_of_a_step_read_the_tokens_of_the_step_before(
    fleet: SignatureFleet, graphed: bool
) -> None:
    """An older sequence whose adapter came late takes the first place of the next step. That step
    fails as a whole, and what its first half samples must not be taken for the second's input."""
    rig = Rig(fleet.base)
    if graphed:
        with_graphs(rig, (1, 2, 4))
    older = rig.submit([50] * 3, fleet.adapter(150), max_tokens=30)
    first, second = rig.submit([3], max_tokens=60), rig.submit([40], max_tokens=60)
    while not (waits := sequence_of(rig, older)).num_pending:
        rig.step()
    assert waits.status is Status.RUNNING and waits.pending_at == 2, "it came after the others"
    rig.engine.parts.failpoints.arm({f"forward:{second}": "raise"})
    rig.run()
    assert rig.answer(first).tokens == list(range(4, 64))
    assert rig.answer(older).tokens == [151] * 30
    assert rig.answer(second).fault is not None


def test_a_pass_that_fails_after_it_sampled_leaves_no_token(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(fleet.base)
    decoding = rig.submit([3], max_tokens=60)
    for _ in range(4):
        rig.step()
    runner = rig.engine.parts.runner
    taken = runner._prompt_logprobs

    def out_of_memory(row: object, hidden: torch.Tensor, last: int) -> object:
        if len(hidden) > 20:  # the whole step; the row alone has room
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taken(row, hidden, last)

    monkeypatch.setattr(runner, "_prompt_logprobs", out_of_memory)
    asked = rig.submit(range(20), prompt_logprobs=1, max_tokens=5)
    rig.run()
    assert rig.answer(decoding).tokens == list(range(4, 64))
    assert rig.answer(asked).tokens == list(range(20, 25))


def test_a_resumed_answer_goes_on_by_a_chunk_of_one_token(fleet: SignatureFleet) -> None:
    """Preempted after it had answered, it is computed again in chunks; what is left of a step's
    budget can be a single token in the middle of them."""
    rig = Rig(fleet.base, prefix_caching=False, steps_ahead=0)
    request = rig.submit([3], max_tokens=60)
    for _ in range(40):
        rig.step()
    scheduler = rig.engine.parts.scheduler
    scheduler._preempt(sequence_of(rig, request))
    row_of, chunks = scheduler._row, iter([7, 1])
    scheduler._row = lambda sequence, length: row_of(sequence, next(chunks, length))
    rig.run()
    assert rig.answer(request).fault is None
    assert rig.answer(request).tokens == list(range(4, 64))


@pytest.mark.parametrize("coming", [1, 4])
def test_one_adapter_leaves_for_one_that_comes(fleet: SignatureFleet, coming: int) -> None:
    """Its slot, like its pages, is free once the step under way has ended: until then no other
    has to leave. Several that come do not wait for one another."""
    rig = Rig(fleet.base, num_slots=9, prefix_caching=False)
    for k in range(20, 28):
        rig.ask([k], fleet.adapter(k), max_tokens=1)
    for k in range(40, 40 + coming):
        loaded = rig.load(fleet.adapter(k))
        for _ in rig.steps_until(loaded):
            pass
    running = rig.submit([3], max_tokens=80)
    for _ in range(5):
        rig.step()
    assert rig.engine._under_way
    requests = [rig.submit([5], fleet.adapter(k), max_tokens=3) for k in range(40, 40 + coming)]
    for _ in range(6):
        rig.step()
    for k, request in enumerate(requests):
        assert rig.answer(request).tokens == [41 + k] * 3
    assert rig.counters()["adapter_evictions"] == coming
    rig.run()
    assert rig.answer(running).tokens == list(range(4, 84))

"""Answers on a device that does everything as late as it may are those of one that does not."""

import random

import pytest
import torch

from multilora_cli.adapters.hot_tier import Placement
from multilora_cli.engine.messages import Abort
from multilora_cli.sizing.budget import PromptStep
from multilora_kernels.staging import Staging
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import F2_PAGE, Answer, Rig
from tests.engine.late_device import LateCopier, LateDevice
from tests.engine.test_decode_graphs import with_graphs

PROMPTS = (PromptStep(4, 64),)
SIGNATURES = (None, 0, 20, 95, 150, 191)


def mixed_traffic(rig: Rig, fleet: SignatureFleet) -> dict[int, list[Answer]]:
    """Adapters over too few slots, preemptions, several answers, penalties, aborts."""
    choose, counts = random.Random(3), {}
    for i in range(24):
        k = SIGNATURES[choose.randrange(6)]
        adapter = None if k is None else fleet.adapter(k)
        prompt = [choose.randrange(90)] * choose.randrange(1, 40)
        n = 1 + 2 * (i % 5 == 4)
        how: dict[str, object] = {"max_tokens": choose.randrange(1, 40)}
        if i % 3 == 2:
            how |= {"temperature": 1.5, "seed": i, "logprobs": 1, "presence_penalty": 0.4}
        if i % 4 == 3:
            how |= {
                "temperature": 1.1,
                "seed": i,
                "top_p": 0.9,
                "min_p": 0.01,
                "top_k": 40 * (i % 8),
            }
        if i % 7 == 6:
            how |= {"repetition_penalty": 1.4, "min_tokens": 3, "prompt_logprobs": 1}
        counts[rig.submit(prompt, adapter, n=n, **how)] = n
        for _ in range(choose.randrange(3)):
            rig.step()
        if i in (9, 15):
            rig.engine.handle(Abort(i - 2))
    rig.run()
    return {
        request: [rig.answer(request, index) for index in range(n)] for request, n in counts.items()
    }


@pytest.mark.parametrize("graphed", [False, True])
def test_mixed_traffic(
    fleet: SignatureFleet, graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"num_slots": 4, "pages": 26, "max_num_seqs": 8, "max_chunk_beside_decode": 48}
    wanted = mixed_traffic(Rig(fleet.base, steps_ahead=0), fleet)
    rig = Rig(fleet.base, **small)
    if graphed:
        with_graphs(rig, (1, 2, 4, 8), prompts=PROMPTS)
    device = LateDevice(rig, monkeypatch)
    found = mixed_traffic(rig, fleet)
    assert rig.counters()["preemptions"] > 0 and rig.counters()["adapter_evictions"] > 0
    assert device.told > 1000
    for request, answers in wanted.items():
        for one, other in zip(answers, found[request], strict=True):
            if one.finish == "abort" or other.finish == "abort":
                continue
            assert other.fault is None and other.tokens == one.tokens, request
            assert [e.token_id for e in other.logprobs] == [e.token_id for e in one.logprobs]


def test_steps_begin_behind_copies_whose_images_stay_until_then(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two of the five images in host memory, and for three on the device."""
    wanted = mixed_traffic(Rig(fleet.base, steps_ahead=0), fleet)
    small = {"num_slots": 4, "pages": 26, "max_num_seqs": 8, "max_chunk_beside_decode": 48}
    rig = Rig(fleet.base, **small, host_adapter_bytes=2 * F2_PAGE)
    copier = LateCopier(rig, LateDevice(rig, monkeypatch), monkeypatch)
    found = mixed_traffic(rig, fleet)
    assert copier.ordered > 1 and rig.engine.parts.residency._warm.evictions > 1
    for request, answers in wanted.items():
        for one, other in zip(answers, found[request], strict=True):
            if "abort" not in (one.finish, other.finish):
                assert other.fault is None and other.tokens == one.tokens, request


def test_an_image_that_leaves_before_it_is_copied_shows(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a late copier is for: without the hold on an image that a step waits for, the next one
    takes its memory first."""
    rig = Rig(fleet.base, host_adapter_bytes=3 * F2_PAGE)
    LateCopier(rig, LateDevice(rig, monkeypatch), monkeypatch)
    residency = rig.engine.parts.residency
    enter = residency._hot.enter

    def too_early(placement: Placement) -> bool:
        is_hot = enter(placement)
        if is_hot:
            (entry,) = (e for e in residency._placed.values() if e.placement is placement)
            residency._holds.release(entry)
            residency._warm.drop(entry.digest)
        return is_hot

    monkeypatch.setattr(residency._hot, "enter", too_early)
    assert rig.ask([5], fleet.adapter(20), max_tokens=4).fault is not None


def test_a_pinned_buffer_that_is_filled_too_early_shows(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this device is for: without the wait for its last copy, a buffer's next step shows in
    the step that has not read it yet."""

    def run() -> list[int]:
        rig = Rig(fleet.base)
        with_graphs(rig, (1, 2))
        with monkeypatch.context() as patch:
            LateDevice(rig, patch)
            request = rig.submit([3], max_tokens=30)
            rig.run()
            return rig.answer(request).tokens

    assert run() == list(range(4, 34))
    pinned = Staging._pinned

    def in_a_hurry(staging: Staging, num_bytes: int) -> torch.Tensor:
        staging._turn = 0
        staging._copied = [None, None]
        return pinned(staging, num_bytes)

    monkeypatch.setattr(Staging, "_pinned", in_a_hurry)
    assert run() != list(range(4, 34))

"""The engine on a CUDA device: the same answers, loads beside running steps, memory as planned."""

from dataclasses import dataclass

import pytest
import torch

from multilora_cli.engine.batch_plan import ScheduledBatch
from multilora_cli.engine.page_copier import PageCopier
from multilora_kernels.layout import ImagePlan
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig

pytestmark = pytest.mark.gpu

PROMPT = list(range(5, 65))


@pytest.mark.parametrize("capture_prompts", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mixed_batch_on_the_device(
    fleet: SignatureFleet, dtype: str, capture_prompts: bool
) -> None:
    rig = Rig(
        fleet.base, device="cuda:0", dtype=dtype, max_num_batched_tokens=96,
        capture_prompts=capture_prompts,
    )  # fmt: skip
    signatures = [None, 0, 20, 95, 96, 150, 191, None]
    requests = {}
    for i in range(32):
        k = signatures[i % 8]
        prompt = list(range(i, i + 8 + 3 * i))
        request = rig.submit(prompt, None if k is None else fleet.adapter(k), max_tokens=25)
        requests[request] = (k, prompt[-1])
    rig.run()
    for request, (k, last) in requests.items():
        want = [last + 1 + j for j in range(25)] if k is None else [k + 1] * 25
        assert rig.answer(request).tokens == want, (k, last)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_steps_run_on_the_card_that_is_named(fleet: SignatureFleet) -> None:
    before, held = torch.cuda.current_device(), torch.cuda.memory_allocated(0)
    try:
        rig = Rig(fleet.base, device="cuda:1")
        requests = {rig.submit(PROMPT, fleet.adapter(k), max_tokens=6): k for k in (20, 95, 150)}
        rig.run()
        for request, k in requests.items():
            assert rig.answer(request).tokens == [k + 1] * 6
        assert torch.cuda.memory_allocated(0) == held
    finally:
        torch.cuda.set_device(before)


def test_adapters_come_and_go_beside_running_steps(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, device="cuda:0", num_slots=4, pages=64)
    requests = {}
    for i in range(120):
        k = 20 + i % 12
        requests[rig.submit(PROMPT[: 5 + i % 40], fleet.adapter(k), max_tokens=6)] = k
        rig.step()
        if i % 7 == 0:
            rig.evict(fleet.adapter(20 + i % 12).digest, to="cold", purge_cache=True)
    rig.run()
    for request, k in requests.items():
        assert rig.answer(request).tokens == [k + 1] * 6
    assert rig.owned_pages() == 0 and rig.references() == 0


@dataclass(frozen=True)
class _Image:
    pages: torch.Tensor
    plan: ImagePlan | None = None


def test_a_step_behind_a_copy_reads_what_was_copied() -> None:
    """Launched while a copy of 256 MiB is under way, which the host does not wait for."""
    size, count = 2**21, 128
    images = [torch.full((count, size), value, dtype=torch.uint8).pin_memory() for value in (7, 9)]
    pool = torch.zeros(2 * count, size, dtype=torch.uint8, device="cuda:0")
    copier = PageCopier(pool)
    pool[1::2].amin(1)  # compiled and loaded
    torch.cuda.synchronize()
    pages = list(range(1, 2 * count, 2))
    copies = [copier.start(_Image(image), pages) for image in images]
    was_done = copies[1].done()
    assert copies[1].order()
    read = pool[1::2].amin(1)
    assert not was_done and not copies[1].done(), "the copy was done before the step was launched"
    assert read.tolist() == [9] * count and copies[1].done()
    assert int(pool[0].max()) == 0


def test_workspace_stays_within_the_plan(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, device="cuda:0", max_num_batched_tokens=4096, max_num_seqs=64,
              pages=1024, max_model_len=1024)  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for i in range(64):
        rig.submit([i] * 60, fleet.adapter(i % 16), max_tokens=4)
    rig.run()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= rig.engine.parts.ready.planned["workspace"]


def test_a_launch_waits_for_nothing(fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step ahead only while no launch looks at the device: prompts, penalties, truncation,
    several answers and log-probabilities do not."""
    rig = Rig(fleet.base, device="cuda:0", max_num_batched_tokens=96)
    rig.ask(PROMPT, fleet.adapter(20))  # what is allocated and compiled once
    runner = rig.engine.parts.runner
    launch = runner.launch

    def watched(batch: ScheduledBatch) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner, "launch", watched)
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5}
    cuts = [{"top_p": 0.9}, {"top_k": 2000}, {"min_p": 0.05}, {"top_p": 0.95, "min_p": 0.1}, {}]
    requests = [
        *(rig.submit([6, i], temperature=1.2, max_tokens=20, **cut) for i, cut in enumerate(cuts)),
        rig.submit([9], min_tokens=5, stop_token_ids=[11], max_tokens=20),
        rig.submit(PROMPT, fleet.adapter(150), max_tokens=20),
        rig.submit([3] * 20, n=3, max_tokens=20, **drawn),
        rig.submit([4], presence_penalty=0.5, repetition_penalty=1.2, max_tokens=20),
        rig.submit([5] * 20, prompt_logprobs=1, logprobs=2, max_tokens=20, logit_bias={7: 1.0}),
    ]
    rig.run()
    assert [rig.answer(request).fault for request in requests] == [None] * len(requests)

"""One request's fault ends that request: exceptions, NaN, bad input, limits, drain."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.messages import Drain, SamplingParams, Submit
from multilora_cli.errors import BadInput
from multilora_cli.memory.page_pool import PageUse
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig, adapter_ref

PROMPT = list(range(5, 25))
REQUESTS, STEPS = 20, 20


@pytest.fixture(scope="module")
def rig(fleet: SignatureFleet) -> Rig:
    """One engine for the whole grid: what a fault leaves behind shows in the next round.

    Every prompt fits into the first step, so a request's n-th step is its n-th token.
    """
    return Rig(fleet.base, prefix_caching=False, max_num_batched_tokens=512)


def grid(every: int) -> Iterator[tuple[int, int, str]]:
    """(request, step, place) of one point in `every`; places alternate."""
    points = [(k, s) for k in range(REQUESTS) for s in range(STEPS)]
    random.Random(27).shuffle(points)
    for index, (request, step) in enumerate(points[::every]):
        yield request, step, ("row", "forward", "logits")[index % 3]


def run_grid(rig: Rig, fleet: SignatureFleet, every: int) -> None:
    signatures = [None, 0, 20, 95, 150]
    for victim, step, place in grid(every):
        first = rig._last_id + 1
        verb = "nan" if place == "logits" else "raise"
        when = f"@{step + 1}+" if place == "forward" else f"@{step + 1}"
        rig.engine.parts.failpoints.arm({f"{place}:{first + victim}": verb + when})
        requests = []
        for i in range(REQUESTS):
            k = signatures[i % 5]
            ref = None if k is None else fleet.adapter(k)
            requests.append((rig.submit(PROMPT, ref, max_tokens=STEPS), k))
        rig.run()
        for i, (request, k) in enumerate(requests):
            answer = rig.answer(request)
            text = [PROMPT[-1] + 1 + j if k is None else k + 1 for j in range(STEPS)]
            if i == victim:
                assert answer.fault is not None and answer.fault.code == "internal_error"
                assert answer.tokens == text[:step], (victim, step, place)
            else:
                assert answer.tokens == text, (victim, step, place, i)
        assert rig.owned_pages() == 0 and rig.references() == 0


def test_g27_only_the_chosen_request_fails(rig: Rig, fleet: SignatureFleet) -> None:
    run_grid(rig, fleet, every=20)


@pytest.mark.slow
def test_g27_whole_grid(rig: Rig, fleet: SignatureFleet) -> None:
    run_grid(rig, fleet, every=1)


def test_a_fault_in_a_shared_prompt_ends_all_its_answers(fleet: SignatureFleet) -> None:
    for place, verb in (("row", "raise"), ("forward", "raise"), ("logits", "nan")):
        rig = Rig(fleet.base, failpoints={f"{place}:1": verb})
        request, other = rig.submit(PROMPT, n=3), rig.submit(PROMPT, n=2)
        rig.run()
        for index in range(3):
            fault = rig.answer(request, index).fault
            assert fault is not None and fault.code == "internal_error"
        assert [len(rig.answer(other, i).tokens) for i in range(2)] == [8, 8]
        assert rig.owned_pages() == 0


def test_f40_an_adapter_full_of_nan(fleet: SignatureFleet, tmp_path: Path) -> None:
    """Refused by default; with the check off its own rows fail and nobody else's."""
    folder = tmp_path / "nan"
    folder.mkdir()
    source = Path(fleet.adapter(20, r=16).path)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "adapter_model.safetensors"
    save_file({k: torch.full_like(t, torch.nan) for k, t in load_file(weights).items()}, weights)
    ref = adapter_ref(fleet.base, folder, "nan")
    rig = Rig(fleet.base)
    fault = rig.ask(PROMPT, ref).fault
    assert fault is not None and fault.code == "adapter_unavailable" and "NaN" in fault.message
    rig = Rig(fleet.base, check_adapter_values=False, num_slots=3)
    for _ in range(3):
        sick = rig.submit(PROMPT, ref)
        sound = {rig.submit(PROMPT, fleet.adapter(k, r=r)): k for k, r in ((50, 4), (95, 16))}
        base = rig.submit(PROMPT)
        rig.run()
        fault = rig.answer(sick).fault
        assert fault is not None and "nan" in fault.message and "not finite" in fault.message
        for request, k in sound.items():
            assert rig.answer(request).tokens == [k + 1] * 8
        assert rig.answer(base).tokens == list(range(25, 33))


def test_requests_that_cannot_be_served(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, max_model_len=64)
    for prompt, how, code in (
        ([], {}, "invalid_value"),
        ([384], {}, "invalid_value"),
        ([-1], {}, "invalid_value"),
        ([1], {"max_tokens": -1}, "invalid_value"),
        ([1] * 64, {}, "context_length_exceeded"),
    ):
        answer = rig.ask(prompt, **how)
        assert answer.fault is not None and answer.fault.code == code
    assert len(rig.ask([1] * 63, max_tokens=5).tokens) == 1, "it ends at the context's end"
    assert rig.ask([1] * 64, max_tokens=0).finish == "length"


def test_f27_queue_overflow(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, max_queue=10, max_num_seqs=4)
    requests = [rig.submit(PROMPT) for _ in range(30)]
    rig.run()
    faults = [rig.answer(r).fault for r in requests]
    assert sum(fault is None for fault in faults) == 10
    for fault in faults:
        assert fault is None or (fault.code == "server_is_overloaded" and fault.retry_after_s)


def test_adapter_that_loads_too_long(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, failpoints={"load": "sleep:0.4"}, adapter_wait_limit_s=0.1)
    slow, base = rig.submit(PROMPT, fleet.adapter(20)), rig.submit(PROMPT)
    rig.run()
    fault = rig.answer(slow).fault
    assert fault is not None and fault.code == "adapter_loading" and fault.retry_after_s
    assert rig.answer(base).finish == "length"
    assert rig.ask(PROMPT, fleet.adapter(20)).tokens == [21] * 8


def test_f06_drain_finishes_what_it_can_and_ends_the_rest(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    short, long = rig.submit(PROMPT, max_tokens=5), rig.submit(PROMPT, max_tokens=900)
    rig.step()
    rig.engine.handle(Drain(0.3))
    late = rig.submit(PROMPT)
    while not rig.engine.drained:
        rig.step()
    assert rig.answer(short).finish == "length"
    for request in (long, late):
        fault = rig.answer(request).fault
        assert fault is not None and fault.code == "server_shutting_down"
    assert rig.owned_pages() == 0


def test_stop_ids_and_min_tokens(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    answer = rig.ask([10], max_tokens=20, stop_token_ids=(15, 18))
    assert (answer.tokens, answer.finish) == ([11, 12, 13, 14, 15], "stop")
    answer = rig.ask([10], max_tokens=3, stop_token_ids=(15,))
    assert (answer.tokens, answer.finish) == ([11, 12, 13], "length")
    answer = rig.ask([10], max_tokens=20, min_tokens=7, stop_token_ids=(15, 18))
    assert 15 not in answer.tokens[:7] and len(answer.tokens) >= 7


def test_prompt_logprobs_without_generation(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, max_num_batched_tokens=32)
    for n in (1, 3):
        request = rig.submit(range(50), max_tokens=0, prompt_logprobs=2, n=n)
        rig.run()
        for index in range(n):
            answer = rig.answer(request, index)
            assert answer.tokens == [] and answer.finish == "length"
            assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 50
            assert [len(entry.top_ids) for entry in answer.prompt_logprobs[1:] if entry] == [2] * 49
    # The base is sure of its next token, and says so once the prefix cache could have helped too.
    found = rig.ask(range(50), prompt_logprobs=0, logprobs=0, max_tokens=1)
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == 50
    assert found.cached == 0


def test_a_request_id_sent_twice_disturbs_nobody(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    request = rig.submit(PROMPT)
    rig.step()
    again = Submit(request, PROMPT, SamplingParams(max_tokens=3))
    rig.engine.handle(again)
    rig.run()
    assert rig.answer(request).tokens == list(range(25, 33))


def test_failpoints_need_debug() -> None:
    with pytest.raises(BadInput, match="failpoints"):
        EngineConfig(model_path="x", failpoints={"row:1": "raise"})


def test_failpoint_counts() -> None:
    points = Failpoints({"logits:1": "nan@2", "step": "sleep:0@2+"})
    assert [points.hit("logits", 1) for _ in range(4)] == [None, "nan", None, None]
    assert points.hit("logits", 2) is None and points.hit("step") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("num_slots", 1),
        ("kv_reserve", 1.0),
        ("device_fraction", 0.0),
    ],
)
def test_configuration_is_checked(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=field):
        EngineConfig(model_path="x", **{field: value})


def test_pool_is_never_read_where_nobody_wrote(fleet: SignatureFleet) -> None:
    """F4: the pool starts as NaN and every page is NaN again when it is given back."""
    rig = Rig(fleet.base, prefix_caching=False)
    pages = rig.engine.parts.runner._pool.view(torch.float32)
    assert pages.isnan().all()
    rig.ask(PROMPT, fleet.adapter(20))
    pool = rig.engine.parts.pool
    free = [page for page in range(pool.num_pages) if pool.use(page) is not PageUse.ADAPTER]
    assert pages[free].isnan().all() and not pages.isnan().all()

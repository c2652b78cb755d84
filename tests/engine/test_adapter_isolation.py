"""Nobody's answer holds a token of another adapter or version: long runs on signature adapters."""

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.adapters.host_arena import HostArena
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.memory.page_pool import PageUse
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig, adapter_ref

PROMPTS = [list(range(i, i + length)) for i, length in ((5, 40), (5, 70), (60, 3), (100, 17))]


def spoiled(fleet: SignatureFleet, folder: Path) -> AdapterRef:
    """An adapter whose every weight is NaN."""
    shutil.copytree(fleet.adapter(7, r=16).path, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: torch.full_like(t, torch.nan) for name, t in load_file(weights).items()}
    save_file(tensors, weights)
    return adapter_ref(fleet.base, folder, "sick")


def at_rest(rig: Rig) -> None:
    """Nothing is owned, and every adapter can be had back from host and pool."""
    assert rig.owned_pages() == 0 and rig.references() == 0
    for status in rig.engine.snapshot().adapters:
        rig.evict(status.digest, to="cold", unpin=True, purge_cache=True)
    rig.run()
    pool = rig.engine.parts.pool
    assert rig.engine.snapshot().adapters == [] and pool.count(PageUse.ADAPTER) == 0
    assert all(answer.finish is not None for answer in rig.answers.values())
    rig.engine.check_integrity()


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_64_adapters_of_ranks_1_to_64_over_room_for_8(
    fleet: SignatureFleet, tmp_path: Path, count: int
) -> None:
    """One of them full of NaN, checks off; base rows, several answers, aborts and evictions among
    them; freed pages are NaN and every owner is audited after every step."""
    refs = {k: fleet.adapter(3 * k - 1, r=k) for k in range(1, 65)}
    refs[17] = spoiled(fleet, tmp_path / "sick")
    rig = Rig(
        fleet.base, pages=72, num_slots=9, max_num_seqs=24, check_adapter_values=False,
        host_adapter_bytes=24 * 2**20, adapter_wait_limit_s=1e9, kv_reserve=0.3,
        prefetch_bytes_per_s=2**20,
    )  # fmt: skip
    choose = random.Random(count)
    texts: dict[int, tuple[list[int], int | None, int]] = {}
    wrong: Counter[str] = Counter()
    ends: Counter[str] = Counter()

    def settle_accounts() -> None:
        """Look at what ended, and forget it."""
        for (request, index), answer in list(rig.answers.items()):
            if answer.finish is None:
                continue
            prompt, k, length = texts[request]
            text = [3 * k] * length if k else [prompt[-1] + 1 + i for i in range(length)]
            if k == 17:
                wrong["sick"] += bool(answer.tokens) or answer.finish == "length"
            else:
                wrong["tokens"] += answer.tokens != text[: len(answer.tokens)]
                wrong["faults"] += answer.fault is not None
                wrong["short"] += answer.finish == "length" and len(answer.tokens) < length
            ends[answer.finish] += 1
            del rig.answers[request, index]

    for _ in range(count):
        k = choose.choice((None, *range(1, 65)))
        prompt, length = choose.choice(PROMPTS), choose.choice((1, 3, 9, 40))
        request = rig.submit(
            prompt, None if k is None else refs[k], n=choose.choice((1, 1, 1, 2)), max_tokens=length
        )
        texts[request] = (prompt, k, length)
        if choose.random() < 0.02:
            digest = refs[choose.randrange(1, 65)].digest
            rig.evict(digest, to=choose.choice(("warm", "cold")), purge_cache=choose.random() < 0.5)
        if choose.random() < 0.02:
            rig.engine.parts.scheduler.abort(choose.randrange(max(request - 40, 1), request + 1))
        while rig.engine.parts.scheduler.num_waiting > 60:
            rig.step()
        settle_accounts()
    rig.run()
    settle_accounts()
    counters = rig.counters()
    at_rest(rig)
    assert not +wrong, f"{dict(wrong)} wrong of {sum(ends.values())}"
    assert ends["length"] > 0.8 * count and ends["abort"] > 0 and ends["error"] > 0
    assert counters["adapter_evictions"] > count / 10, "there was room for all of them"
    assert counters["preemptions"] > 0 and counters["cached_tokens"] > 0


@pytest.mark.parametrize("replacements", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_f33_a_name_replaced_under_50_clients(fleet: SignatureFleet, replacements: int) -> None:
    """Every answer is wholly of the version that was current when it was asked for, and no cached
    prefix serves a second version: 40 tokens of the prompt are the same for all."""
    rig = Rig(fleet.base, pages=300, num_slots=6, max_num_seqs=50, max_num_batched_tokens=512)
    choose = random.Random(33)
    current = 0
    versions: dict[int, int] = {}
    open_requests: set[int] = set()
    seen, hits = 0, 0
    deadline = rig.steps + 40 * replacements + 400
    retired: list[int] = []
    while current < replacements or open_requests:
        assert rig.steps < deadline, "requests do not end"
        ref = fleet.adapter(current % 190, r=1 + current % 3)
        while current < replacements and len(open_requests) < 50:
            request = rig.submit(
                [*range(5, 45), choose.randrange(100)], ref, max_tokens=choose.randrange(2, 14)
            )
            versions[request] = current
            open_requests.add(request)
        if current < replacements and choose.random() < 0.15:
            rig.evict(ref.digest, to="cold", purge_cache=True)
            retired.append(current)
            current += 1
        rig.step()
        for request in list(open_requests):
            answer = rig.answer(request)
            if answer.finish is None:
                continue
            open_requests.remove(request)
            signature = versions[request] % 190
            assert answer.finish == "length", answer.fault
            assert set(answer.tokens) == {signature + 1}, f"version {versions[request]}"
            seen += 1
            hits += answer.cached > 0
    rig.run()
    assert seen == len(versions) > 10 * replacements
    assert hits > 0.3 * seen, "no prefix was ever reused: nothing is shown"
    assert len(rig.replies) == len(retired), "a retired version was never let go"
    assert rig.engine.snapshot().adapters == [], "nothing is left of retired versions"
    at_rest(rig)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_f43_thrash(fleet: SignatureFleet, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As many adapters as requests, four slots and six warm images: every load is a real one."""
    refs = [fleet.adapter(i % 190, r=1 + i // 190) for i in range(count)]
    rig = Rig(
        fleet.base, num_slots=5, max_queue=2 * count, adapter_wait_limit_s=1e9,
        host_adapter_bytes=6 * 24_576,
    )  # fmt: skip
    order = list(range(count)) * 2
    random.Random(43).shuffle(order)
    began = time.perf_counter()
    requests = {rig.submit(PROMPTS[0], refs[i], max_tokens=3): i for i in order}
    rig.run()
    loads = rig.counters()["adapter_loads"]
    with capsys.disabled():
        print(
            f"\n{count} adapters over 4 slots: {loads / (time.perf_counter() - began):.0f} loads/s"
        )
    for request, i in requests.items():
        assert rig.answer(request).tokens == [i % 190 + 1] * 3
    assert loads >= count
    at_rest(rig)


def test_images_in_one_piece_of_host_memory(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a GPU, where they lie in page-locked slabs: none is written over another."""
    begin = HostArena.__init__

    def shared(self: HostArena, budget_bytes: int, pin: bool) -> None:
        begin(self, budget_bytes, True, 4 * 2**20)

    def plain(self: HostArena, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    monkeypatch.setattr(HostArena, "__init__", shared)
    monkeypatch.setattr(HostArena, "make", plain)
    rig = Rig(fleet.base, pages=72, num_slots=4, host_adapter_bytes=16 * 2**20)
    requests = {
        rig.submit([k] * 7, fleet.adapter(k, r=rank), max_tokens=5): k
        for k, rank in zip(range(20, 40), (1, 8, 16, 40) * 5, strict=True)
    }
    rig.run()
    for request, k in requests.items():
        assert rig.answer(request).tokens == [k + 1] * 5, k
    at_rest(rig)

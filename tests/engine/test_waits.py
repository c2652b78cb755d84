"""How long an adapter may be waited for, and that the reason is told. No torch."""

import random
import re
from math import ceil
from pathlib import Path

import pytest

from multilora_cli.engine.messages import EvictAdapter
from multilora_cli.engine.waits import REASONS
from tests.engine.bookkeeping_kit import Books, FakeVersion
from tests.engine.scheduler_rig import VERSIONS, Rig

STEP_S, WAIT_S = 0.01, 2.0  # of the rig


def _turn(rig: Rig) -> None:
    """A step, and every load that it asked for ends."""
    rig.step()
    while rig.books.loaders.jobs:
        rig.books.loaders.run_one(rig.random)


def _thrash(num_requests: int, num_adapters: int, seed: int) -> float:
    """Requests for random adapters over four slots; the longest wait as a part of its bound.

    A request waits at most `WAIT_S` until nobody may overtake it. From then on those ahead of it
    get slots in their order, four at a time, each for at most the longest run.
    """
    slots, longest, cost = 4, 12, 4  # cost: steps for a load, a copy and a prompt
    rig = Rig(
        seed,
        Books(num_pages=120, num_slots=slots + 1, host_pages=60),
        max_num_seqs=16, max_num_batched_tokens=64, max_adapters=slots,
    )  # fmt: skip
    choose = random.Random(seed)
    versions = [FakeVersion(f"x{i}", 1 + i % 5) for i in range(num_adapters)]
    arrived: dict[int, tuple[float, int]] = {}
    worst, sent = 0.0, 0
    while sent < num_requests or rig.open:
        if sent < num_requests and len(rig.open) < 60:
            sent += 1
            ahead = len(rig.open)
            version = versions[int(num_adapters * choose.random() ** 2)]
            request = rig.submit([2] * 5, version, max_tokens=choose.randrange(1, longest))
            arrived[request] = (rig.books.now, ahead)
        while rig.books.loaders.jobs and choose.random() < 0.7:
            rig.books.loaders.run_one(choose)
        rig.step()
        for sequence in rig.scheduler.sequences():
            if sequence.num_outputs and sequence.request_id in arrived:
                since, ahead = arrived.pop(sequence.request_id)
                bound = WAIT_S + ceil((ahead + 1) / slots) * (longest + cost) * STEP_S
                worst = max(worst, (rig.books.now - since) / bound)
        for request, _ in rig.ends:
            arrived.pop(request, None)
        assert len(rig.model.batches) < 100 * num_requests + 1000, "it does not get on"
    assert all(delta.fault is None for delta in rig.ends.values())
    rig.finish()
    return worst


@pytest.mark.parametrize(
    ("requests", "adapters"),
    [(300, 50), (300, 500), pytest.param(10_000, 500, marks=pytest.mark.slow)],
)
def test_f43_every_request_gets_its_turn_within_the_bound(requests: int, adapters: int) -> None:
    assert _thrash(requests, adapters, seed=requests + adapters) <= 1.0


@pytest.mark.parametrize("length", [5, 60])
def test_a_popular_adapter_without_end_keeps_a_rare_one_out_for_the_bound_only(length: int) -> None:
    """One slot and four requests a step for the adapter that holds it."""
    rig = Rig(books=Books(num_pages=200, num_slots=2), max_num_seqs=8)
    popular, rare = VERSIONS[0], VERSIONS[1]
    for _ in range(30):
        rig.submit([2] * 5, popular, max_tokens=length)
        _turn(rig)
    late = rig.submit([3] * 5, rare, max_tokens=1)
    began = rig.books.now
    while (late, 0) not in rig.ends:
        if len(rig.open) < 200:
            rig.submit([2] * 5, popular, max_tokens=length)
        _turn(rig)
        assert rig.books.now - began <= WAIT_S + (length + 8) * STEP_S, "starved"
    assert rig.books.now - began > WAIT_S, "nothing held it back: the test shows nothing"


def test_the_adapters_of_a_step_stay_within_their_bytes_and_everybody_runs() -> None:
    rig = Rig(
        books=Books(num_pages=200, num_slots=9, host_pages=60),
        max_num_seqs=8, max_adapters=8, max_adapter_pages=8,
    )  # fmt: skip
    requests = [rig.submit([2] * 5, version, max_tokens=30) for version in VERSIONS]
    seen = 0
    while rig.open:
        _turn(rig)
        seen = max(seen, rig.scheduler.waits.waiting["adapter_budget"])
    # 1 + 2 + 3 pages run together; 5 and 8 wait although their slots and pages are there.
    assert seen == 2
    assert all(rig.ends[request, 0].fault is None for request in requests)
    distinct = rig.model.distinct
    assert max(distinct) == 3 and distinct[-1] == 1, "the one of 8 pages runs alone"


def _reasons(rig: Rig) -> dict[str, int]:
    """What is waited for after one more step."""
    rig.step()
    return dict(rig.scheduler.waits.waiting)


def test_waits_for_a_load_a_slot_and_a_place() -> None:
    rig = Rig(books=Books(num_pages=60, num_slots=2, kv_reserve=0.1), max_num_seqs=2)
    rig.submit([2] * 5, VERSIONS[0], max_tokens=300)
    assert _reasons(rig) == {"adapter_load": 1}
    rig.books.now += 1.0
    _turn(rig)
    assert rig.scheduler.waits.seconds["adapter_load"] >= 1.0
    rig.submit([2] * 5, VERSIONS[1], max_tokens=300)
    _turn(rig)
    assert _reasons(rig) == {"adapter_slot": 1}, "the one slot is taken"
    rig.submit([3] * 5, VERSIONS[0], max_tokens=300)
    rig.submit([3] * 5, VERSIONS[0], max_tokens=300)
    _turn(rig)
    assert _reasons(rig) == {"place": 2}
    rig.finish()


def test_waits_for_the_turn_of_one_that_is_overdue() -> None:
    rig = Rig(books=Books(num_pages=60, num_slots=2, kv_reserve=0.1))
    rig.submit([2] * 5, VERSIONS[0], max_tokens=300)
    for _ in range(3):
        _turn(rig)
    rig.submit([2] * 5, VERSIONS[1])
    _turn(rig)
    rig.books.now += 3.0
    rig.submit([2] * 5, VERSIONS[0])
    assert _reasons(rig) == {"adapter_slot": 1, "turn": 1}
    rig.finish()


def test_waits_for_pages_of_kv() -> None:
    rig = Rig(books=Books(num_pages=20, num_slots=3, kv_reserve=0.1))
    rig.submit([2] * 150, max_tokens=80)
    for _ in range(8):
        rig.step()
    rig.submit([3] * 150, max_tokens=2)
    rig.submit([4] * 5, VERSIONS[0], max_tokens=2)
    assert _reasons(rig) == {"kv_pages": 2}, "the first finds no pages, the second is behind it"
    rig.finish()


def test_waits_for_pages_of_an_adapter() -> None:
    rig = Rig(books=Books(num_pages=20, num_slots=3, kv_reserve=0.1))
    rig.submit([2] * 200, max_tokens=40)
    for _ in range(10):
        rig.step()
    for _ in range(2):
        rig.submit([4] * 5, VERSIONS[4], max_tokens=2)
        _turn(rig)
    assert _reasons(rig) == {"adapter_pages": 2}
    snapshot = rig.engine.snapshot()
    assert snapshot.waits == {"adapter_pages": 2} and snapshot.waiting == 2
    assert snapshot.wait_seconds["adapter_pages"] > 0.0
    rig.finish()
    assert rig.engine.snapshot().waits == {}, "nobody waits, nothing is said"


def test_newcomers_behind_an_evict_call_wait_for_it() -> None:
    rig = Rig(books=Books(num_pages=60))
    rig.submit([2] * 5, VERSIONS[0], max_tokens=100)
    for _ in range(3):
        _turn(rig)
    rig.engine.handle(EvictAdapter(1, VERSIONS[0].digest))
    rig.submit([2] * 5, VERSIONS[0])
    _turn(rig)
    assert rig.scheduler.waits.waiting == {"adapter_drain": 1}
    rig.finish()


def test_every_reason_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(REASONS) <= {word for row in rows for word in re.findall(r"`(\w+)`", row)}

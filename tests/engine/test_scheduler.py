"""The scheduler under random traffic, and its rules one by one. No torch."""

from collections import Counter
from typing import Any

import pytest

from multilora_cli.adapters.lease import Lease
from multilora_cli.adapters.residency import Residency
from multilora_cli.adapters.residency_entry import Entry
from multilora_cli.engine.engine import Engine
from multilora_cli.engine.messages import Abort, EvictAdapter, LoadAdapter
from tests.engine.bookkeeping_kit import Books, FakeVersion
from tests.engine.scheduler_rig import VERSIONS, VOCAB, Rig

CROWD = [FakeVersion(f"c{i}", 1 + i % 4) for i in range(24)] + [FakeVersion("large", 19)]


def _walk(steps: int, seed: int) -> Counter[str]:
    """Random traffic from start to rest; how often what was seen."""
    rig = _walked(steps, seed)
    seen = Counter({name: int(value) for name, value in rig.engine.snapshot().counters.items()})
    seen.update(delta.finish_reason for delta in rig.ends.values())
    seen["steps_ahead"] = rig.model.ahead
    seen["copies"] = sum(len(batch.copies) for batch in rig.model.batches)
    return seen


def _walked(steps: int, seed: int, *, crowd: bool = False) -> Rig:
    """The rig after random traffic.

    In a crowd there are many more adapters than room for them, in host memory too; some cannot be
    read for a while, and sometimes nothing happens for long.
    """
    versions = CROWD if crowd else VERSIONS
    budget, steps_ahead = (8 if seed % 2 else None), seed // 2 % 2
    books = Books(num_pages=36, num_slots=6, host_pages=22 if crowd else 30)
    rig = Rig(
        seed, books, max_adapter_pages=budget, steps_ahead=steps_ahead,
        captured_chunks=(4, 8) if seed // 4 % 2 else (), captured_prompts=2,
    )  # fmt: skip
    rig.books.copier.instant = False
    choose = rig.random
    rig.model.faults = choose.choice((0.0, 0.01))
    prompts = [[choose.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
    for _ in range(steps):
        if len(rig.open) < 30 and choose.random() < 0.5:
            prompt = choose.choice(prompts)[: choose.randrange(1, 120)]
            version = choose.choice([None, None, *versions])
            rig.submit(
                prompt, version, n=choose.choice((1, 1, 1, 2, 4, 8)),
                max_tokens=choose.choice((0, 1, 5, 40, 200)), stop_token_ids=(1,),
                tenant=choose.choice("aab"), weight=choose.choice((0.5, 1.0, 4.0)),
            )  # fmt: skip
        if choose.random() < 0.1:
            rig.engine.handle(Abort(choose.randrange(1, rig.next_id + 2)))
        if choose.random() < 0.03:
            digest = choose.choice(versions).digest
            cold = choose.random() < 0.5
            rig.engine.handle(EvictAdapter(0, digest, "cold" if cold else "warm", purge_cache=cold))
        if choose.random() < 0.01:
            pinned = LoadAdapter(0, choose.choice(versions), pin="hot")  # type: ignore[arg-type]
            rig.engine.handle(pinned)
        if choose.random() < 0.02:
            rig.engine.handle(EvictAdapter(0, choose.choice(versions).digest, unpin=True))
        if crowd and choose.random() < 0.2:
            rig.engine.changes()
        if crowd and choose.random() < 0.1:
            books.warm.broken.symmetric_difference_update({choose.choice(versions).digest})
            books.now += choose.choice((0.0, 0.0, 3.0, 61.0))
        if choose.random() < 0.5:
            rig.books.loaders.run_one(choose)
        for copy in rig.books.copier.copies:
            copy.finished |= choose.random() < 0.5
        rig.step()
    rig.model.faults = 0.0
    books.warm.broken.clear()
    for version in versions:  # what is pinned may leave no room for others, in host memory either
        rig.engine.handle(EvictAdapter(0, version.digest, unpin=True))
    rig.finish()
    return rig


def test_random_traffic() -> None:
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen += _walk(300, seed)
    for event in ("preemptions", "copies", "cached_tokens", "adapter_evictions", "adapter_loads",
                  "prefix_evictions", "steps_ahead", "stop", "length", "abort",
                  "error"):  # fmt: skip
        assert seen[event] > 5, f"the walk hardly meets {event}: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_at_length(seed: int) -> None:
    _walk(2_000, 1000 + seed)


def test_random_traffic_of_many_adapters() -> None:
    seen: Counter[str | None] = Counter()
    for seed in range(6):
        rig = _walked(300, seed, crowd=True)
        for delta in rig.ends.values():
            seen[delta.fault.code if delta.fault is not None else delta.finish_reason] += 1
    for event in ("adapter_unavailable", "adapter_loading", "stop", "length", "abort"):
        assert seen[event] > 5, f"the walk hardly meets {event}: {seen}"


def test_sleep_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether sequences sleep or are asked about in every step, the same steps come of it."""
    slept = []
    sleep = Entry.sleep

    def counted(self: Entry, lease: Lease) -> None:
        sleep(self, lease)
        slept.append(lease.asleep)

    for seed in range(8):
        seen = []
        for sleeping in (counted, lambda self, lease: None):
            monkeypatch.setattr(Entry, "sleep", sleeping)
            rig = _walked(250, seed, crowd=bool(seed % 3))
            batches = [
                [(row.sequence.seq_id, row.start, row.length, row.pages) for row in batch.rows]
                for batch in rig.model.batches
            ]
            waits = {why: round(s, 6) for why, s in rig.scheduler.waits.seconds.items()}
            seen.append((batches, waits, rig.ends))
        assert seen[0] == seen[1]
    assert min(slept.count("load"), slept.count("room")) > 25


def test_a_thousand_that_wait_are_not_asked_about_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 requests for 1,000 cold adapters took 5.5 ms of a step's decision: each was looked at
    five times. What is asked now does not grow with how many wait."""
    books = Books(num_pages=4000, num_slots=8, host_pages=4000)
    rig = Rig(0, books, max_num_seqs=64, max_num_batched_tokens=512, max_chunk=256)
    for place in range(1000):
        rig.submit([1] * 20, FakeVersion(f"cold{place}", 2))
    for _ in range(3):
        rig.step()
    asked: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            asked[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)

    for name in ("obstacle", "footprint", "failure"):
        count(Residency, name)
    for name in ("demand", "wants_hot", "may_run"):
        count(Entry, name)
    monkeypatch.setattr(Engine, "check_integrity", lambda self: None)
    for _ in range(20):
        rig.books.loaders.run_one(rig.random)
        rig.step()
        assert rig.scheduler.waits.waiting["adapter_load"] > 900
    assert max(asked.values()) < 20 * 30, asked
    monkeypatch.undo()
    rig.engine.check_integrity()


def test_decodes_go_first_and_prompts_fill_the_step() -> None:
    rig = Rig(books=Books(num_pages=100))
    rig.submit([2] * 4, max_tokens=50)
    rig.step()
    rig.submit([3] * 60, max_tokens=2)
    for _ in range(3):
        rig.step()
        assert rig.model.batches[-1].rows[0].length == 1
    lengths = [[row.length for row in batch.rows] for batch in rig.model.batches]
    assert lengths == [[4], [1, 23], [1, 23], [1, 14]]


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    rig = Rig(books=Books(num_pages=100), max_num_batched_tokens=64, max_chunk=8)
    rig.submit([2] * 30, max_tokens=50)
    rig.submit([3] * 30, max_tokens=50)
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [30, 30], "nobody decodes yet"
    rig.submit([4] * 60, max_tokens=2)
    for _ in range(7):
        rig.step()
        assert [row.length for row in rig.model.batches[-1].rows] == [1, 1, 8]
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [1, 1, 4]


def test_prompts_beside_decode_fill_captured_steps() -> None:
    rig = Rig(
        books=Books(num_pages=100), max_num_batched_tokens=64, max_chunk=32, captured_chunks=(4, 8)
    )
    rig.submit([2] * 4, max_tokens=60)
    rig.step()

    def lengths_of(steps: int) -> list[list[int]]:
        for _ in range(steps):
            rig.step()
        return [[row.length for row in batch.rows] for batch in rig.model.batches[-steps:]]

    rig.submit([3] * 20, max_tokens=2)
    assert lengths_of(3) == [[1, 8], [1, 8], [1, 4]], "20 tokens are no whole step"
    rig.submit([4] * 20, max_tokens=2)
    rig.submit([5] * 20, max_tokens=2)
    assert lengths_of(2) == [[1, 1, 20, 12], [1, 1, 8]], "40 are, and 8 are left"
    rig.submit([6] * 7, max_tokens=2)
    assert [step[-1] for step in lengths_of(2)] == [4, 3], "then less than the smallest"


def test_a_captured_step_has_room_for_so_many_prompts() -> None:
    rig = Rig(
        books=Books(num_pages=100), max_num_seqs=9, max_num_batched_tokens=64, max_chunk=32,
        captured_chunks=(8,), captured_prompts=2,
    )  # fmt: skip
    rig.submit([2] * 4, max_tokens=60)
    rig.step()
    for token in range(3, 9):
        rig.submit([token] * 2, max_tokens=9)
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [1, 2, 2]
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [1, 1, 1, 2, 2]
    rig.finish()
    for token in range(3, 9):
        rig.submit([token] * 2, max_tokens=9)
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [2] * 6, "nobody decodes"


def test_those_without_a_place_do_not_make_a_step_a_whole_one() -> None:
    rig = Rig(
        books=Books(num_pages=100), max_num_seqs=2, max_num_batched_tokens=64, max_chunk=32,
        captured_chunks=(8,),
    )  # fmt: skip
    rig.submit([2] * 4, max_tokens=60)
    rig.step()
    for token in (3, 4, 5):
        rig.submit([token] * 20, max_tokens=2)
    rig.step()
    assert [row.length for row in rig.model.batches[-1].rows] == [1, 8]


def test_arrival_order_and_no_overtaking_for_pages() -> None:
    """A sequence that does not find pages is not overtaken by a smaller one behind it."""
    rig = Rig(books=Books(num_pages=10))
    first = rig.submit([2] * 90, max_tokens=40)
    rig.step()
    big, small = rig.submit([3] * 90, max_tokens=1), rig.submit([4] * 3, max_tokens=1)
    ends = []
    while rig.open:
        ends += [delta.request_id for delta in rig.step() if delta.finish_reason]
    assert ends == [first, big, small]


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    rig = Rig(books=Books(num_pages=100), max_num_seqs=8)
    request = rig.submit([2] * 37, n=5, max_tokens=1)
    rig.finish()
    assert rig.model.prompt_tokens[request] == 37


def test_an_overdue_adapter_holds_back_what_it_needs() -> None:
    """Base rows keep running while the pages for the overdue one are kept free."""
    rig = Rig(books=Books(num_pages=60, num_slots=2, kv_reserve=0.2))
    hog = rig.submit([2] * 20, VERSIONS[0], max_tokens=350)
    while rig.scheduler.num_running == 0:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    rare = rig.submit([3] * 20, VERSIONS[4], max_tokens=3)
    rig.step()
    rig.books.loaders.run_one(rig.random)
    rig.books.now += 3.0
    rig.step()
    same = rig.submit([4] * 20, VERSIONS[0], max_tokens=3)
    base = rig.submit([4] * 20, max_tokens=3)
    for _ in range(20):
        rig.step()
    assert (base, 0) in rig.ends, "base rows do not wait for adapters"
    assert (same, 0) in rig.open, "newer rows of the running adapter prolong the wait"
    rig.engine.handle(Abort(hog))
    for _ in range(20):
        rig.step()
    assert (rare, 0) in rig.ends and rig.ends[rare, 0].finish_reason in ("length", "stop")
    rig.finish()


def test_a_slow_load_holds_nobody_back() -> None:
    rig = Rig(books=Books(num_pages=60))
    hot = rig.submit([2] * 20, VERSIONS[0])
    while (hot, 0) not in rig.ends:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    slow = rig.submit([3] * 20, VERSIONS[1])
    rig.step()
    rig.books.now += 30.0
    rig.step()
    others = [rig.submit([4] * 20, VERSIONS[0]), rig.submit([4] * 20)]
    for _ in range(10):
        rig.step()
    assert {(other, 0) for other in others} <= set(rig.ends) and (slow, 0) in rig.open
    rig.finish()


def test_newcomers_to_a_draining_adapter_hold_nobody_back() -> None:
    rig = Rig(books=Books(num_pages=60))
    old = rig.submit([2] * 20, VERSIONS[0], max_tokens=300)
    while rig.scheduler.num_running == 0:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    rig.engine.handle(EvictAdapter(1, VERSIONS[0].digest))
    late = rig.submit([2] * 20, VERSIONS[0])
    other = rig.submit([2] * 20, VERSIONS[1])
    rig.books.now += 30.0
    for _ in range(20):
        rig.books.loaders.run_one(rig.random)
        rig.step()
    assert (other, 0) in rig.ends and {(old, 0), (late, 0)} <= rig.open
    rig.finish()


def test_a_newer_sequence_yields_to_an_older_one_whose_adapter_came_late() -> None:
    """It passed while the adapter was loaded; now adapter and older sequence need all pages."""
    rig = Rig(books=Books(num_pages=21, num_slots=2, kv_reserve=0.2))
    older = rig.submit([2] * 180, VERSIONS[4], max_tokens=2)
    newer = rig.submit([3] * 10, max_tokens=200)
    while len(rig.model.batches) < 20:
        rig.step()
    ends = []
    while rig.open:
        rig.books.loaders.run_one(rig.random)
        ends += [delta for delta in rig.step() if delta.finish_reason]
    assert [delta.request_id for delta in ends] == [older, newer]
    assert [delta.fault for delta in ends] == [None, None]
    assert rig.scheduler.preemptions == 1

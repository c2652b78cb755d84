"""Adapters that come and go under load: the A-RUN cases and faults F22 to F37."""

import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from multilora_cli.adapters.host_arena import HostArena
from multilora_cli.engine.messages import AdapterRef, EvictAdapter
from multilora_cli.memory.page_pool import PageUse
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig, adapter_ref
from tests.signature import deep_adapter, deep_base

PROMPT = list(range(5, 45))


def at_rest(rig: Rig) -> None:
    """Nothing is owned: no KV page, no lease, no request."""
    assert rig.owned_pages() == 0 and rig.references() == 0
    assert not rig.engine.parts.scheduler.has_work
    rig.engine.check_integrity()


def test_a_run_01_bad_adapters_fail_alone(fleet: SignatureFleet, tmp_path: Path) -> None:
    rig = Rig(fleet.base)
    good = [rig.submit(PROMPT, fleet.adapter(k), max_tokens=40) for k in (20, 150)]
    source = Path(fleet.adapter(95).path)
    bad = []
    for cut in (1, 10, 1000):
        folder = tmp_path / f"cut{cut}"
        shutil.copytree(source, folder)
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-cut])
        ref = AdapterRef(f"cut{cut}", f"{cut:064d}", str(folder), 1)
        bad.append(rig.submit(PROMPT, ref))
        rig.step()
    gone = AdapterRef("gone", "f" * 64, str(tmp_path / "nowhere"), 1)
    bad.append(rig.submit(PROMPT, gone))
    call = rig.load(gone)
    rig.run()
    for request in bad:
        fault = rig.answer(request).fault
        assert fault is not None and fault.code == "adapter_unavailable" and fault.message
        assert fault.retry_after_s is not None and fault.retry_after_s > 0
    assert rig.replies[call].fault is not None
    assert [rig.answer(r).tokens for r in good] == [[21] * 40, [151] * 40]
    at_rest(rig)


def test_a_run_09_a_failing_adapter_backs_off(fleet: SignatureFleet, tmp_path: Path) -> None:
    rig = Rig(fleet.base)
    folder = tmp_path / "late"
    real = fleet.adapter(20)
    late = AdapterRef("late", real.digest, str(folder), 1)
    assert rig.ask(PROMPT, late).fault is not None
    shutil.copytree(real.path, folder)
    for _ in range(3):
        assert rig.ask(PROMPT, late).fault is not None, "tried again before its time"
    assert rig.counters()["adapter_load_failures"] == 1
    (status,) = rig.engine.snapshot().adapters
    assert status.tier == "failed" and str(folder) in status.detail
    rig.clock.time += 2.0
    assert rig.ask(PROMPT, late).tokens == [21] * 8


def test_a_run_11_folder_gone_when_an_evicted_adapter_comes_back(
    fleet: SignatureFleet, tmp_path: Path
) -> None:
    rig = Rig(fleet.base)
    folder = tmp_path / "adapter"
    shutil.copytree(fleet.adapter(33).path, folder)
    ref = adapter_ref(fleet.base, folder, "tenant")
    assert rig.ask(PROMPT, ref).tokens == [34] * 8
    rig.evict(ref.digest, to="cold")
    shutil.rmtree(folder)
    rig.run()
    fault = rig.ask(PROMPT, ref).fault
    assert fault is not None and fault.code == "adapter_unavailable"
    assert rig.ask(PROMPT).finish == "length"


def test_an_adapter_whose_files_changed_is_not_served(
    fleet: SignatureFleet, tmp_path: Path
) -> None:
    """F31, F32: the digest of the request decides, not what lies in the folder now."""
    rig = Rig(fleet.base)
    folder = tmp_path / "adapter"
    shutil.copytree(fleet.adapter(33).path, folder)
    ref = adapter_ref(fleet.base, folder, "tenant")
    shutil.rmtree(folder)
    shutil.copytree(fleet.adapter(50).path, folder)
    fault = rig.ask(PROMPT, ref).fault
    assert fault is not None and "changed" in fault.message


def test_a_run_03_loads_during_generation(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, num_slots=5)
    streams = {rig.submit(PROMPT, fleet.adapter(k), max_tokens=60): k for k in (0, 95, 191)}
    for round_ in range(50):
        rig.load(fleet.adapter(round_ + 100), hot=True)
        rig.step()
    rig.run()
    for request, signature in streams.items():
        assert rig.answer(request).tokens == [signature + 1] * 60
    at_rest(rig)


def test_a_run_04_unload_during_generation(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    ref = fleet.adapter(20)
    running = rig.submit(PROMPT, ref, max_tokens=30)
    while not rig.answer(running).tokens:
        rig.step()
    waiting = rig.submit(PROMPT, ref, n=2, max_tokens=5)
    call = rig.evict(ref.digest, to="cold", purge_cache=True)
    for _ in rig.steps_until(call):
        pass
    assert rig.answer(running).tokens == [21] * 30, "the reply came before the last answer"
    assert rig.answer(waiting, 1).tokens == [21] * 5
    reply = rig.replies[call]
    assert reply.freed_pages == 1 + 4, "its page and the cached blocks of 69 tokens"
    assert reply.freed_host_bytes == 24_576 and reply.status is not None
    pool = rig.engine.parts.pool
    assert pool.count(PageUse.ADAPTER) == 0 and pool.count(PageUse.CACHED) == 0
    assert rig.engine.snapshot().adapters == []


def test_a_query_is_told_what_changed_since_the_last_one(fleet: SignatureFleet) -> None:
    """With ten thousand known adapters the loop has no 32 ms a second to tell of each."""
    rig = Rig(fleet.base)
    names = {fleet.adapter(value).digest: value for value in (20, 95)}
    for value in names.values():
        rig.ask(PROMPT, fleet.adapter(value))
    assert {status.digest for status in rig.engine.changes().adapters} == set(names)
    assert rig.engine.changes().adapters == []
    rig.ask(PROMPT, fleet.adapter(95))
    changes = rig.engine.changes()
    assert [names[status.digest] for status in changes.adapters] == [95]
    assert (changes.adapters[0].hits, changes.gone) == (2, [])
    evict = EvictAdapter(77, fleet.adapter(20).digest, to="cold", unpin=True, purge_cache=True)
    rig.engine.handle(evict)
    rig.engine.step()
    assert rig.engine.changes().gone == [fleet.adapter(20).digest]
    assert len(rig.engine.snapshot().adapters) == 1


def test_a_request_after_an_unload_waits_for_it_and_loads_again(fleet: SignatureFleet) -> None:
    """The same content under a second name: the drain is not prolonged by newcomers."""
    rig = Rig(fleet.base)
    ref = fleet.adapter(20)
    first = rig.submit(PROMPT, ref, max_tokens=20)
    rig.step()
    call = rig.evict(ref.digest, to="cold")
    late = rig.submit(PROMPT, ref, max_tokens=5)
    for _ in rig.steps_until(call):
        assert rig.answer(late).tokens == []
    rig.run()
    assert rig.answer(first).tokens == [21] * 20 and rig.answer(late).tokens == [21] * 5
    assert rig.counters()["adapter_loads"] == 2


def test_a_run_05_unload_frees_pages_and_host_bytes(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    for k in range(100):
        ref = fleet.adapter(k % 60)
        assert rig.ask(PROMPT, ref, max_tokens=2).tokens == [k % 60 + 1] * 2
        call = rig.evict(ref.digest, to="cold", purge_cache=True)
        rig.run()
        assert rig.replies[call].freed_pages >= 1
        assert rig.replies[call].freed_host_bytes == 24_576
    snapshot = rig.engine.snapshot()
    assert snapshot.pages_free == snapshot.pages_total and snapshot.adapters == []


def test_evict_to_warm_keeps_the_host_image(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    ref = fleet.adapter(20)
    rig.ask(PROMPT, ref)
    rig.evict(ref.digest, to="warm")
    rig.run()
    (status,) = rig.engine.snapshot().adapters
    assert status.tier == "warm" and status.pages == 0 and status.host_bytes == 24_576
    assert rig.ask(PROMPT, ref).tokens == [21] * 8
    assert rig.counters()["adapter_loads"] == 1


def test_a_run_06_more_adapters_in_flight_than_fit(fleet: SignatureFleet) -> None:
    for limit in ({"num_slots": 3}, {"pages": 12, "kv_reserve": 0.8}, {"max_loras": 2}):
        rig = Rig(fleet.base, **limit)
        requests = {rig.submit(PROMPT, fleet.adapter(k)): k for k in (0, 20, 50, 95, 150, 191)}
        rig.run()
        for request, k in requests.items():
            assert rig.answer(request).tokens == [k + 1] * 8, limit
        at_rest(rig)


def test_a_run_07_a_rare_adapter_gets_its_turn(fleet: SignatureFleet) -> None:
    """Room for one adapter and a stream of A without end. B waits for the bound, then for those A
    that run already: at most `adapter_wait_s` and one answer's length of steps."""
    rig = Rig(fleet.base, num_slots=2, adapter_wait_s=0.5)
    a, b = fleet.adapter(20), fleet.adapter(150)
    length = 12
    for _ in range(20):
        rig.submit(PROMPT, a, max_tokens=length)
        rig.step()
    rare = rig.submit(PROMPT, b, max_tokens=length)
    began = rig.steps
    while not rig.answer(rare).tokens:
        rig.submit(PROMPT, a, max_tokens=length)
        rig.step()
        # The rig's clock: 10 ms a step, so the bound is 50 steps; then the running ones, which
        # began before it passed; then load, copy and prefill.
        assert rig.steps - began <= 50 + length + 10, "starved"
    rig.run()
    assert rig.answer(rare).tokens == [151] * length
    for request, _ in rig.answers:
        assert request == rare or rig.answer(request).tokens == [21] * length


def test_a_run_08_adapter_misses_do_not_block_base_traffic(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, failpoints={"load": "sleep:0.3"})
    cold = [rig.submit(PROMPT, fleet.adapter(k)) for k in range(6)]
    base = rig.submit(PROMPT)
    for _ in range(10):
        rig.step()
    assert rig.answer(base).finish == "length", "the base waited behind cold adapters"
    assert rig.counters()["adapter_loads"] == 0
    rig.run()
    assert [rig.answer(r).tokens for r in cold] == [[k + 1] * 8 for k in range(6)]


def test_f37_one_load_however_many_requests(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, failpoints={"load": "sleep:0.05"})
    requests = [rig.submit(PROMPT, fleet.adapter(20), max_tokens=2) for _ in range(100)]
    rig.run()
    assert all(rig.answer(r).tokens == [21] * 2 for r in requests)
    assert rig.counters()["adapter_loads"] == 1


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[AdapterRef], int]:
    """The deep base and two adapters of several pages, and the bytes of a page."""
    folder = tmp_path_factory.mktemp("deep")
    base = deep_base(folder / "base")
    refs = [
        adapter_ref(base, deep_adapter(folder / f"d{k}", k, r=rank), f"d{k}")
        for k, rank in ((40, 20), (41, 8))
    ]
    return base, refs, 3 * 2 * 2 * 16 * 32 * 4


def test_a_run_12_pool_for_one_adapter_less_exactly_and_more(
    deep: tuple[Path, list[AdapterRef], int],
) -> None:
    base, (ref, _), page = deep
    prompt = [256, *range(20, 50)]
    rig = Rig(base, pages=2000, page=page, kv_reserve=0.0)
    assert rig.ask(prompt, ref).tokens == [41] * 8
    (status,) = rig.engine.snapshot().adapters
    own, kv = status.pages, 3
    assert own > 20
    for spare in (-1, 0, 1):
        rig = Rig(base, pages=own + kv + spare, page=page, kv_reserve=0.0)
        answer = rig.ask(prompt, ref)
        if spare >= 0:
            assert answer.tokens == [41] * 8
        else:
            assert answer.fault is not None and answer.fault.code == "context_length_exceeded"
        # The pool serves the base whatever became of the adapter.
        assert rig.ask(prompt).tokens == list(range(50, 58))
    rig = Rig(base, pages=own - 1, page=page, kv_reserve=0.0)
    fault = rig.ask(prompt, ref).fault
    assert fault is not None and str(own) in fault.message and str(own - 1) in fault.message


def test_every_page_of_an_adapter_counts(deep: tuple[Path, list[AdapterRef], int]) -> None:
    """F42: rank 20, then rank 8 in the same slot and pages, then rank 20 again."""
    base, refs, page = deep
    rig = Rig(base, pages=600, page=page, num_slots=2)
    prompt = [256, *range(20, 50)]
    for ref, text in ((refs[0], 41), (refs[1], 42), (refs[0], 41)):
        assert rig.ask(prompt, ref).tokens == [text] * 8
    both = [rig.submit(prompt, ref) for ref in refs]
    rig.run()
    assert [rig.answer(r).tokens for r in both] == [[41] * 8, [42] * 8]


def test_a_run_13_idle_adapters_leave(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, num_slots=2)
    for _ in range(3):
        for k in (20, 95, 150, 191):
            assert rig.ask(PROMPT, fleet.adapter(k)).tokens == [k + 1] * 8
    assert rig.counters()["adapter_loads"] == 4, "warm images were read again"
    assert rig.counters()["adapter_evictions"] == 11


def test_pinned_adapters_stay_and_a_pin_of_the_last_slot_is_refused(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, num_slots=3)
    call = rig.load(fleet.adapter(20), pin="hot")
    rig.run()
    assert rig.replies[call].fault is None
    for k in (95, 150, 191, 95):
        assert rig.ask(PROMPT, fleet.adapter(k)).tokens == [k + 1] * 8
    tiers = {s.digest: s.tier for s in rig.engine.snapshot().adapters}
    assert tiers[fleet.adapter(20).digest] == "hot"
    second = rig.load(fleet.adapter(50), pin="hot")
    again = rig.load(fleet.adapter(20), pin="hot")
    kept = rig.evict(fleet.adapter(20).digest)
    rig.run()
    assert rig.replies[second].fault is not None and "slot" in rig.replies[second].fault.message
    assert rig.replies[again].fault is None, "refreshing a pin counted itself"
    assert rig.replies[kept].fault is not None and "pinned" in rig.replies[kept].fault.message
    freed = rig.evict(fleet.adapter(20).digest, unpin=True)
    rig.run()
    assert rig.replies[freed].freed_pages == 1


def test_a_run_14_aborts_in_every_state_give_everything_back(fleet: SignatureFleet) -> None:
    """F26, F36: while queued, loading, in prefill, forking, decoding, preempted and at the end.

    A-RUN-16: whatever was said until then is the adapter's own, to the last token.
    """
    rig = Rig(fleet.base, pages=40, num_slots=4, max_num_seqs=6, max_num_batched_tokens=24)
    choose = random.Random(14)
    texts: dict[int, list[int]] = {}
    for _ in range(200):
        k = choose.choice((None, 0, 20, 50, 95, 150))
        length = choose.randrange(1, 120)
        text = [length + i for i in range(14)] if k is None else [k + 1] * 14
        adapter = None if k is None else fleet.adapter(k)
        answers = choose.choice((1, 1, 3))
        request = rig.submit(range(length), adapter, n=answers, max_tokens=14)
        texts[request] = text
        if choose.random() < 0.1:
            digest = fleet.adapter(choose.choice((0, 20, 50))).digest
            rig.evict(digest, to="cold", purge_cache=choose.random() < 0.5)
        for _ in range(choose.randrange(4)):
            rig.step()
        victim = choose.choice([request, choose.randrange(1, request + 1)])
        rig.engine.parts.scheduler.abort(victim)
    rig.run()
    at_rest(rig)
    ends = {answer.finish for answer in rig.answers.values()}
    assert ends == {"abort", "length"}, "every sequence ended, each in one way"
    for (request, _), answer in rig.answers.items():
        assert answer.tokens == texts[request][: len(answer.tokens)]
        assert answer.finish == "abort" or len(answer.tokens) == 14
    for k in (0, 20, 50, 95, 150):
        call = rig.evict(fleet.adapter(k).digest, to="cold", purge_cache=True)
        rig.run()
        assert rig.replies[call].fault is None
    assert rig.engine.snapshot().adapters == []
    assert rig.engine.parts.pool.count(PageUse.ADAPTER) == 0


def test_f22_pool_exhausted(fleet: SignatureFleet) -> None:
    """24 long answers over 20 pages: preempted and computed again, all right in the end."""
    for caching in (True, False):
        rig = Rig(fleet.base, pages=20, prefix_caching=caching)
        texts = {}
        for i in range(24):
            k = (None, 20, 150)[i % 3]
            prompt = list(range(i, i + 20))
            request = rig.submit(prompt, None if k is None else fleet.adapter(k), max_tokens=60)
            texts[request] = [i + 20 + j for j in range(60)] if k is None else [k + 1] * 60
        rig.run()
        assert {r: rig.answer(r).tokens for r in texts} == texts
        assert rig.counters()["preemptions"] > 0
        at_rest(rig)


def test_f23_request_larger_than_the_pool(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, pages=10, max_model_len=1024)
    for prompt, count in ((100, 62), (161, 1), (1024, 1)):
        fault = rig.ask([7] * prompt, max_tokens=count).fault
        assert fault is not None and fault.code == "context_length_exceeded"
    assert rig.ask(range(100), max_tokens=61).tokens == list(range(100, 161))
    assert rig.ask([7] * 160, max_tokens=1).tokens == [8]


def test_warm_images_beyond_the_host_budget(fleet: SignatureFleet) -> None:
    """Host room for two images, pool room for three adapters, twelve wanted at once."""
    rig = Rig(fleet.base, num_slots=4, host_adapter_bytes=2 * 24_576, max_num_seqs=3)
    requests = {rig.submit(PROMPT, fleet.adapter(k)): k for k in range(12)}
    rig.run()
    assert {r: rig.answer(r).tokens for r in requests} == {
        r: [k + 1] * 8 for r, k in requests.items()
    }
    at_rest(rig)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_f43_thrash_many_adapters_over_four_slots(fleet: SignatureFleet, count: int) -> None:
    rig = Rig(fleet.base, num_slots=5, max_queue=2000, adapter_wait_limit_s=1e9)
    choose = random.Random(43)
    wanted = [choose.randrange(60) for _ in range(count)]
    requests = {rig.submit(PROMPT, fleet.adapter(k), max_tokens=3): k for k in wanted}
    rig.run()
    for request, k in requests.items():
        assert rig.answer(request).tokens == [k + 1] * 3
    at_rest(rig)


def test_what_adapters_became_is_known_before_tokens_are_awaited(fleet: SignatureFleet) -> None:
    """A step long before it need be, beside an answer of many steps."""
    rig = Rig(fleet.base)
    rig.submit([5, 6], max_tokens=100)
    call = rig.load(fleet.adapter(20), hot=True)
    for _ in range(90):
        rig.engine.begin_step()
        replies = rig.engine.take_replies()
        events = [event.status.tier for event in rig.engine.take_events()]
        rig.engine.end_step()
        if replies:
            break
        time.sleep(0.005)
        assert not rig.engine.take_replies() and not rig.engine.take_events()
    assert [reply.call_id for reply in replies] == [call] and events[-1] == "hot"
    assert rig.engine.parts.scheduler.num_running == 1


def test_images_that_share_a_slab_are_their_own(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU machine, where host memory is pinned in large pieces."""
    monkeypatch.setattr(HostArena, "make", lambda arena, size: torch.empty(size).byte())
    rig = Rig(fleet.base)
    arena = rig.engine.parts.residency._warm._arena
    arena._pin = True
    signatures = [20, 33, 95, 96, 150, 191]
    for _ in range(2):
        for k in signatures:
            assert rig.ask([5, 6], fleet.adapter(k), max_tokens=3).tokens == [k + 1] * 3
            rig.evict(fleet.adapter(k).digest, to="warm")
        rig.run()
    assert len(arena._slabs) == 1
    offsets = {e.extent.offset for e in rig.engine.parts.residency._warm._entries.values()}
    assert len(offsets) == len(signatures)

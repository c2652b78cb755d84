"""Names to versions: atomic, one entry a name, failures visible, nothing unchecked served."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest, Registered, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.errors import AdapterError, AdapterUnavailable, RequestError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.malformed import KINDS
from tests.adapters.spoil import write_good


@pytest.fixture
def registry(base: Path, tmp_path: Path) -> Registry:
    """An empty registry whose folders and roots are the test's own."""
    served = ServedBase(read_geometry(base), "demo", max_rank=64, itemsize=4, folder=base)
    return Registry(served, relative_to=tmp_path, roots=[tmp_path], cache=tmp_path / "cache")


def add(registry: Registry, name: str, source: str, **options: bool) -> AdapterEntry:
    """Register and give the entry."""
    return registry.register(AdapterRequest(name, source), **options).entry


def load(registry: Registry, name: str, path: str, *, replacing: bool = False) -> Registered:
    """Register the folder that a client names."""
    return registry.register(registry.from_client(name, path), replacing=replacing)


def test_register_and_resolve(registry: Registry, tmp_path: Path) -> None:
    """MODELS: what is listed about an adapter; the digest is computed when first needed."""
    folder = write_good(tmp_path / "a")
    request = AdapterRequest("acme/legal-v2", "./a", pin="hot", priority=3)
    entry = registry.register(request).entry
    assert registry.resolve("acme/legal-v2") == entry and registry.entries() == (entry,)
    assert (entry.path, entry.source, entry.pin, entry.priority) == (str(folder), "./a", "hot", 3)
    assert entry.rank == 4 and entry.modules == ("q_proj", "v_proj") and entry.num_bound == 4
    assert entry.num_bytes == 4 * 4 * 2 * (64 + 64 + 64 + 32)
    assert entry.state == "ready" and entry.digest is None and entry.generation == 1
    served = registry.with_digest("acme/legal-v2")
    assert served.digest is not None and len(served.digest) == 64 and served.generation == 1
    assert registry.with_digest("acme/legal-v2") == registry.resolve("acme/legal-v2") == served


def test_dummy_and_demo_sources(registry: Registry, tmp_path: Path) -> None:
    """Sources other than folders; a dummy is written below the cache."""
    entry = add(registry, "random", "dummy:rank=3,targets=attention")
    assert entry.rank == 3 and entry.num_bound == 8
    assert Path(entry.path).parent == tmp_path / "cache"
    with pytest.raises(AdapterError, match="no such demo adapter"):
        add(registry, "x", "demo:x")


@pytest.mark.parametrize(
    "name",
    ["", "a/b/c", "/a", "a/", "a//b", "-a", ".a", "_a", "a b", "a:b", "ä", "a\n", "a\0", "a\x1b[2J",
     "..", "../a", "a/../b", "a/.b", "x" * 129, "a\u202eb", "base_ :a", "%61", "a\\b", "a*"],
)  # fmt: skip
def test_hostile_names(registry: Registry, tmp_path: Path, name: str) -> None:
    """MODELS, A-SEC: names outside the pattern, by both ways in; the reply is printable."""
    write_good(tmp_path / "a")
    for register in (
        lambda: add(registry, name, "a"),
        lambda: load(registry, name, str(tmp_path / "a")),
    ):
        with pytest.raises(AdapterError, match="adapter name") as caught:
            register()
        assert str(caught.value).isprintable() and caught.value.field == "lora_name"
    with pytest.raises(RequestError) as unknown:
        registry.resolve(name)
    assert str(unknown.value).isprintable()
    assert registry.entries() == ()


def test_names_that_differ_by_case(registry: Registry, tmp_path: Path) -> None:
    """MODELS: twins are refused, also of the base's name, and are not resolved."""
    write_good(tmp_path / "a")
    add(registry, "Acme/Legal", "a")
    with pytest.raises(AdapterError, match="differs only by case from Acme/Legal"):
        add(registry, "acme/legal", "a")
    with pytest.raises(AdapterError, match="the base is called demo"):
        add(registry, "Demo", "a")
    with pytest.raises(RequestError):
        registry.resolve("acme/legal")
    with pytest.raises(RequestError):
        registry.unregister("ACME/LEGAL")
    assert registry.resolve("Acme/Legal").generation == 1


def test_unknown_names_are_404(registry: Registry) -> None:
    """NOOP, MODELS: never the base by accident."""
    for name in ("acme", "demo", "demo:acme", "x" * 10_000):
        with pytest.raises(RequestError) as caught:
            registry.resolve(name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert len(str(caught.value)) < 200


def test_same_content_again_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    """MODELS: load of an existing name with the same digest is idempotent."""
    write_good(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    first = registry.register(AdapterRequest("acme", "a"))
    again = registry.register(AdapterRequest("acme", "copy"))
    assert (first.outcome, again.outcome) == ("added", "unchanged")
    assert again.entry.generation == 1 and again.entry.path == str(tmp_path / "a")
    moved = registry.register(AdapterRequest("acme", "copy"), replacing=True)
    assert (moved.outcome, moved.entry.generation) == ("replaced", 2)
    assert moved.entry.path == str(tmp_path / "copy")
    assert moved.previous is not None and moved.previous.digest == moved.entry.digest


def test_other_content_needs_replacing(registry: Registry, tmp_path: Path) -> None:
    """CACHE, MODELS: replacing gives a new generation and digest in one step."""
    write_good(tmp_path / "a")
    write_good(tmp_path / "b", seed=1)
    add(registry, "acme", "a")
    before = registry.with_digest("acme")
    with pytest.raises(AdapterError, match=r"already registered.*other content") as caught:
        add(registry, "acme", "b")
    assert caught.value.reason == "adapter_exists" and registry.resolve("acme") == before
    result = registry.register(AdapterRequest("acme", "b"), replacing=True)
    assert result.outcome == "replaced" and result.previous == before
    after = registry.with_digest("acme")
    assert after.generation == 2 and after.digest not in (None, before.digest)


def test_candidates_stand_for_nothing_until_they_are_entered(
    registry: Registry, tmp_path: Path
) -> None:
    """RELIABILITY 8.6: read and judged beside the served version; entered all together or not."""
    for seed, name in enumerate("abc"):
        write_good(tmp_path / name, seed=seed)
    add(registry, "acme", "a")
    before = registry.with_digest("acme")
    other = add(registry, "other", "a")
    candidate = registry.candidate(AdapterRequest("acme", "b"), replacing=True, digested=True)
    assert candidate.outcome == "replaced" and candidate.entry.digest not in (None, before.digest)
    assert registry.resolve("acme") == before
    new = registry.candidate(AdapterRequest("new", "c"))
    registry.enter((candidate, new), gone=(other,))
    assert registry.resolve("acme") == candidate.entry
    assert [entry.name for entry in registry.entries()] == ["acme", "new"]
    late = registry.candidate(AdapterRequest("acme", "c"), replacing=True)
    third = registry.candidate(AdapterRequest("third", "a"))
    register_again = registry.register(AdapterRequest("acme", "a"), replacing=True).entry
    with pytest.raises(AdapterError, match="acme: somebody else changed it") as caught:
        registry.enter((third, late))
    assert caught.value.reason == "generation"
    assert registry.get("third") is None and registry.resolve("acme") == register_again
    with pytest.raises(AdapterError, match="somebody else"):
        registry.enter((), gone=(before,))
    for stale in (late, third):
        registry.discard(stale)


def test_changed_in_place(registry: Registry, tmp_path: Path) -> None:
    """CACHE: a folder overwritten in place is other content, with or without a known digest."""
    for name in ("known", "unknown"):
        write_good(tmp_path / name)
        add(registry, name, name)
    registry.with_digest("known")
    for name in ("known", "unknown"):
        write_good(tmp_path / name, seed=7)
        with pytest.raises(AdapterError, match="other content"):
            add(registry, name, name)
        assert registry.register(AdapterRequest(name, name), replacing=True).outcome == "replaced"


def test_changed_before_its_first_use(registry: Registry, tmp_path: Path) -> None:
    """CACHE: what is served first was checked, and gets a generation of its own."""
    write_good(tmp_path / "a")
    add(registry, "acme", "a")
    write_good(tmp_path / "a", seed=7, lora_alpha=2)
    entry = registry.with_digest("acme")
    assert entry.generation == 2 and entry.digest is not None
    write_good(tmp_path / "b")
    add(registry, "broken", "b")
    KINDS["dora"].build(tmp_path / "b")
    with pytest.raises(AdapterError, match="use_dora"):
        registry.with_digest("broken")


def test_refused_adapters_leave_no_trace(registry: Registry, tmp_path: Path) -> None:
    """ISOL: a bad load enters nothing; a bad replacement leaves the old version standing."""
    write_good(tmp_path / "good")
    KINDS["overlap"].build(write_good(tmp_path / "bad"))
    with pytest.raises(AdapterError, match="begins"):
        load(registry, "acme", str(tmp_path / "bad"))
    assert registry.entries() == () and registry.get("acme") is None
    entry = load(registry, "acme", str(tmp_path / "good")).entry
    with pytest.raises(AdapterError, match="begins"):
        load(registry, "acme", str(tmp_path / "bad"), replacing=True)
    assert registry.resolve("acme").generation == entry.generation


def test_expected_digest_and_generation(registry: Registry, tmp_path: Path) -> None:
    """CACHE: a digest in the fleet file, and a client that replaces only what it saw."""
    write_good(tmp_path / "a")
    write_good(tmp_path / "b", seed=1)
    add(registry, "acme", "a")
    digest = registry.with_digest("acme").digest
    assert digest is not None
    entry = registry.register(AdapterRequest("other", "a", digest=f"sha256:{digest}")).entry
    assert entry.digest == digest
    with pytest.raises(AdapterError, match=f"digest: found {digest}, expected 00"):
        registry.register(AdapterRequest("third", "a", digest="00"))
    with pytest.raises(AdapterError, match="expected_generation: found 1, expected 7"):
        registry.register(AdapterRequest("acme", "b"), replacing=True, expected_generation=7)
    with pytest.raises(AdapterError, match="expected_generation: found 0, expected 7"):
        registry.register(AdapterRequest("new", "b"), expected_generation=7)
    changed = registry.register(AdapterRequest("acme", "b"), replacing=True, expected_generation=1)
    assert changed.outcome == "replaced"
    with pytest.raises(AdapterError, match="expected_generation"):
        registry.unregister("acme", expected_generation=1)


def test_unregister(registry: Registry, tmp_path: Path) -> None:
    """MODELS: unload, unload twice, and a later load under the name has a larger generation."""
    write_good(tmp_path / "a")
    entry = add(registry, "acme", "a")
    assert registry.unregister("acme") == entry and registry.entries() == ()
    with pytest.raises(RequestError) as caught:
        registry.unregister("acme")
    assert caught.value.status == 404 and caught.value.param == "lora_name"
    assert add(registry, "acme", "a").generation > entry.generation


def test_failed_sources_are_tried_again(registry: Registry, tmp_path: Path) -> None:
    """F40, ISOL: a name that cannot be had says why and since when; retried, it is had; a served
    version never fails by somebody else's retry; only what may come back has a time."""
    registry.register_all([AdapterRequest("acme", "a", pin="hot")])
    failed = registry.get("acme")
    assert failed is not None and failed.state == "failed" and failed.failed_at > 1.6e9
    assert (failed.attempts, failed.retry_at) == (1, None)
    with pytest.raises(AdapterError, match="no such folder"):
        registry.retry("acme")
    registry.enter_failed(failed.request, AdapterUnavailable("the bucket does not answer"))
    failed = registry.get("acme")
    assert failed is not None and failed.attempts == 3 and failed.detail.startswith("the bucket")
    assert failed.retry_at is not None and 15 < failed.retry_at - time.monotonic() <= 20
    with pytest.raises(AdapterUnavailable, match="adapter acme: the bucket") as caught:
        registry.resolve("acme")
    assert caught.value.retry_at_s == failed.retry_at
    write_good(tmp_path / "a")
    ready = registry.retry("acme")
    assert (ready.state, ready.detail, ready.pin, ready.attempts) == ("ready", "", "hot", 0)
    registry.enter_failed(failed.request, AdapterUnavailable("late news"))
    assert registry.resolve("acme") == registry.retry("acme") == ready
    with pytest.raises(RequestError):
        registry.retry("nobody")


def test_register_all_reports_every_bad_adapter(registry: Registry, tmp_path: Path) -> None:
    """LOAD: all bad adapters of a fleet in one run, listed as failed; the good ones serve."""
    write_good(tmp_path / "good")
    for kind in ("dora", "overlap", "no-weights"):
        KINDS[kind].build(write_good(tmp_path / kind))
    names = ["good", "dora", "overlap", "no-weights", "absent"]
    failures = registry.register_all(AdapterRequest(name, name) for name in names)
    assert [name for name, _ in failures] == names[1:]
    states = {entry.name: entry.state for entry in registry.entries()}
    assert states == {"good": "ready"} | dict.fromkeys(names[1:], "failed")
    with pytest.raises(AdapterUnavailable, match="use_dora"):
        registry.resolve("dora")
    write_good(tmp_path / "dora")
    assert add(registry, "dora", "dora").state == "ready"


def test_adapters_are_listed_in_the_order_of_the_fleet(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads read them; the first one asked for is read last."""
    register, second = registry.register, threading.Event()

    def slow(request: AdapterRequest) -> Registered:
        if request.name == "b":
            assert second.wait(10)
        done = register(request)
        second.set()
        return done

    monkeypatch.setattr(registry, "register", slow)
    for name in ("b", "c", "a"):
        write_good(tmp_path / name)
    registry.register_all(AdapterRequest(name, name) for name in ("b", "c", "a"))
    assert [entry.name for entry in registry.entries()] == ["b", "c", "a"]


def test_twenty_parallel_loads_of_one_name(registry: Registry, tmp_path: Path) -> None:
    """F37: one entry, one generation; the others find it there."""
    write_good(tmp_path / "a")
    barrier = threading.Barrier(20)

    def attempt(_: int) -> str:
        barrier.wait()
        return load(registry, "acme", str(tmp_path / "a")).outcome

    with ThreadPoolExecutor(20) as pool:
        outcomes = sorted(pool.map(attempt, range(20)))
    assert outcomes == ["added"] + ["unchanged"] * 19
    assert [entry.generation for entry in registry.entries()] == [1]
    assert registry._reading.idle
    registry._entries.check_integrity()


def test_parallel_loads_of_two_versions(registry: Registry, tmp_path: Path) -> None:
    """F33: readers see whole versions only, and generations only grow."""
    folders = [write_good(tmp_path / str(seed), seed=seed) for seed in range(2)]
    add(registry, "acme", "0")
    digests = {str(f): registry.with_digest("acme").digest for f in folders[:1]}
    registry.register(AdapterRequest("acme", "1"), replacing=True)
    digests[str(folders[1])] = registry.with_digest("acme").digest
    stop, seen = threading.Event(), list[int]()

    def watch() -> None:
        while not stop.is_set():
            entry = registry.with_digest("acme")
            assert entry.digest == digests[entry.path]
            seen.append(entry.generation)

    def change(turn: int) -> None:
        load(registry, "acme", str(folders[turn % 2]), replacing=True)

    with ThreadPoolExecutor(6) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        list(pool.map(change, range(60)))
        stop.set()
        for watcher in watchers:
            watcher.result()
    assert seen and registry.resolve("acme").generation >= 2


def test_load_and_unload_race(registry: Registry, tmp_path: Path) -> None:
    """RACE: loads and unloads of a few names from many threads: every call ends well or by 404."""
    for seed in range(3):
        write_good(tmp_path / str(seed), seed=seed)

    def work(turn: int) -> None:
        name, folder = f"n{turn % 3}", str(tmp_path / str(turn % 2))
        if turn % 4:
            load(registry, name, folder, replacing=True)
            return
        try:
            registry.unregister(name)
        except RequestError as error:
            assert error.status == 404

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    generations = [entry.generation for entry in registry.entries()]
    assert len(set(generations)) == len(generations) and registry._reading.idle
    registry._entries.check_integrity()


def test_a_cfg_20_and_f38_another_base_is_noted(base: Path, tmp_path: Path) -> None:
    """A-CFG-20, F38: a filled-in base with another last part earns a note; an equal one none."""
    served = ServedBase(read_geometry(base), "demo", model="acme/Tiny-Llama")
    registry = Registry(served, relative_to=tmp_path)
    for index, (name, noted) in enumerate(
        [("acme/Tiny-Llama", 0), ("/srv/models/tiny-llama/", 0), (None, 0), ("acme/Other", 1)]
    ):
        write_good(tmp_path / f"a{index}", base_model_name_or_path=name)
        notes = add(registry, f"a{index}", f"a{index}").notes
        assert sum("trained on 'acme/Other', served on" in note for note in notes) == noted


def test_load_stays_below_the_roots(registry: Registry, tmp_path: Path, base: Path) -> None:
    """A-SEC-01: by the way clients take, with the entry's path the real one."""
    folder = write_good(tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    assert load(registry, "acme", str(tmp_path / "link")).entry.path == str(folder)
    for path in (str(base), "/etc", "../..", "http://h/a"):
        with pytest.raises(AdapterError):
            load(registry, "other", path)
    assert registry.get("other") is None


def test_entries_are_values(registry: Registry, tmp_path: Path) -> None:
    """What a caller holds never changes under it."""
    write_good(tmp_path / "a")
    entry = add(registry, "acme", "a")
    copy = replace(entry)
    registry.set_kept("acme", "hot", 60.0)
    assert entry == copy

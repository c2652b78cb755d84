"""The warm tier: one build a digest, a byte budget, nothing held or pinned ever leaves."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from multilora_cli.adapters import host_arena
from multilora_cli.adapters.host_arena import HostArena
from multilora_cli.adapters.host_cache import HostCache
from multilora_cli.adapters.lease import Version
from multilora_cli.adapters.residency_entry import NoHostRoom
from multilora_cli.errors import AdapterError
from multilora_kernels.layout import ImagePlan

PAGE = 4096


@dataclass(frozen=True)
class Fake:
    """A version whose image is `pages` pages full of the digest's first byte."""

    digest: str
    pages: int = 1
    name: str = "acme"
    path: str = "/nowhere"


def opener(
    delay_s: float = 0.0, fail: Callable[[Version], Exception | None] = lambda version: None
) -> Callable[[Version], tuple[ImagePlan, Callable[[torch.Tensor], object]]]:
    """Builds images of `Fake` versions."""

    def open_version(version: Version) -> tuple[ImagePlan, Callable[[torch.Tensor], object]]:
        assert isinstance(version, Fake)
        plan = ImagePlan(version.pages, PAGE, 4, (), {}, 0)

        def fill(out: torch.Tensor) -> None:
            time.sleep(delay_s)
            error = fail(version)
            if error is not None:
                raise error
            out.fill_(ord(version.digest[0]))

        return plan, fill

    return open_version


def test_least_recently_used_leaves_first() -> None:
    """The budget holds; a hold or a use moves an image to the end of the queue."""
    cache = HostCache(3 * PAGE, opener())
    for digest in "abc":
        cache.load(Fake(digest))
        cache.release(digest)
    assert cache.hold("a") is not None
    cache.release("a")
    cache.load(Fake("d"))
    assert [cache.nbytes(d) for d in "abcd"] == [PAGE, 0, PAGE, PAGE]
    assert cache.used_bytes == 3 * PAGE and cache.evictions == 1
    assert cache.take_left() == ["b"] and cache.take_left() == [], "told once"
    cache.check_integrity()


def test_held_and_pinned_stay() -> None:
    """NoHostRoom rather than taking what somebody uses."""
    cache = HostCache(2 * PAGE, opener())
    cache.load(Fake("a"))
    cache.load(Fake("b"))
    cache.pin("b", True)
    cache.release("b")
    with pytest.raises(NoHostRoom):
        cache.load(Fake("c"))
    assert cache.hold("c") is None and cache.drop("a") == 0
    cache.pin("b", False)
    assert bool((cache.load(Fake("c")).pages == ord("c")).all())
    assert cache.nbytes("b") == 0 and cache.nbytes("a") == PAGE
    cache.check_integrity()


def test_drop_frees_at_once() -> None:
    """An unloaded adapter's bytes are free, pinned or not, and reported."""
    cache = HostCache(4 * PAGE, opener())
    cache.load(Fake("a", pages=3))
    cache.pin("a", True)
    cache.release("a")
    assert cache.drop("a") == 3 * PAGE and cache.used_bytes == 0
    assert cache.drop("a") == 0
    with pytest.raises(KeyError):
        cache.release("a")


def test_too_large_for_the_budget() -> None:
    """An image that never fits is an error with both sizes, not a wait."""
    cache = HostCache(2 * PAGE, opener())
    with pytest.raises(AdapterError, match=r"acme: its image takes 12 KiB.*is 8 KiB"):
        cache.load(Fake("a", pages=3))
    cache.check_integrity()


def test_one_build_for_many_threads() -> None:
    """F37: twenty threads, one build, twenty holds."""
    cache = HostCache(4 * PAGE, opener(delay_s=0.05))
    threads = [threading.Thread(target=cache.load, args=(Fake("a"),)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.builds == 1
    for _ in range(20):
        assert cache.drop("a") == 0
        cache.release("a")
    with pytest.raises(ValueError, match="more often than held"):
        cache.release("a")
    assert cache.drop("a") == PAGE


def test_a_failed_build_reaches_all_and_leaves_nothing() -> None:
    """ISOL: everybody who waits gets the error; the next load starts afresh."""
    broken = [True]
    error = AdapterError("NaN")
    cache = HostCache(
        4 * PAGE, opener(delay_s=0.05, fail=lambda version: error if broken[0] else None)
    )
    failures: list[Exception] = []

    def load() -> None:
        try:
            cache.load(Fake("a"))
        except AdapterError as caught:
            failures.append(caught)

    threads = [threading.Thread(target=load) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 5 and cache.used_bytes == 0
    cache.check_integrity()
    broken[0] = False
    assert cache.load(Fake("a")).nbytes == PAGE


def test_random_walk() -> None:
    """5,000 operations against a model: holds, pins, budget, content."""
    rng = random.Random(3)
    cache = HostCache(12 * PAGE, opener())
    holds: dict[str, int] = {}
    sizes = {digest: 1 + index % 4 for index, digest in enumerate("abcdefghij")}
    for _ in range(5_000):
        digest = rng.choice(list(sizes))
        action = rng.randrange(6)
        if action == 0:
            try:
                image = cache.load(Fake(digest, pages=sizes[digest]))
            except NoHostRoom:
                kept = sum(sizes[d] for d, count in holds.items() if count)
                assert kept + sizes[digest] > 12 - 4, "room was there, at most four fragmented"
                continue
            assert image.digest == digest and bool((image.pages == ord(digest)).all())
            holds[digest] = holds.get(digest, 0) + 1
        elif action == 1 and cache.hold(digest) is not None:
            holds[digest] = holds.get(digest, 0) + 1
        elif action == 2:
            cache.drop(digest)
        elif holds.get(digest):
            cache.release(digest)
            holds[digest] -= 1
        for held, count in holds.items():
            assert not count or cache.nbytes(held) == sizes[held] * PAGE
        cache.check_integrity()


def test_arena_keeps_slabs_when_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned slabs are made large, ahead of use, and kept; images share them."""
    made: list[int] = []
    empty = torch.empty

    def fake_empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr("multilora_cli.adapters.host_arena.torch.empty", fake_empty)
    arena = HostArena(10 * PAGE, pin=True, slab_bytes=4 * PAGE)
    arena.prepare(8 * PAGE)
    assert made == [4 * PAGE, 4 * PAGE]
    extents = [arena.allocate(2 * PAGE) for _ in range(5)]
    assert made[2:] == [2 * PAGE] and None not in extents
    assert arena.allocate(1) is None
    given = [extent for extent in extents if extent is not None]
    arena.check_integrity(given)
    for extent in given:
        arena.release(extent)
    arena.check_integrity([])
    assert arena.reserved_bytes == arena.free_bytes == 10 * PAGE
    emptied: list[int] = []
    monkeypatch.setattr(
        host_arena, "_give_back_locked", lambda: emptied.append(arena.reserved_bytes)
    )
    assert arena.allocate(9 * PAGE) is not None  # unused slabs make way for a larger one
    assert arena.reserved_bytes <= 10 * PAGE
    assert emptied == [0], "torch would keep them locked beside it"


def test_pinned_slabs_have_the_sizes_that_torch_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the budget counts is what the machine has lost, whatever images are asked for."""
    locked = 0

    def lock(arena: HostArena, num_bytes: int) -> torch.Tensor:
        nonlocal locked
        locked += 1 << (num_bytes - 1).bit_length()  # torch's CachingHostAllocator
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(HostArena, "make", lock)
    choose = random.Random(5)
    for budget in (16, 23, 40):
        arena, locked = HostArena(budget * PAGE, pin=True, slab_bytes=4 * PAGE), 0
        arena.prepare(3 * PAGE)
        held = [arena.allocate(choose.choice((1, 2, 3, 5, 7)) * PAGE) for _ in range(12)]
        assert locked == arena.reserved_bytes <= budget * PAGE
        assert sum(extent is not None for extent in held) >= 4
    small = HostArena(10 * PAGE, pin=True, slab_bytes=4 * PAGE)
    assert small.allocate(9 * PAGE) is not None, "one that is alone may round up"


@pytest.mark.parametrize("budget", [300_000_000, 500_000_000, 2**28 - 1, 2**28 + 5000, 4095])
def test_pinning_ahead_ends_whatever_the_budget(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once dropped what it had just pinned to make room for the last few bytes, for ever."""
    made: list[int] = []

    def lock(arena: HostArena, num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        assert len(made) < 20
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(HostArena, "make", lock)
    arena = HostArena(budget, pin=True)
    arena.prepare(budget)
    assert sum(made) == arena.reserved_bytes <= budget
    assert arena.reserved_bytes > budget * 3 // 4 or budget < PAGE


def test_arena_merges_and_picks_the_tightest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best fit, and neighbours grow together again."""
    empty = torch.empty
    monkeypatch.setattr(
        "multilora_cli.adapters.host_arena.torch.empty",
        lambda size, *, dtype, pin_memory: empty(size, dtype=dtype),
    )
    arena = HostArena(8 * PAGE, pin=True, slab_bytes=8 * PAGE)
    a, b, c, d = (arena.allocate(size * PAGE) for size in (3, 1, 1, 3))
    assert a and b and c and d
    arena.release(a)
    arena.release(c)
    tight = arena.allocate(PAGE)
    assert tight is not None and tight.offset == c.offset
    arena.release(b)
    whole = arena.allocate(4 * PAGE)
    assert whole is not None and whole.offset == 0
    arena.check_integrity([whole, tight, d])
    with pytest.raises(ValueError, match="held twice"):
        arena.check_integrity([whole, tight, d, b])


def test_pinning_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB take 0.15 s: the step thread asks for images meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(arena: HostArena, num_bytes: int) -> torch.Tensor:
        begun.set()
        assert go_on.wait(10)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(HostArena, "make", slow)
    cache = HostCache(2 * PAGE, opener())
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(cache.load, Fake("a"))
        assert begun.wait(10)
        assert cache.nbytes("other") == 0 and cache.hold("other") is None
        assert cache.used_bytes == 0
        cache.check_integrity()
        go_on.set()
        assert loading.result(10).nbytes == PAGE
    cache.check_integrity()

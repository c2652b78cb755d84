"""The disk store: publish, verify, evict, share, and every way a disk fails (F50 to F57)."""

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.disk import private_folder, try_lock
from multilora_cli.adapters.peft import WEIGHTS_NAME as WEIGHTS
from multilora_cli.adapters.peft_config import CONFIG_NAME as CONFIG
from multilora_cli.adapters.store import DiskStore, Ref
from multilora_cli.errors import AdapterUnavailable, BadInput, MloraError

BODY = 1000
ENTRY = BODY + 2  # the config is {}


def put(store: DiskStore, number: int, source: str = "", num_bytes: int = BODY) -> Ref:
    """An entry whose content is decided by `number`."""
    body = number.to_bytes(8, "little") + bytes(num_bytes - 8)
    with store.staging(len(body) + 2) as staging:
        with staging.writing(CONFIG) as file:
            file.write(b"{}")
        with staging.writing(WEIGHTS) as file:
            file.write(body[:500])
            file.write(body[500:])
        return store.publish(staging, source or f"hf://o/n{number}@main", "r1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """Room for ten entries."""
    store = DiskStore(tmp_path / "store", 10 * ENTRY + 5 * 4096)
    yield store
    store.close()


def again(store: DiskStore, budget: int = 2**30) -> DiskStore:
    """As a process that starts after this one has died."""
    os.close(store._use._descriptor)
    store._use._descriptor = -1
    return DiskStore(store.root, budget)


def test_published_and_found_again(store: DiskStore) -> None:
    """By digest and by source, in this process and the next; the same content is one entry."""
    ref = put(store, 1)
    folder = store.acquire(ref.digest)
    assert folder is not None and sorted(os.listdir(folder)) == [CONFIG, WEIGHTS, "manifest.json"]
    assert put(store, 1, "s3://b/x/").digest == ref.digest
    assert len(os.listdir(store.root / "entries")) == 1
    assert os.listdir(store.root / "partial") == []
    other = again(store)
    assert other.lookup(ref.source) == ref and other.acquire(ref.digest) == folder
    assert other.lookup("hf://o/unknown@main") is None and other.acquire("0" * 64) is None
    other.check_integrity()
    other.close()


def test_names_are_digests(store: DiskStore) -> None:
    """Nothing else reaches the file system."""
    for name in ("", "..", "../../etc", "A" * 64, "0" * 63, "0" * 64 + "\n"):
        with pytest.raises(ValueError, match="not a digest"):
            store.acquire(name)


# ---------------------------------------------------------------- F54, F55


def flip(path: Path, offset: int = -1) -> None:
    """One bit, size and name unchanged."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "grow", "gone", "link", "folder"])
def test_f54_damage_is_found(store: DiskStore, name: str, how: str, tmp_path: Path) -> None:
    """F54: whatever happens to a file, the entry is not served, removed, counted, fetched anew."""
    ref = put(store, 1)
    path = store.root / "entries" / ref.digest / name
    if how == "flip":
        flip(path, 1)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "grow":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        content = path.read_bytes()
        path.unlink()
        if how == "link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "folder":
            path.mkdir()
    assert store.acquire(ref.digest) is None
    assert store.counts.corrupt == 1 and os.listdir(store.root / "entries") == []
    assert put(store, 1).digest == ref.digest
    assert store.acquire(ref.digest) is not None


def test_f54_a_file_more(store: DiskStore) -> None:
    """F54: a weight file put beside the others would be read in their place: refused."""
    ref = put(store, 1)
    (store.root / "entries" / ref.digest / "adapter_model-00001-of-00001.safetensors").touch()
    assert store.acquire(ref.digest) is None and store.counts.corrupt == 1


def test_f54_found_by_the_next_process(store: DiskStore) -> None:
    """F54: a file that was changed behind a stopped process's back, times set back."""
    ref = put(store, 1)
    path = store.root / "entries" / ref.digest / WEIGHTS
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    other = again(store)
    assert other.acquire(ref.digest) is None and other.counts.corrupt == 1
    other.close()


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, 1.5, True])
def test_f55_another_format(store: DiskStore, version: object) -> None:
    """F55: entries and refs of an older or newer format are not read but made anew."""
    ref = put(store, 1)
    for path in (store.root / "entries" / ref.digest / "manifest.json", *_refs(store)):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"format": version}))
    assert store.lookup(ref.source) is None and store.acquire(ref.digest) is None
    put(store, 1)
    assert store.acquire(ref.digest) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\xff", "{" * 3000])
def test_f55_broken_refs(store: DiskStore, text: str) -> None:
    """F55: a ref that is none is as if it were not there."""
    ref = put(store, 1)
    (path,) = _refs(store)
    path.write_bytes(text.encode("latin-1"))
    assert store.lookup(ref.source) is None
    fields = {"format": 1, "source": "s3://other/", "revision": "", "digest": "../x"}
    path.write_text(json.dumps(fields | {"fetched_at": 0.0}))
    assert store.lookup(ref.source) is None


def _refs(store: DiskStore) -> list[Path]:
    return list((store.root / "refs").iterdir())


# ---------------------------------------------------------------- F56


def test_f56_unsafe_folders(tmp_path: Path) -> None:
    """F56: open to others, a link, a file: refused, the reason told."""
    for mode in (0o755, 0o777, 0o701, 0o770):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(BadInput, match=f"mode {mode:04o} lets other users in") as caught:
            DiskStore(folder, 2**30)
        assert caught.value.hint is not None and "chmod 700" in caught.value.hint
    real = tmp_path / "real"
    private_folder(real)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(BadInput, match=r"link or a file|File exists"):
            DiskStore(tmp_path / name, 2**30)
    (real / "entries").symlink_to(tmp_path)
    with pytest.raises(BadInput, match="entries: is a link"):
        DiskStore(real, 2**30)
    with pytest.raises(BadInput, match=r"File exists|Not a directory"):
        DiskStore(tmp_path / "file" / "x", 2**30)


def test_f56_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F56: a folder of another user."""
    private_folder(tmp_path / "s")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadInput, match="belongs to user"):
        DiskStore(tmp_path / "s", 2**30)


def test_modes(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask: folders 0700, files 0600."""
    old = os.umask(0)
    try:
        put(store, 1)
    finally:
        os.umask(old)
    for path in [store.root, *store.root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# ---------------------------------------------------------------- F57, sharing


@pytest.mark.parametrize("rounds", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_f57_budget(tmp_path: Path, rounds: int) -> None:
    """F57: never more than the budget; the least recently used go; those in use stay."""
    seed = 5
    choose = random.Random(seed)
    store = DiskStore(tmp_path / "s", 12 * (ENTRY + 400))
    used = [put(store, 10**6).digest, put(store, 10**6 + 1).digest]
    order: list[str] = []
    for number in range(rounds):
        ref = put(store, number)
        store.release(ref.digest)
        _age(store, ref.digest, 2 * number)
        order.append(ref.digest)
        if number % 7 == 0:
            again = choose.choice([d for d in order if (store.root / "entries" / d).is_dir()])
            assert store.acquire(again) is not None
            store.release(again)
            _age(store, again, 2 * number + 1)
            order.remove(again)
            order.append(again)
        present = set(os.listdir(store.root / "entries"))
        assert store.total_bytes() <= 12 * (ENTRY + 400) + 400, f"seed {seed}"
        assert set(used) <= present
        kept = [digest for digest in order if digest in present]
        assert kept == order[-len(kept) :], f"seed {seed}: not the least recently used went"
    store.release(used[0])
    store.make_room(12 * (ENTRY + 400) - 1500)
    assert used[0] not in os.listdir(store.root / "entries")
    store.check_integrity()
    store.close()


def _age(store: DiskStore, digest: str, second: int) -> None:
    """Times as if `second` seconds had passed; a fast test has them all in one tick."""
    os.utime(store.root / "entries" / digest / "manifest.json", (second, second))


def test_what_cannot_fit(store: DiskStore) -> None:
    """More than the budget, or a budget full of what is in use: need and have are told."""
    with pytest.raises(AdapterUnavailable, match="in use"):
        put(store, 1, num_bytes=10**6)
    with pytest.raises(AdapterUnavailable, match=r"B needed, .* left of the budget of"):
        for number in range(100):
            put(store, number)
    assert store.counts.evicted == 0
    store.check_integrity()


def test_in_use_by_another_process(tmp_path: Path) -> None:
    """Another process's entries stay while it lives, and may go once it is dead."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.path.insert(0, ".")
        from multilora_cli.adapters.store import DiskStore
        store = DiskStore(Path(sys.argv[1]), 2**30)
        print(store.acquire(sys.argv[2]), flush=True)
        sys.stdin.read()
        """
    )
    store = DiskStore(tmp_path / "s", 2**30)
    ref = put(store, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(store.root), ref.digest],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    assert ref.digest in process.stdout.readline()
    store.release(ref.digest)
    with pytest.raises(AdapterUnavailable):
        store.make_room(2**30)
    process.kill()
    process.communicate()
    store.make_room(2**30)
    assert os.listdir(store.root / "entries") == []
    store.close()


def _churn(root: str, seed: int) -> None:
    choose = random.Random(seed)
    store = DiskStore(Path(root), 6 * (ENTRY + 400))
    for _ in range(12):
        number = choose.randrange(8)
        with store.fetching(f"hf://o/n{number}@main"):
            ref = store.lookup(f"hf://o/n{number}@main")
            folder = store.acquire(ref.digest) if ref is not None else None
            if folder is None:
                ref = put(store, number)
                folder = store.acquire(ref.digest)
        assert folder is not None and ref is not None
        data = (folder / WEIGHTS).read_bytes()  # in use: nobody may take it away
        assert int.from_bytes(data[:8], "little") == number
        store.release(ref.digest)
    assert store.counts.corrupt == 0
    store.close()


def test_two_processes_share(tmp_path: Path) -> None:
    """Fetch, use and evict in two processes at once: nothing is lost, damaged or taken away."""
    context = multiprocessing.get_context("spawn")
    root = str(tmp_path / "s")
    workers = [context.Process(target=_churn, args=(root, seed)) for seed in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    store = DiskStore(tmp_path / "s", 2**30)
    store.check_integrity()
    assert os.listdir(store.root / "partial") == [] and len(os.listdir(store.root / "users")) == 1
    store.close()


def test_orphans_go_at_start(store: DiskStore) -> None:
    """What dead processes left, and what is no entry; what living ones write stays."""
    with store.staging(10) as staging:
        partial = store.root / "partial"
        (partial / "123-deadbeef-0").mkdir()
        (partial / "123-deadbeef-0" / WEIGHTS).touch()
        (partial / "stray").touch()
        (store.root / "users" / "123-deadbeef").touch()
        (store.root / "entries" / ("0" * 64)).mkdir()
        (store.root / "entries" / "stray").mkdir()
        other = DiskStore(store.root, 2**30)
        assert os.listdir(partial) == [staging.folder.name] and other.counts.orphans == 4
        assert os.listdir(store.root / "entries") == []
        assert len(os.listdir(store.root / "users")) == 2
        other.close()


def test_waiting_for_another_is_bounded(tmp_path: Path) -> None:
    """A process that never lets go of a source: told, not waited for without end."""
    store = DiskStore(tmp_path / "s", 2**30, wait_s=0.05)
    with store.fetching("hf://o/n@main"):
        with (
            pytest.raises(AdapterUnavailable, match="another process holds"),
            store.fetching("hf://o/n@main"),
        ):
            pass
        with store.fetching("hf://o/other@main"):
            pass
    descriptor = try_lock(tmp_path / "lock")
    assert descriptor is not None and try_lock(tmp_path / "lock") is None
    os.close(descriptor)
    store.close()


def test_threads(tmp_path: Path) -> None:
    """Many threads publish and use the same few entries within a small budget."""
    store = DiskStore(tmp_path / "s", 2**30)
    errors: list[Any] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(15):
                ref = put(store, choose.randrange(4))
                assert store.acquire(ref.digest) is not None
        except (MloraError, AssertionError, OSError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(os.listdir(store.root / "entries")) == 4
    shutil.rmtree(store.root / "refs")
    store.check_integrity()
    store.close()

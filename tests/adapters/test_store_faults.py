"""The disk store on a disk that is full, fails at any operation, or stops for good (F50 to F53)."""

import errno
import os
from pathlib import Path

import pytest

from multilora_cli.adapters.disk import Disk
from multilora_cli.adapters.store import DiskStore, Ref
from multilora_cli.errors import AdapterUnavailable
from tests.adapters.test_store import ENTRY, again, put


class FaultyDisk(Disk):
    """Fails the N-th operation: with an errno, or as if the machine stopped there for good."""

    def __init__(self) -> None:
        self.left = -1  # operations until it fails
        self.error: int | None = None  # None: stop
        self.done = 0
        self.room: int | None = None  # bytes that can still be written

    def step(self) -> None:
        self.done += 1
        if self.left == 0:
            if self.error is None:
                raise PowerCut
            self.left = -1
            raise OSError(self.error, os.strerror(self.error))
        self.left -= self.left > 0

    def create(self, path: Path) -> int:
        self.step()
        return super().create(path)

    def write(self, descriptor: int, part: memoryview) -> None:
        self.step()
        if self.room is not None:
            os.write(descriptor, part[: self.room])
            if len(part) > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= len(part)
            return
        if self.left == 0 and self.error is None:
            os.write(descriptor, part[: len(part) // 2])  # the power fails while it is written
        super().write(descriptor, part)

    def sync(self, descriptor: int) -> None:
        self.step()
        super().sync(descriptor)

    def make_folder(self, path: Path) -> None:
        self.step()
        super().make_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self.step()
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        if self.left != 0 or self.error is not None:
            super().remove(path)


class PowerCut(BaseException):
    """Nothing runs after this."""


def faulty(folder: Path) -> tuple[DiskStore, FaultyDisk, Ref]:
    """A store that holds one entry, on a disk that can fail."""
    disk = FaultyDisk()
    store = DiskStore(folder, 2**30, disk=disk)
    return store, disk, put(store, 0)


def steps(folder: Path) -> int:
    """File operations of one publication."""
    store, disk, _ = faulty(folder)
    before = disk.done
    put(store, 1)
    store.close()
    return disk.done - before


def test_f52_crash_at_every_step(tmp_path: Path) -> None:
    """F52: whole or absent after a restart, what was there stays, nothing of the dead is left."""
    total = steps(tmp_path / "count")
    assert total > 12
    for step in range(total):
        store, disk, first = faulty(tmp_path / f"s{step}")
        disk.left = step
        with pytest.raises(PowerCut):
            put(store, 1)
        after = again(store)
        after.check_integrity()
        assert os.listdir(after.root / "partial") == []
        assert after.acquire(first.digest) is not None
        ref = after.lookup("hf://o/n1@main")
        assert ref is None or after.acquire(ref.digest) is not None
        second = put(after, 1)
        assert after.acquire(second.digest) is not None
        assert after.lookup("hf://o/n1@main") == second
        after.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_f51_f53_every_operation_fails_once(tmp_path: Path, error: int) -> None:
    """F51, F53: told in words, nothing left behind, and the next attempt goes well."""
    total = steps(tmp_path / "count")
    store, disk, first = faulty(tmp_path / "s")
    disk.error = error
    words = "no space left" if error in (errno.ENOSPC, errno.EDQUOT) else os.strerror(error)
    for step in range(total):
        disk.left = step
        with pytest.raises(AdapterUnavailable, match=words) as caught:
            put(store, step + 1)
        assert str(store.root) in caught.value.message
        disk.left = -1
        assert os.listdir(store.root / "partial") == []
        store.check_integrity()
        assert store.acquire(first.digest) is not None
        put(store, step + 1)
    store.close()


def test_f50_disk_full_after_k_bytes(tmp_path: Path) -> None:
    """F50: over 50 values of K; need and have are told, and nothing partial stays."""
    store, disk, first = faulty(tmp_path / "s")
    for room in range(0, ENTRY, ENTRY // 50):
        disk.room = room
        with pytest.raises(AdapterUnavailable, match=r"1002 B needed, .* free"):
            put(store, 1)
        assert os.listdir(store.root / "partial") == []
        assert len(os.listdir(store.root / "entries")) == 1
    disk.room = None
    assert store.acquire(first.digest) is not None
    store.close()


def test_f50_known_beforehand(tmp_path: Path) -> None:
    """F50: what cannot fit is refused before a byte is fetched; unused entries make room first."""

    class Small(Disk):
        free = 10**9

        def free_bytes(self, path: Path) -> int:
            return self.free

    disk = Small()
    store = DiskStore(tmp_path / "s", 2**30, disk=disk)
    refs = [put(store, number) for number in range(3)]
    disk.free = 0
    with pytest.raises(AdapterUnavailable, match="no space left: 1002 B needed, 0 B free"):
        put(store, 9)
    store.release(refs[1].digest)
    put(store, 9)  # evicting one entry was counted as room
    assert store.acquire(refs[1].digest) is None and store.counts.evicted == 1
    store.close()

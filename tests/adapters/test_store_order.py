"""What a power cut leaves depends on the order of writes: nothing gets its name unsynced (F52)."""

import os
from pathlib import Path

import pytest

from multilora_cli.adapters.disk import Disk
from multilora_cli.adapters.store import DiskStore
from tests.adapters.test_store import again, put
from tests.adapters.test_store_faults import PowerCut, faulty


class OrderedDisk(Disk):
    """Knows which bytes and names have reached the medium; a rename of others is an error."""

    def __init__(self) -> None:
        self.unsynced_files: set[Path] = set()
        self.unsynced_names: set[Path] = set()  # folders with new names
        self.renames = 0
        self._paths: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self.unsynced_names.add(path.parent)
        return descriptor

    def write(self, descriptor: int, part: memoryview) -> None:
        self.unsynced_files.add(self._paths[descriptor])
        super().write(descriptor, part)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.unsynced_files.discard(self._paths[descriptor])

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.unsynced_names.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        inside = {path for path in self.unsynced_files if path.is_relative_to(source)}
        assert not inside, f"named before its bytes were written: {inside}"
        if source.is_dir():
            assert source not in self.unsynced_names, "named before its files have their names"
            assert "manifest.json" in os.listdir(source), "the manifest would come later"
        self.renames += 1
        super().rename(source, target)
        self.unsynced_names.add(target.parent)


def test_f52_bytes_before_names(tmp_path: Path) -> None:
    disk = OrderedDisk()
    store = DiskStore(tmp_path / "store", 2**30, disk=disk)
    for index in range(3):
        put(store, index)
    assert disk.renames == 6, "an entry and a ref each"
    root = tmp_path / "store"
    left = {path for path in disk.unsynced_names if path in (root / "entries", root / "refs")}
    assert not left, f"names that a power cut may lose: {left}"
    store.close()


def test_f52_a_source_that_moves_on_is_never_lost(tmp_path: Path) -> None:
    """A crash at any step of its second publication: the first version or the second is known."""
    source = "hf://o/moving@main"
    store, disk, _ = faulty(tmp_path / "count")
    put(store, 5, source)
    before = disk.done
    put(store, 6, source)
    store.close()
    total = disk.done - before
    found = set()
    for step in range(total):
        store, disk, _ = faulty(tmp_path / f"s{step}")
        old = put(store, 5, source)
        disk.left = step
        with pytest.raises(PowerCut):
            put(store, 6, source)
        after = again(store)
        ref = after.lookup(source)
        assert ref is not None and after.acquire(ref.digest) is not None, step
        found.add(ref.digest == old.digest)
        after.close()
    assert found == {True, False}, "both outcomes were met"

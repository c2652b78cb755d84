"""How a load reads an adapter: one version, few times, and what it has to say reaches the log."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.adapters import digest as digests
from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.adapters.safetensors_header import FileIdentity
from multilora_cli.adapters.vectors import UnknownBase
from multilora_cli.engine import adapter_reader
from multilora_cli.engine import loader_threads as loader_threads_module
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.loader_threads import loader_threads
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.pages import kv_page_bytes
from multilora_kernels.layout import ImagePlan
from tests.adapters.adapter_oracle import edit_tensors
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig, adapter_ref
from tests.signature import signature_adapter


def test_an_adapter_that_changes_nothing_is_logged_at_its_load(
    fleet: SignatureFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = signature_adapter(tmp_path / "idle", 20)
    edit_tensors(
        folder, lambda ts: {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in ts.items()}
    )
    rig = Rig(fleet.base)
    with caplog.at_level(logging.WARNING):
        rig.ask([5, 6], adapter_ref(fleet.base, folder, "idle"), max_tokens=1)
        rig.ask([5, 6], fleet.adapter(33), max_tokens=1)
    (record,) = [r for r in caplog.records if r.name.endswith("adapter_reader")]
    assert (
        "adapter idle (" in record.message
        and "every product of lora_B and lora_A is zero" in record.message
    )


def test_torch_runs_on_the_loader_thread_alone() -> None:
    """Every thread by itself, and what is set outside stays."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with loader_threads(2, torch.device("cpu")) as threads:
            both = threading.Barrier(2)

            def ask(_: int) -> int:
                both.wait(10)
                return torch.get_num_threads()

            assert list(threads.map(ask, range(2))) == [1, 1]
            assert torch.get_num_threads() == 3
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_loader_threads_belong_to_the_card_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself: what torch calls the current device is a thread's own."""
    cards: list[tuple[str, torch.device]] = []

    def use(device: torch.device) -> None:
        cards.append((threading.current_thread().name, device))

    monkeypatch.setattr(loader_threads_module, "use_device", use)
    loader_threads(3, torch.device("cuda", 1)).shutdown()
    assert len(dict(cards)) == 3 and set(dict(cards).values()) == {torch.device("cuda", 1)}


def _open(
    reader: AdapterReader, folder: Path, digest: str
) -> tuple[ImagePlan, Callable[[torch.Tensor], object]]:
    return reader.open(AdapterRef("a", digest, str(folder), 1))


def _pages(plan: ImagePlan) -> torch.Tensor:
    return torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)


@pytest.fixture
def reader(fleet: SignatureFleet) -> AdapterReader:
    geometry = read_geometry(fleet.base)
    config = EngineConfig(model_path=str(fleet.base))
    page, base = kv_page_bytes(geometry, 4), UnknownBase(geometry)
    return AdapterReader(config, geometry, page, base, torch.float32, Failpoints({}))


def test_headers_are_parsed_again_only_where_a_file_changed(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = signature_adapter(tmp_path / "a", 20)
    read: list[Path] = []

    def spy(path: Path, *args: Any, **options: Any) -> AdapterFile:
        read.append(path)
        return read_adapter(path, *args, **options)

    monkeypatch.setattr(adapter_reader, "read_adapter", spy)
    digest = content_digest(read_adapter(folder, reader._geometry, max_rank=64))
    images = []
    for _ in range(2):
        plan, fill = _open(reader, folder, digest)
        fill(pages := _pages(plan))
        images.append(pages)
    assert len(read) == 1 and torch.equal(*images)
    edit_tensors(folder, lambda tensors: {name: t + 1 for name, t in tensors.items()})
    with pytest.raises(AdapterError, match="its content changed"):
        plan, fill = _open(reader, folder, digest)
        fill(_pages(plan))
    assert len(read) == 2


def test_what_the_front_has_hashed_is_not_hashed_again(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is the same files: in others any content may be."""
    hashed: list[Path] = []
    compute = digests._hash

    def spy(files: tuple[FileIdentity, ...]) -> str:
        hashed.extend(file.path for file in files)
        return compute(files)

    monkeypatch.setattr(digests, "_hash", spy)
    folder = signature_adapter(tmp_path / "a", 20)
    front = digests.DigestMemory()  # of another process
    adapter = read_adapter(folder, reader._geometry, max_rank=64)
    keys = tuple(file.key for file in adapter.files)
    ref = AdapterRef("a", content_digest(adapter, front), str(folder), 1, keys)
    hashed.clear()
    plan, fill = reader.open(ref)
    fill(_pages(plan))
    assert not hashed
    edit_tensors(folder, lambda tensors: {name: t + 1 for name, t in tensors.items()})
    plan, fill = reader.open(ref)
    with pytest.raises(AdapterError, match="its content changed"):
        fill(_pages(plan))
    assert folder / "adapter_model.safetensors" in hashed


def test_content_is_told_from_its_digest_before_anything_else(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashed beside the build where it is unknown: what is wrong with other content is no news."""
    monkeypatch.setattr(digests, "_MEMORY", digests.DigestMemory())
    folder = signature_adapter(tmp_path / "a", 20)
    edit_tensors(folder, lambda ts: {n: torch.full_like(t, torch.nan) for n, t in ts.items()})
    plan, fill = _open(reader, folder, "0" * 64)
    with pytest.raises(AdapterError, match="its content changed"):
        fill(_pages(plan))
    with pytest.raises(AdapterError, match="its content changed"):  # known by now
        _open(reader, folder, "0" * 64)
    plan, fill = _open(reader, folder, content_digest(reader._read(str(folder))))
    with pytest.raises(AdapterError, match="NaN"):
        fill(_pages(plan))

"""Tokenizer and chat template of remote adapters: fetched for those that ask, and only then."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.adapters.entry import AdapterRequest, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.adapters.store import DiskStore
from multilora_cli.cli.app import app
from multilora_cli.cli.base import open_store
from multilora_cli.errors import AdapterError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import load_fleet
from multilora_cli.server.changes import request_of
from multilora_cli.text.adapter_text import TextChecker
from tests.adapters import fault_origin as faults
from tests.adapters.fault_origin import FaultOrigin
from tests.fakes import VOCAB, own_tokenizer, tiny_geometry, write_adapter

SOURCE = "hf://acme/notes"
TEXT = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultOrigin]:
    """acme/notes on a hub, with more than is asked for."""
    with faults.fault_origin() as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        folder = own_tokenizer(write_adapter(tmp_path / "v1"))
        (folder / "training_args.bin").write_bytes(b"pickle")
        origin.put_repository("acme/notes", folder)
        yield origin


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "store", 2**30)
    yield store
    store.check_integrity()
    store.close()


def registry_of(tmp_path: Path, store: DiskStore) -> Registry:
    base = ServedBase(tiny_geometry(tmp_path / "base"), "demo", check_text=TextChecker(VOCAB))
    return Registry(base, relative_to=tmp_path, store=store)


def names_in(path: str) -> set[str]:
    return {file.name for file in Path(path).iterdir()} - {"manifest.json"}


def test_fetched_for_who_asks(origin: FaultOrigin, store: DiskStore, tmp_path: Path) -> None:
    """One source, with and without: the same weights, two copies, each whole and of its digest."""
    registry = registry_of(tmp_path, store)
    plain = registry.register(AdapterRequest("plain", SOURCE)).entry
    request = AdapterRequest("own", SOURCE, tokenizer="adapter")
    own = registry.register(request).entry
    assert names_in(plain.path) == {"adapter_config.json", "adapter_model.safetensors"}
    assert names_in(own.path) == names_in(plain.path) | TEXT
    assert own.digest == plain.digest and own.path != plain.path and own.text is not None
    assert origin.count("training_args") == 0
    before = len(origin.seen)
    assert registry.register(request).outcome == "unchanged"
    assert not any("resolve" in seen.path for seen in origin.seen[before:])


def test_a_damaged_copy_is_fetched_anew(
    origin: FaultOrigin, store: DiskStore, tmp_path: Path
) -> None:
    request = AdapterRequest("own", SOURCE, tokenizer="adapter")
    entry = registry_of(tmp_path, store).register(request).entry
    path = Path(entry.path) / "tokenizer.json"
    good = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(good.replace(b"<note>", b"<nope>"))
    again = registry_of(tmp_path, store).register(request).entry
    assert (Path(again.path) / "tokenizer.json").read_bytes() == good
    assert again.text == entry.text and store.counts.corrupt == 1


def test_a_new_tokenizer_is_a_new_version(
    origin: FaultOrigin, store: DiskStore, tmp_path: Path
) -> None:
    registry = registry_of(tmp_path, store)
    request = AdapterRequest("own", SOURCE, tokenizer="adapter")
    first = registry.register(request).entry
    (tmp_path / "v1" / "chat_template.jinja").write_text("new")
    origin.put_repository("acme/notes", tmp_path / "v1")
    second = registry.register(request, replacing=True)
    assert second.outcome == "replaced" and second.entry.digest == first.digest
    assert second.entry.text != first.text and second.entry.path != first.path


def test_what_no_name_stands_for_may_be_evicted(
    origin: FaultOrigin, store: DiskStore, tmp_path: Path
) -> None:
    registry = registry_of(tmp_path, store)
    entry = registry.register(AdapterRequest("own", SOURCE, tokenizer="adapter")).entry
    assert entry.digest is not None
    registry.release(entry.digest)
    assert Path(entry.path).name in store._use.all()  # a name stands for it
    registry.unregister("own")
    registry.release(entry.digest)
    assert Path(entry.path).name not in store._use.all()


def test_missing_at_the_origin(origin: FaultOrigin, store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "v1" / "tokenizer.json").unlink()
    origin.put_repository("acme/notes", tmp_path / "v1")
    registry = registry_of(tmp_path, store)
    with pytest.raises(AdapterError, match=r"tokenizer.json: not there"):
        registry.register(AdapterRequest("own", SOURCE, tokenizer="adapter"))
    assert registry.register(AdapterRequest("plain", SOURCE)).entry.text is None


def test_lock_covers_the_tokenizer(
    origin: FaultOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is locked is served although the origin's tokenizer moved; without it, it is other
    content."""
    monkeypatch.chdir(tmp_path)
    text = f"base: {{model: demo:base}}\nadapters:\n- {{name: own, source: '{SOURCE}'%s}}\n"
    Path("fleet.yaml").write_text(text % ", tokenizer: adapter")
    ran = CliRunner().invoke(app, ["lock", "fleet.yaml", "--json"])
    assert ran.exit_code == 0, ran.output
    locked = json.loads(ran.output)["adapters"]["own"]["digest"]
    shutil.copytree(tmp_path / "v1", tmp_path / "v2")
    (tmp_path / "v2" / "chat_template.jinja").write_text("moved")
    origin.put_repository("acme/notes", tmp_path / "v2")
    (adapter,) = expand_adapters(load_fleet(Path("fleet.yaml")))
    assert adapter.digest == locked and adapter.tokenizer == "adapter"
    store = open_store(load_fleet(Path("fleet.yaml")), [adapter])
    assert store is not None
    entry = registry_of(tmp_path, store).register(request_of(adapter)).entry
    assert Path(entry.path).name == locked.removeprefix("sha256:") != entry.digest
    assert "chat_template.jinja" not in names_in(entry.path)
    plain = AdapterRequest("own", adapter.source, digest=locked)
    with pytest.raises(AdapterError, match="not asked for any more"):
        registry_of(tmp_path, store).register(plain)
    store.close()


def test_digest_order_is_one(origin: FaultOrigin, store: DiskStore, tmp_path: Path) -> None:
    """The engine's digest is of config and weights as anywhere."""
    registry = registry_of(tmp_path, store)
    own = registry.register(AdapterRequest("own", SOURCE, tokenizer="adapter")).entry
    local = registry.register(AdapterRequest("local", str(tmp_path / "v1")))
    assert registry.with_digest("local").digest == own.digest and local.entry.text is None

"""`mlora lock` and what the lock file does to a fleet (F70)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.adapters.entry import AdapterRequest, ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.cli.app import app
from multilora_cli.cli.base import open_store
from multilora_cli.errors import AdapterError, FleetError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import LoadedFleet, load_fleet
from multilora_cli.fleet.lockfile import FleetLock, LockedAdapter, read_lock, write_lock
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters import fault_origin as faults
from tests.adapters.fault_origin import FaultOrigin
from tests.adapters.spoil import write_good
from tests.signature import tiny_base

runner = CliRunner()
FLEET = """
base: {model: demo:base}
adapters:
  - {name: legal, source: "hf://acme/legal"}
  - {name: local, source: ./local}
"""
DIGEST = "sha256:" + "1" * 64


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultOrigin]:
    """acme/legal on a hub; a fleet in the working directory; a cache of its own."""
    with faults.fault_origin() as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "fleet.yaml").write_text(FLEET)
        origin.put_repository("acme/legal", write_good(tmp_path / "v1"))
        yield origin


def lock(*arguments: str, exit_code: int = 0) -> str:
    """What the command prints."""
    ran = runner.invoke(app, ["lock", "fleet.yaml", *arguments])
    assert ran.exit_code == exit_code, ran.output
    return ran.output


def loaded() -> LoadedFleet:
    """The fleet in the working directory."""
    return load_fleet(Path("fleet.yaml"))


def test_lock_records_commit_and_digest(origin: FaultOrigin, tmp_path: Path) -> None:
    """Remote adapters only; adapters then stand for the commit; written anew, nothing changes."""
    value = json.loads(lock("--json"))
    (name, entry), *others = value["adapters"].items()
    assert (name, others, entry["change"]) == ("legal", [], "added")
    assert entry["revision"] == origin.commits["acme/legal"]
    text = (tmp_path / "fleet.lock.json").read_text()
    assert json.loads(text)["adapters"]["legal"]["digest"] == entry["digest"]
    legal, local = expand_adapters(loaded())
    assert (legal.source, legal.digest) == (f"hf://acme/legal@{entry['revision']}", entry["digest"])
    assert (local.source, local.digest) == ("./local", None)
    assert json.loads(lock("--json"))["adapters"]["legal"]["change"] == "unchanged"
    assert (tmp_path / "fleet.lock.json").read_text() == text
    assert lock("--quiet").strip().endswith("fleet.lock.json")


def test_f70_branch_moves(origin: FaultOrigin, tmp_path: Path) -> None:
    """F70: what is locked is served although main moved, from the cache, without a question."""
    lock()
    first = read_lock(tmp_path / "fleet.yaml")
    origin.put_repository("acme/legal", write_good(tmp_path / "v2", seed=4))
    origin.seen.clear()
    geometry = read_geometry(tiny_base(tmp_path / "base", tokenizer=False))
    adapters = expand_adapters(loaded())
    store = open_store(loaded(), adapters)
    registry = Registry(ServedBase(geometry, "demo"), relative_to=tmp_path, store=store)
    entry = registry.register(
        AdapterRequest("legal", adapters[0].source, digest=adapters[0].digest)
    ).entry
    assert first is not None and f"sha256:{entry.digest}" == first.adapters["legal"].digest
    assert origin.seen == []
    assert "changed" in lock()
    assert read_lock(tmp_path / "fleet.yaml") != first
    assert store is not None
    store.close()


def test_other_content_is_refused(origin: FaultOrigin, tmp_path: Path) -> None:
    """A lock whose content the origin no longer has: refused, named, found and expected."""
    commit = origin.commits["acme/legal"]
    entry = LockedAdapter(source="hf://acme/legal", revision=commit, digest=DIGEST)
    write_lock(tmp_path / "fleet.yaml", FleetLock(adapters={"legal": entry}))
    geometry = read_geometry(tiny_base(tmp_path / "base", tokenizer=False))
    adapters = expand_adapters(loaded())
    store = open_store(loaded(), adapters)
    assert store is not None
    registry = Registry(ServedBase(geometry, "demo"), relative_to=tmp_path, store=store)
    request = AdapterRequest("legal", adapters[0].source, digest=adapters[0].digest)
    ((name, error),) = registry.register_all([request])
    assert name == "legal" and isinstance(error, AdapterError)
    assert DIGEST in error.message and "hf://acme/legal@" in error.message
    assert list((store.root / "entries").iterdir()) == []
    store.close()


def test_patterns_are_not_locked(origin: FaultOrigin, tmp_path: Path) -> None:
    """Nobody can list what a pattern stands for: said, not left out in silence."""
    pattern = '  - {pattern: "{t}/{n}", source: "hf://{t}/{n}"}\n'
    (tmp_path / "fleet.yaml").write_text(FLEET + pattern)
    assert "names of the pattern {t}/{n} are not locked" in lock()


def test_failures_leave_the_lock_alone(origin: FaultOrigin, tmp_path: Path) -> None:
    """Down, denied, other content than the fleet file says: exit code, adapter, no new lock."""
    lock()
    before = (tmp_path / "fleet.lock.json").read_text()
    origin.always["/revision/"] = faults.status(403)
    assert "adapter legal: " in lock(exit_code=2)
    origin.always["/revision/"] = faults.status(404)
    assert "HTTP 404" in lock(exit_code=2).replace("\n", " ")
    origin.always.clear()
    with_digest = FLEET.replace('legal"', f'legal", digest: "{DIGEST}"')
    (tmp_path / "fleet.yaml").write_text(with_digest)
    assert "the fleet file expects" in lock(exit_code=2).replace("\n", " ")
    assert (tmp_path / "fleet.lock.json").read_text() == before


def test_an_origin_that_is_down_cannot_be_locked(
    origin: FaultOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale copy is good enough to serve, not to be recorded as what the origin has."""
    lock()
    before = (tmp_path / "fleet.lock.json").read_text()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "stale" in lock(exit_code=3)
    assert (tmp_path / "fleet.lock.json").read_text() == before


def test_lock_and_fleet_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source or digest in the fleet than in the lock: refused with the command to run."""
    monkeypatch.chdir(tmp_path)
    entry = LockedAdapter(source="hf://acme/legal", revision="a" * 40, digest=DIGEST)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    path = write_lock(tmp_path / "fleet.yaml", FleetLock(adapters={"legal": entry, "gone": entry}))
    assert path.stat().st_mode & 0o777 == 0o644
    assert [a.name for a in expand_adapters(loaded())] == ["legal", "local"]
    for old, new in (("acme/legal", "acme/other"), ('legal"', f'legal", digest: "{DIGEST[:-1]}2"')):
        (tmp_path / "fleet.yaml").write_text(FLEET.replace(old, new))
        with pytest.raises(FleetError, match=r"legal: .*fleet\.lock\.json has") as caught:
            expand_adapters(loaded())
        assert caught.value.hint == "write it anew: mlora lock fleet.yaml"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2, "adapters": {}}', '{"format": 1, "adapters": {"../x": {}}}',
     '{"format": 1, "adapters": {"a": {"source": "s3://b/x/", "revision": "", "digest": "x"}}}',
     '{"format": 1, "adapters": {}, "more": 1}', "\ud800"],
)  # fmt: skip
def test_broken_locks(tmp_path: Path, text: str) -> None:
    """A lock that is none is refused by one line, never ignored."""
    (tmp_path / "fleet.lock.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(FleetError, match=r"fleet\.lock\.json: "):
        read_lock(tmp_path / "fleet.yaml")


def test_serve_registers_remote_adapters(origin: FaultOrigin, tmp_path: Path) -> None:
    """Start-up: fetched, entered with digest and rank; denied ones are failures of their own; with
    the origin down the copy is used and noted; the budget of the fleet is the store's."""
    from multilora_cli.cli.startup import prepare

    tiny_base(tmp_path / "base", tokenizer=False)
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "base: {model: ./base}\nmemory: {disk_cache: 1GiB}\nadapters:\n"
        '  - {name: legal, source: "hf://acme/legal"}\n'
        '  - {name: gone, source: "hf://acme/gone"}\n'
    )
    startup = prepare(fleet, report=lambda *_: None)
    entry = startup.registry.resolve("legal")
    assert entry.rank == 4 and entry.path.endswith(
        startup.registry.with_digest("legal").digest or ""
    )
    ((name, error),) = startup.failures
    assert name == "gone" and "HTTP 404" in error.message
    origin.always["/"] = faults.status(401)
    assert len(prepare(fleet, report=lambda *_: None).failures) == 2
    origin.always["/"] = faults.status(503, retry_after="9999")
    later = prepare(fleet, report=lambda *_: None)
    note = later.registry.resolve("legal").notes[0]
    assert note.startswith("stale: source hf://acme/legal@main: 127.0.0.1")
    assert [name for name, _ in later.failures] == ["gone"]


def test_an_origin_that_was_down_at_the_start(
    origin: FaultOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F69 with nothing stored: listed as failed with the time of the next attempt, which finds it;
    a repository that is not there waits for somebody."""
    from multilora_cli.adapters.source import REMOTE
    from multilora_cli.cli.startup import prepare

    tiny_base(tmp_path / "base", tokenizer=False)
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        'base: {model: ./base}\nadapters: [{name: legal, source: "hf://acme/legal", pin: warm}]\n'
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    registry = prepare(fleet, report=lambda *_: None).registry
    entry = registry.get("legal")
    assert entry is not None and "HF_HUB_OFFLINE" in entry.detail
    assert entry.retry_at is not None and entry.attempts == 1
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(REMOTE["hf"], "_down", {})
    ready = registry.retry("legal")
    assert (ready.state, ready.pin, ready.rank) == ("ready", "warm", 4)
    fleet.write_text(fleet.read_text().replace("acme/legal", "acme/gone"))
    gone = prepare(fleet, report=lambda *_: None).registry.get("legal")
    assert gone is not None and gone.state == "failed" and gone.retry_at is None


def test_no_lock_no_change(tmp_path: Path) -> None:
    """Without a lock file adapters are as the fleet has them."""
    (tmp_path / "fleet.yaml").write_text(FLEET)
    fleet = load_fleet(tmp_path / "fleet.yaml")
    assert [a.digest for a in expand_adapters(fleet)] == [None, None]

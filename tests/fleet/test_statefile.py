"""The state file: whole or not there, and never somebody else's."""

import json
import os
from pathlib import Path

import pytest

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import load_fleet
from multilora_cli.fleet.statefile import Change, StateAdapter, StateFile, state_path

UNLOADED = Change(declared="sha256:" + "1" * 64, adapter=None)
LOADED = Change(
    declared=None, adapter=StateAdapter(source="/adapters/x", via="api", pin="hot", ttl=60.0)
)


def state(folder: Path) -> StateFile:
    return StateFile(folder / "fleet.state.json", folder / "fleet.yaml")


def test_written_and_read(tmp_path: Path) -> None:
    """Owner only, no temporary file left, exactly what was written; replaced as a whole."""
    file = state(tmp_path)
    assert file.read() == {}
    file.write({"acme/legal": UNLOADED, "x": LOADED})
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert state(tmp_path).read() == {"acme/legal": UNLOADED, "x": LOADED}
    file.write({})
    assert state(tmp_path).read() == {}
    assert sorted(os.listdir(tmp_path)) == [".fleet.state.json.lock", "fleet.state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """F52, F53: at every step the file is the old or the new one, and nothing is left over."""
    file = state(tmp_path)
    file.write({"x": LOADED})

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left"):
        file.write({})
    monkeypatch.undo()
    assert state(tmp_path).read() == {"x": LOADED}
    assert len(os.listdir(tmp_path)) == 2


GOOD = {"kind": "mlora fleet state", "format": 1, "fleet": "/f.yaml", "changes": {}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "file: Invalid JSON"),
        ("{", "file: Invalid JSON"),
        ("[]", "file: "),
        ("{}", "fleet: "),
        ('{"format": 1, "adapters": {}}', "fleet: "),
        (json.dumps(GOOD | {"format": 2}), "format: "),
        (json.dumps(GOOD | {"kind": "other"}), "kind: "),
        (json.dumps(GOOD | {"more": 1}), "more: "),
        (json.dumps(GOOD | {"changes": {"../x": {"declared": None, "adapter": None}}}), "changes"),
        (json.dumps(GOOD | {"changes": {"x": {"declared": "1", "adapter": None}}}), "changes.x"),
        (json.dumps(GOOD | {"changes": {"x": {"declared": None}}}), "changes.x.adapter"),
        ("\0" * 10, "file: Invalid JSON"),
    ],
)
def test_corrupt_and_foreign_files_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    """By name, with what was expected and the way out; never read in part, never ignored."""
    path = tmp_path / "fleet.state.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(FleetError) as caught:
        state(tmp_path).read()
    assert caught.value.message.startswith(f"{path}: ") and problem in caught.value.message
    assert caught.value.hint is not None and "server.state_file" in caught.value.hint


def test_files_that_others_can_write_are_refused(tmp_path: Path) -> None:
    """F56: mode, link, folder."""
    file = state(tmp_path)
    file.write({})
    file.path.chmod(0o620)
    with pytest.raises(FleetError, match="mode 0620 lets other users in"):
        state(tmp_path).read()
    file.path.rename(tmp_path / "else")
    file.path.symlink_to(tmp_path / "else")
    with pytest.raises(FleetError, match="not readable"):
        state(tmp_path).read()
    file.path.unlink()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(FleetError, match="no regular file"):
        state(tmp_path).read()


def test_another_fleets_state(tmp_path: Path) -> None:
    """A configured path that two fleets share; a fleet that moved with its state is itself."""
    (tmp_path / "other").mkdir()
    shared = tmp_path / "state.json"
    one = StateFile(shared, tmp_path / "other" / "one.yaml")
    one.write({})
    with pytest.raises(FleetError, match=r"belongs to .*one\.yaml, expected .*two\.yaml"):
        StateFile(shared, tmp_path / "other" / "two.yaml").read()
    assert StateFile(shared, tmp_path / "moved.yaml").read() == {}


def test_two_servers_of_one_fleet(tmp_path: Path) -> None:
    """F11: the first that writes keeps it; what one wrote is never overwritten by one that has not
    seen it."""
    first, second = state(tmp_path), state(tmp_path)
    assert first.read() == second.read() == {}
    first.write({"x": LOADED})
    with pytest.raises(FleetError, match="kept by another server"):
        second.write({})
    first.close()
    with pytest.raises(FleetError, match="written by another server since"):
        second.write({})
    assert second.read() == {"x": LOADED}
    second.write({"x": UNLOADED})
    assert state(tmp_path).read() == {"x": UNLOADED}
    second.close()


def test_where_it_lies(tmp_path: Path) -> None:
    def path(server: str) -> Path | None:
        (tmp_path / "fleet.yaml").write_text(f"base: {{model: x}}\nserver: {{{server}}}\n")
        return state_path(load_fleet(tmp_path / "fleet.yaml"))

    assert path("") == tmp_path / "fleet.state.json"
    assert path("state_file: var/s.json") == tmp_path / "var" / "s.json"
    assert path("state_file: off") is None

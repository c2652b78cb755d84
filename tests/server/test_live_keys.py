"""Keys that change while the server runs: revoked at once, all or nothing, by apply and SIGHUP."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.cli.fleet_diff import fleet_body
from multilora_cli.cli.startup import prepare
from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import load_fleet, resolve_secret, secret_notes
from multilora_cli.server.access import Secrets, keys_of
from multilora_cli.server.client import EngineClient
from multilora_cli.server.front import Front
from tests.fakes import Behaviour, Spawner, byte_tokenizer, tiny_geometry
from tests.server.conftest import InProcess

FLEET = """base: {model: ./base, name: demo}
limits: {weights: {one: 2}}
server:
  admin_key: env:ADMIN
  api_keys:
    - {key: file:one, tenant: one}
    - env:TWO
"""


class App(InProcess):
    """A served fleet file over a fake engine, with real secrets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spawner = Spawner(Behaviour(token_s=0.01))
        monkeypatch.setenv("ADMIN", "admin-secret")
        monkeypatch.setenv("TWO", "secret-two")
        tiny_geometry(folder / "base")
        byte_tokenizer(folder / "base")
        (folder / "base" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "one").write_text("secret-one\n")
        (folder / "one").chmod(0o600)
        self.file = folder / "fleet.yaml"
        self.file.write_text(FLEET)
        self.startup = prepare(self.file, report=lambda *_: None)

    def front_of(self, client: EngineClient) -> Front:
        """With the secrets of the fleet file."""
        served = self.startup
        return Front(served.server, served.registry, client, served.changes, served.secrets)

    async def apply(self, key: str = "admin-secret", **how: bool) -> tuple[int, dict[str, Any]]:
        body = {**fleet_body(load_fleet(self.file)), **how}
        reply = await self.http.post("/v1/fleet", json=body, headers=_by(key))
        return reply.status_code, reply.json()

    async def status(self, key: str) -> int:
        return (await self.http.get("/v1/models", headers=_by(key))).status_code


def _by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_f81_a_key_is_revoked_and_changed_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F81: at once for new calls; what runs goes on; no key is in any reply."""

    async def run() -> None:
        async with App(tmp_path, monkeypatch) as app:
            assert "ADMIN" not in os.environ and "TWO" not in os.environ
            status, report = await app.apply()
            assert (status, report["changes"]) == (200, [])
            assert [await app.status(k) for k in ("secret-one", "secret-two")] == [200, 200]
            body = {"model": "demo", "prompt": "x", "max_tokens": 30}
            running = asyncio.create_task(
                app.http.post("/v1/completions", json=body, headers=_by("secret-two"))
            )
            while not app.client.num_sequences:
                await asyncio.sleep(0.01)
            app.file.write_text(FLEET.replace("    - env:TWO\n", "").replace("one: 2", "one: 5"))
            status, told = await app.apply(dry_run=True)
            assert await app.status("secret-two") == 200
            status, report = await app.apply()
            assert (status, report["restart"]) == (200, [])
            assert {row["name"] for row in report["changes"]} == {
                "server.api_keys",
                "limits.weights",
            }
            assert told["changes"] == report["changes"]
            assert "secret" not in str([row["fields"] for row in report["changes"]])
            assert [await app.status(k) for k in ("secret-one", "secret-two")] == [200, 401]
            assert app.front.access.now.weight("tenant:one", None) == 5
            assert (await running).status_code == 200
            assert (await app.apply())[1]["changes"] == []

    asyncio.run(run())


def test_a_secret_that_changed_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the same, the key is another: as where secrets are mounted."""

    async def run() -> None:
        async with App(tmp_path, monkeypatch) as app:
            (tmp_path / "one").write_text("secret-new\n")
            _, report = await app.apply()
            assert [row["name"] for row in report["changes"]] == ["server.api_keys"]
            keys = ("secret-one", "secret-new", "secret-two", "admin-secret")
            assert [await app.status(key) for key in keys] == [401, 200, 200, 200]
            assert (await app.apply())[1]["changes"] == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("env:TWO", "env:NO_SUCH"), "NO_SUCH is not set"),
        (("file:one", "file:missing"), "secret not readable: No such file"),
        (("file:one", "file:/dev/zero"), "is no regular file"),
        (("file:one", "file:."), "secret not readable"),
    ],
)
def test_what_cannot_be_had_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], words: str
) -> None:
    async def run() -> None:
        async with App(tmp_path, monkeypatch) as app:
            app.file.write_text(FLEET.replace(*change))
            status, report = await app.apply()
            assert status == 400 and words in report["error"]["message"], report
            assert report["error"]["message"].startswith("nothing was changed: ")
            assert [await app.status(k) for k in ("secret-one", "secret-two")] == [200, 200]

    asyncio.run(run())


def test_secrets_are_small_files_of_their_owner(tmp_path: Path) -> None:
    """F83: no pipe, no device, nothing large; a file that others may read is told."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    for name, words in (("pipe", "no regular file"), ("large", "larger than 64 KiB")):
        with pytest.raises(FleetError, match=words):
            resolve_secret(f"file:{name}", tmp_path)
    (tmp_path / "open").write_text("k")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "closed").write_text("k")
    (tmp_path / "closed").chmod(0o600)
    references = ("env:X", "file:open", "file:closed", "file:missing")
    assert list(secret_notes(references, tmp_path)) == [
        f"{tmp_path / 'open'}: mode 0644 lets other users read a key; chmod 600 it"
    ]


def test_no_key_for_an_address_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the start refuses, a change is refused too."""
    app = App(tmp_path, monkeypatch)
    from dataclasses import replace

    from multilora_cli.errors import BadInput
    from multilora_cli.server.access import LiveAccess

    config = replace(app.startup.server, host="0.0.0.0")
    live = LiveAccess(config, app.startup.secrets)
    with pytest.raises(BadInput, match="names no key"):
        live.read({"server.api_keys": [], "server.admin_key": None})
    assert live.now.tenants


def test_keys_are_had_once_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k1")
    secrets = Secrets(Path())
    assert (secrets.get("env:KEY"), secrets.get("env:KEY")) == ("k1", "k1")
    assert "KEY" not in os.environ
    assert "k1" not in repr(keys_of(load_fleet_of("env:KEY"), secrets))


def load_fleet_of(key: str) -> Any:
    from multilora_cli.fleet.schema import Fleet

    return Fleet.model_validate({"base": {"model": "x"}, "server": {"api_keys": [key]}})

"""Fairness, weights, adapter bytes and prefetch: from the fleet file to both processes."""

import asyncio
from pathlib import Path

import pytest

from multilora_cli.cli.startup import prepare
from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import load_fleet
from multilora_cli.server.auth import key_id
from tests.fakes import tiny_geometry
from tests.server.conftest import InProcess


def write(folder: Path, text: str) -> Path:
    tiny_geometry(folder / "base")
    (folder / "base" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    path = folder / "fleet.yaml"
    path.write_text("base: {model: ./base, name: demo}\n" + text)
    return path


def test_the_engine_is_told(tmp_path: Path) -> None:
    plain = prepare(write(tmp_path, ""), report=lambda *_: None).engine
    assert (plain.fairness, plain.max_adapter_bytes) == ("tenant", None)
    assert plain.prefetch_bytes_per_s == 256 * 2**20
    text = "limits: {fairness: adapter, max_adapter_bytes: 2GiB}\nmemory: {prefetch: 0}\n"
    told = prepare(write(tmp_path, text), report=lambda *_: None).engine
    assert (told.fairness, told.max_adapter_bytes) == ("adapter", 2 * 2**30)
    assert told.prefetch_bytes_per_s == 0


def test_the_front_admits_what_runs_and_a_queue(tmp_path: Path) -> None:
    """RELIABILITY 11: a fleet that runs 4,096 at once is not held to the places of one with 256."""
    for running in (64, 4096):
        text = f"limits: {{max_num_seqs: {running}}}\n"
        server = prepare(write(tmp_path, text), report=lambda *_: None).server
        assert server.limits.max_sequences == running + 1024


def test_weights_by_key_reach_the_front_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME", "secret-1")
    monkeypatch.setenv("OTHER", "secret-2")
    text = "server: {api_keys: [env:ACME, env:OTHER]}\nlimits: {weights: {env:ACME: 3}}\n"
    server = prepare(write(tmp_path, text), report=lambda *_: None).server
    assert dict(server.weights) == {key_id("secret-1"): 3.0}
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limits: {weights: {env:NOBODY: 2}}", "keys or tenants of server.api_keys"),
        ("limits: {fairness: adapter, weights: {'a b': 2}}", "names of adapters"),
        ("limits: {fairness: none, weights: {acme: 2}}", "no weights without fairness"),
        ("limits: {fairness: adapter, weights: {acme: 0}}", "greater than or equal to 0.01"),
        ("limits: {fairness: fair}", "fairness"),
    ],
)
def test_weights_of_nobody_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FleetError, match=words):
        load_fleet(write(tmp_path, text))


async def _weights(folder: Path) -> None:
    weights = {key_id("k1"): 2.5, "upper": 7.0}
    async with InProcess(folder, weights=weights, api_keys=("k1", "k2")) as app:
        for key, model in (("k1", "demo"), ("k2", "demo"), ("k2", "upper")):
            reply = await app.http.post(
                "/v1/completions",
                json={"model": model, "prompt": "x", "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            )
            assert reply.status_code == 200
        engine = app.spawner.engines[-1]
        assert [submit.weight for submit in engine.submits] == [2.5, 1.0, 7.0]
        tenants = [submit.tenant for submit in engine.submits]
        assert tenants == [key_id("k1"), key_id("k2"), key_id("k2")]


def test_every_request_carries_its_weight(tmp_path: Path) -> None:
    asyncio.run(_weights(tmp_path))

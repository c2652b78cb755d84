"""A fleet that is operated: patterns, pins, restarts, changed files; nothing broken is served."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.adapters import fault_origin as faults
from tests.e2e.serving import Served, start
from tests.e2e.test_answers import complete, expected
from tests.e2e.test_replace import load
from tests.e2e.test_tiers import mlora
from tests.signature import deep_adapter

BODY = {"model": "tenant", "prompt": "hello", "max_tokens": 16, "temperature": 0}


def write_fleet(path: Path, origin: Path, adapters: str, **base: str) -> Path:
    extra = "".join(f", {key}: {value}" for key, value in base.items())
    path.write_text(
        f"base: {{model: {origin}/base, name: counter, dtype: float32{extra}}}\n"
        "memory: {device: cpu, device_bytes: 64MiB}\n"
        "limits: {max_num_seqs: 64, max_num_batched_tokens: 512}\n"
        f"server: {{port: 0, adapter_roots: [{origin}/adapters, {origin}/spare]}}\n"
        f"adapters:\n{adapters}"
        f'  - {{pattern: "tenants/{{name}}", source: "{origin}/adapters/{{name}}"}}\n'
    )
    return path


def of(origin: Path, name: str) -> str:
    return f"  - {{name: {name}, source: {origin}/adapters/{name}}}\n"


def test_a_fleet_is_operated(signature_fleet: Path, tmp_path: Path) -> None:
    """Everything an operator changes holds: in the list, over a restart, beside a changed file."""
    origin = signature_fleet.parent
    adapters = of(origin, "r4") + of(origin, "r16")
    fleet = write_fleet(tmp_path / "fleet.yaml", origin, adapters)
    served = start(fleet, log=tmp_path / "log")
    try:
        assert complete(served, "tenants/r8") == expected("r8", 12)
        assert served.adapters()["tenants/r8"]["via"] == "pattern"
        for name in ("tenants/nobody", "tenants/..", "other/r8", "tenants/%2e%2e"):
            reply = httpx.post(f"{served.url}/v1/completions", json=BODY | {"model": name})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        warmed = mlora(served, "warm", "r4", "tenants/", "--hot", "--pin", "--ttl", "1h")
        assert warmed.returncode == 0, warmed.stderr
        rows = json.loads(warmed.stdout)
        assert {(row["id"], row["pin"], row["ttl_s"]) for row in rows} == {
            ("r4", "hot", 3600), ("tenants/r8", "hot", 3600),
        }  # fmt: skip
        assert load(served, "own", origin / "spare" / "other").status_code == 200
        before = served.adapters()["own"]
        gone = httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": "r16"})
        assert gone.status_code == 200
    finally:
        assert served.stop() == 0
    state = tmp_path / "fleet.state.json"
    assert state.stat().st_mode & 0o777 == 0o600

    served = start(fleet, log=tmp_path / "log")
    try:
        rows = {row["id"]: row for row in json.loads(mlora(served, "list").stdout)}
        assert set(rows) == {"r4", "own", "tenants/r8"}
        assert (rows["r4"]["pin"], rows["tenants/r8"]["pin"]) == ("hot", "hot")
        assert rows["own"]["source"] == before["source"]
        assert complete(served, "own") == chr(91) * 12
        assert mlora(served, "diff", str(fleet)).returncode == 0

        write_fleet(fleet, origin, of(origin, "r4") + of(origin, "r32"))
        differs = mlora(served, "diff", str(fleet))
        assert differs.returncode == 1
        changes = {row["name"]: row["change"] for row in json.loads(differs.stdout)["changes"]}
        assert changes == {"r16": "removed", "r32": "added"}
        applied = mlora(served, "apply", str(fleet))
        assert applied.returncode == 0, applied.stderr
        assert json.loads(applied.stdout)["runtime"] == ["own", "r4", "tenants/r8"]
        assert complete(served, "r32") == expected("r32", 12)
        assert mlora(served, "diff", str(fleet)).returncode == 0

        write_fleet(fleet, origin, of(origin, "r4") + of(origin, "r64"), max_model_len="128")
        refused = mlora(served, "apply", str(fleet))
        assert refused.returncode == 1 and "base.max_model_len: running none" in refused.stderr
        assert set(served.adapters()) == {"r4", "r32", "own", "tenants/r8"}
        fleet.write_text("base: {model: x}\nadapter: []\n")
        assert mlora(served, "apply", str(fleet)).returncode == 2
    finally:
        assert served.stop() == 0
    write_fleet(fleet, origin, of(origin, "r4"))
    state.write_text('{"format": 1}')
    command = [sys.executable, "-m", "multilora_cli", "serve", str(fleet)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and f"error: {state}: fleet: Field required" in refused.stderr


def spoilt(source: Path, target: Path) -> Path:
    """A copy whose headers are good and whose last value is NaN."""
    target.mkdir()
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    name = max(tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = np.nan
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def test_a_broken_version_is_found_before_anybody_gets_it(served: Served) -> None:
    """Under load: every answer is the served version's while broken ones are checked and refused,
    pinned or not; then a good one takes over, and what the old one held is free."""
    spare = served.fleet.parent / "spare"
    good = [deep_adapter(spare / f"good{k}", 60 + k, r=16) for k in range(2)]
    bad = spoilt(good[1], spare / "good1-with-nan")
    assert load(served, "tenant", good[0], pinned=True).status_code == 200
    before = served.adapters()["tenant"]
    answers: list[str] = []
    url = f"{served.url}/v1/completions"

    async def ask(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        while not done.is_set():
            reply = await client.post(url, json=BODY)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["text"])

    async def replace(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        body = {"lora_name": "tenant", "lora_path": str(bad), "load_inplace": True}
        for turn in range(8):
            reply = await client.post(
                f"{served.url}/v1/load_lora_adapter", json=body | {"pinned": turn % 2 == 0}
            )
            assert reply.status_code == 400 and "1 NaN" in reply.text, reply.text
        done.set()

    async def run() -> None:
        done = asyncio.Event()
        async with httpx.AsyncClient(timeout=300) as client:
            await asyncio.gather(replace(client, done), *(ask(client, done) for _ in range(8)))

    asyncio.run(run())
    assert len(answers) >= 8 and set(answers) == {chr(61) * 16}
    row = served.adapters()["tenant"]
    for key in ("generation", "digest", "pin", "pinned", "tier"):
        assert row[key] == before[key]
    stale = load(served, "tenant", good[1], load_inplace=True, expected_generation=99)
    assert stale.status_code == 400 and "expected_generation" in stale.text
    replaced = load(
        served, "tenant", good[1], load_inplace=True, expected_generation=row["generation"]
    )
    assert replaced.status_code == 200
    assert complete(served, "tenant") == chr(62) * 12
    row = served.adapters()["tenant"]
    assert (row["pin"], row["pinned"]) == ("hot", True)  # what was pinned stays pinned
    listed = httpx.get(f"{served.url}/v1/lora_adapters").json()
    assert {g["digest"] for g in listed["generations"]} == {row["digest"]}
    gone = httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    assert int(gone.headers["x-mlora-freed-pages"]) >= int(str(row["pages"]))  # and cached KV
    assert int(gone.headers["x-mlora-freed-host-bytes"]) > 0


def test_a_slow_origin_does_not_hold_the_server(
    signature_fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06, F63: others are served while a name is being fetched, and SIGTERM ends the server."""
    origin = signature_fleet.parent

    def stuck(handler: Any, body: bytes) -> None:
        time.sleep(30)

    with faults.fault_origin() as bucket:
        bucket.always["slow"] = stuck
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        fleet = write_fleet(tmp_path / "fleet.yaml", origin, of(origin, "r4"))
        pattern = '  - {pattern: "s3/{name}", source: "s3://bucket/{name}/"}\n'
        fleet.write_text(fleet.read_text() + pattern)
        served = start(fleet, log=tmp_path / "log")
        asked = threading.Thread(target=_ask_in_vain, args=(served.url,), daemon=True)
        asked.start()
        while not bucket.seen:
            time.sleep(0.05)
        assert complete(served, "r4") == expected("r4", 12)
        began = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began < 20
        asked.join(10)


def _ask_in_vain(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=BODY | {"model": "s3/slow"}, timeout=60)

"""Engine death, orphans, drain, second signal, a taken port: on real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.e2e.serving import Served, children, start
from tests.e2e.test_answers import complete, expected

BODY = {"prompt": "abc", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


async def stream(
    client: httpx.AsyncClient, url: str, num_tokens: int, started: asyncio.Event
) -> list[str]:
    """The data lines of one stream, however it ends."""
    lines: list[str] = []
    body = {**body_for("r16"), "max_tokens": num_tokens}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line:
                    lines.append(line)
                    started.set()
    except httpx.HTTPError:
        lines.append("(connection lost)")
    return lines


def body_for(name: str) -> dict[str, object]:
    return {"model": name, **BODY}


async def streams_and_then(
    served: Served, count: int, act: Callable[[], None], num_tokens: int = 900
) -> list[list[str]]:
    """`count` running streams; `act` once each of them has begun."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        events = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(stream(client, served.url, num_tokens, e)) for e in events]
        await asyncio.wait_for(asyncio.gather(*(e.wait() for e in events)), 60)
        await asyncio.to_thread(act)
        return await asyncio.gather(*tasks)


def test_f01_engine_killed_while_streams_run(served: Served) -> None:
    """F01: an error event and no [DONE] on every stream; ready again; nothing stays owned."""
    complete(served, "r16")
    old = served.engine_pid
    results = asyncio.run(streams_and_then(served, 20, lambda: os.kill(old, signal.SIGKILL)))
    for lines in results:
        assert "data: [DONE]" not in lines
        assert '"error"' in lines[-1], lines[-1]
    served.wait_ready()
    assert served.engine_pid != old
    assert complete(served, "r16") == expected("r16", 12)
    assert served.adapters()["r16"]["in_flight"] == 0


def test_f04_front_killed_leaves_no_orphan(served: Served) -> None:
    """F04: the engine is gone within 2 s, the port is free, the next start needs no cleaning."""
    engine, port = served.engine_pid, int(served.url.rsplit(":", 1)[1])
    served.process.kill()
    served.process.wait(10)
    deadline = time.monotonic() + 2
    while Path(f"/proc/{engine}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{engine}").exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_f06_sigterm_finishes_what_was_admitted(served: Served) -> None:
    """F06: admitted streams complete, new calls get 503 and Retry-After, the exit is 0."""
    refused: list[httpx.Response] = []

    def drain() -> None:
        served.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not refused and time.monotonic() < deadline:
            reply = httpx.post(
                f"{served.url}/v1/completions", json={**body_for("r8"), "max_tokens": 1}
            )
            if reply.status_code == 503:
                refused.append(reply)

    results = asyncio.run(streams_and_then(served, 6, drain, num_tokens=120))
    assert refused and "retry-after" in refused[0].headers
    assert refused[0].json()["error"]["code"] == "server_shutting_down"
    for lines in results:
        assert lines[-1] == "data: [DONE]"
    assert served.process.wait(40) == 0


def test_f07_a_second_signal_stops_at_once(served: Served) -> None:
    """F07: streams end with an error event, the exit is 143, no orphan stays."""
    engine = served.engine_pid

    def twice() -> None:
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)

    results = asyncio.run(streams_and_then(served, 6, twice))
    for lines in results:
        assert lines[-1] != "data: [DONE]" and '"error"' in lines[-1]
    assert served.process.wait(20) == 143
    assert not Path(f"/proc/{engine}").exists()


def test_f10_a_second_server_on_the_port_leaves_at_once(shared: Served) -> None:
    """F10: exit 4 with one clear line; the first is untouched."""
    port = shared.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "multilora_cli", "serve", str(shared.fleet), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 4
    assert "in use" in ran.stderr and "Traceback" not in ran.stderr
    assert complete(shared, "r4") == expected("r4", 12)


def test_one_listening_socket_and_no_secret_in_the_children(
    signature_fleet: Path, tmp_path: Path, monkeypatch
) -> None:
    """Promise 8 and G21: one port in the whole process tree; keys never reach the engine."""
    canary = "canary-" + "k" * 24
    for name in ("MLORA_E2E_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, canary)
    fleet = signature_fleet.parent / "keyed.yaml"
    fleet.write_text(
        signature_fleet.read_text().replace("server: {", "server: {api_keys: [env:MLORA_E2E_KEY], ")
    )
    served = start(fleet, log=tmp_path / "log")
    try:
        pids = [served.process.pid, *children(served.process.pid)]
        assert listening(pids) == 1
        for pid in pids:
            assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        engine = Path(f"/proc/{served.engine_pid}/environ").read_bytes()
        assert canary.encode() not in engine
        refused = httpx.get(f"{served.url}/v1/models")
        assert refused.status_code == 401
        headers = {"authorization": f"Bearer {canary}"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200
    finally:
        assert served.stop() == 0
    assert canary not in served.log.read_text()


def listening(pids: list[int]) -> int:
    """Listening TCP sockets that the processes hold, each counted once."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(fields[9])
    held = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                held.add(target[8:-1])
    return len(inodes & held)

"""Processes and signals: F01, F03, F04, F06, F07, F10 with a real server process, a fake engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from multilora_cli.errors import AddressInUse, BadInput, ModelError
from multilora_cli.server.launch import Served, bind, run_server
from tests.fakes import Behaviour, Spawner, tiny_config, tiny_registry
from tests.server.test_chat import chat, error_of
from tests.server.test_streams import wait_for

ROOT = Path(__file__).parents[2]
SLOW = Behaviour(token_s=0.02)


class Process:
    """A server process and what it says."""

    def __init__(self, folder, behaviour=SLOW, port=0, drain_s=10.0):
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        command = [
            sys.executable, str(Path(__file__).with_name("serve_fake.py")), str(folder), str(port),
            json.dumps(asdict(behaviour)), str(drain_s),
        ]  # fmt: skip
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.lines.append(line.split())

    def ready(self, count=1):
        """URL of the server and pid of its engine, once it was ready `count` times."""
        wait_for(
            lambda: len([w for w in self.lines if w[0] == "ready"]) >= count or not self.alive, 20
        )
        assert self.alive, self.popen.stderr.read()
        words = [w for w in self.lines if w[0] == "ready"][-1]
        return words[1], int(words[2])

    @property
    def alive(self):
        return self.popen.poll() is None

    def end(self, timeout_s=20):
        status = self.popen.wait(timeout_s)
        self._reader.join(5)
        return status, self.popen.stderr.read()


@pytest.fixture
def launch(tmp_path):
    """Starts server processes and leaves none behind."""
    processes = []

    def start(*args, **kwargs):
        process = Process(tmp_path / f"p{len(processes)}", *args, **kwargs)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.wait()
        process.popen.stdout.close()
        process.popen.stderr.close()


class Streams:
    """Some streams in threads; `texts` are their whole bodies once joined."""

    def __init__(self, url, count, tokens):
        self.texts = [""] * count
        self.statuses = [0] * count
        self.begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run, args=(url, place, tokens), daemon=True)
            for place in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.begun.acquire(timeout=20)

    def _run(self, url, place, tokens):
        body = {"model": "upper", "prompt": "x", "stream": True, "max_tokens": tokens}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            self.statuses[place] = reply.status_code
            for part in reply.iter_text():
                if not self.texts[place]:
                    self.begun.release()
                self.texts[place] += part

    def join(self):
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        return self.texts


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def listening_sockets(pid):
    """Inodes of TCP sockets in state LISTEN that a process holds."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                listening.add(columns[9])
    held = {
        match[1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)))
    }
    return listening & held


def test_sigterm_drains(launch):
    """F06: what was admitted ends whole, new calls get 503 and Retry-After, exit 0."""
    server = launch()
    url, engine = server.ready()
    assert len(listening_sockets(server.popen.pid)) == 1
    assert listening_sockets(engine) == set()
    streams = Streams(url, 20, 300)
    with httpx.Client(base_url=url, timeout=10) as http:
        assert http.get("/readyz").status_code == 200
        server.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get("/readyz").status_code == 503)
        reply = chat(http)
        assert error_of(reply, 503)["code"] == "server_shutting_down"
        assert reply.headers["retry-after"]
        assert reply.headers["connection"] == "close"
        assert http.get("/health").status_code == 200
    for text in streams.join():
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"length"') == 1
    assert server.end() == (0, "")
    assert not is_alive(engine)
    assert ["draining", "20"] in server.lines


def test_drain_ends_at_its_deadline(launch):
    """F06: the rest gets an error event and no [DONE]; still exit 0."""
    server = launch(drain_s=0.3)
    url, engine = server.ready()
    streams = Streams(url, 5, 450)
    server.popen.send_signal(signal.SIGINT)
    for text in streams.join():
        assert "[DONE]" not in text
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "server_shutting_down"
    assert server.end()[0] == 0
    assert not is_alive(engine)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_aborts(launch, signum, status):
    """F07: still error events, exit 128 + signal, no orphan."""
    server = launch(drain_s=60)
    url, engine = server.ready()
    streams = Streams(url, 10, 450)
    server.popen.send_signal(signum)
    wait_for(lambda: ["draining", "10"] in server.lines)
    server.popen.send_signal(signum)
    for text in streams.join():
        assert "[DONE]" not in text
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "server_shutting_down"
    assert server.end()[0] == status
    assert not is_alive(engine)


def test_signal_while_starting(launch):
    server = launch(Behaviour(start_s=30))
    wait_for(lambda: server.lines and server.lines[0][0] == "listening", 20)
    url = server.lines[0][1]
    with httpx.Client(base_url=url, timeout=10) as http:
        wait_for(lambda: http.get("/health").status_code == 503)
        assert error_of(chat(http), 503)["code"] == "engine_unavailable"
        assert http.get("/docs").status_code == 200
    server.popen.send_signal(signal.SIGTERM)
    assert server.end()[0] == 143


def test_engine_that_cannot_start(launch):
    server = launch(Behaviour(start_failed="model.safetensors: lm_head is missing"))
    assert server.end() == (2, "model.safetensors: lm_head is missing\n")


def test_a_tokenizer_that_cannot_be_read_ends_the_engine_that_was_begun(tmp_path):
    """The engine starts while the tokenizer is read; it must not outlive a front that cannot."""
    config = tiny_config(tmp_path)
    (config.base_path / "tokenizer.json").write_text("{}")
    spawner, processes = Spawner(Behaviour()), []

    def spawn():
        process, connection = spawner()
        processes.append(process)
        return process, connection

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        run_server(Served(config, tiny_registry(tmp_path), spawn))
    assert [process.wait(10) for process in processes] == [0]


def test_port_taken(launch):
    """F10: the second server ends at once with one line; the first is unaffected."""
    first = launch()
    url, _ = first.ready()
    port = int(url.rsplit(":", 1)[1])
    second = launch(port=port)
    status, said = second.end()
    assert status == 4
    assert said == f"127.0.0.1:{port} is in use\n"
    with httpx.Client(base_url=url, timeout=10) as http:
        assert chat(http, max_tokens=1).status_code == 200


def test_bind():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} is in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port):
        pass
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(BadInput, match=host):
            bind(host, 0)
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        with bind("[::1]", 0) as six:
            assert six.family == socket.AF_INET6


def test_engine_killed(launch):
    """F01: kill -9 under 20 streams: an error event and no [DONE]; then it serves again."""
    server = launch()
    url, engine = server.ready()
    streams = Streams(url, 20, 450)
    os.kill(engine, signal.SIGKILL)
    for text in streams.join():
        assert "[DONE]" not in text
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "engine_unavailable"
    url, again = server.ready(2)
    assert again != engine
    with httpx.Client(base_url=url, timeout=10) as http:
        assert chat(http, max_tokens=1).status_code == 200
        assert chat(http, model="upper", max_tokens=1).status_code == 200
        assert "mlora_engine_restarts_total 1.0" in http.get("/metrics").text


def test_engine_stopped_for_a_while(launch):
    """F05: a stall is noticed and told; streams go on afterwards; nothing is restarted."""
    server = launch()
    url, engine = server.ready()
    streams = Streams(url, 3, 200)
    os.kill(engine, signal.SIGSTOP)
    with httpx.Client(base_url=url, timeout=10) as http:
        wait_for(lambda: http.get("/readyz").status_code == 503, 10)
        assert http.get("/health").json()["status"] == "degraded"
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: http.get("/readyz").status_code == 200, 10)
        assert http.get("/health").json() == {"status": "ready", "reason": None}
    for text in streams.join():
        assert text.endswith("data: [DONE]\n\n")
    assert len([words for words in server.lines if words[0] == "ready"]) == 1


def test_front_killed(launch):
    """F04: the engine goes with it, the port is free."""
    server = launch()
    url, engine = server.ready()
    server.popen.kill()
    wait_for(lambda: not is_alive(engine), 3)
    with bind("127.0.0.1", int(url.rsplit(":", 1)[1])):
        pass


def test_requests_without_a_token_get_503(serve_fleet):
    """F01: nothing was sent yet, so the client may simply try again."""
    server = serve_fleet(Behaviour(silent=True), Behaviour())
    replies = []

    def ask():
        with httpx.Client(base_url=server.url, timeout=10) as http:
            replies.append(chat(http, stream=True, max_tokens=1))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(server.spawner.engine.submits) == 3)
    server.spawner.engine._running = False
    for thread in threads:
        thread.join(10)
    for reply in replies:
        assert error_of(reply, 503)["code"] == "engine_unavailable"
        assert reply.headers["retry-after"] == "2"
    with httpx.Client(base_url=server.url, timeout=10) as http:
        wait_for(lambda: chat(http, max_tokens=1).status_code == 200)


def test_breaker(serve_fleet):
    """F03: five deaths within a minute: 503 with the reason, not ready, no hot loop."""
    server = serve_fleet(Behaviour(dies_after_tokens=1))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for life in range(5):
            wait_for(lambda n=life: len(server.spawner.engines) == n + 1)
            wait_for(lambda: http.get("/readyz").status_code == 200)
            chat(http, max_tokens=5)
        wait_for(lambda: http.get("/health").json()["status"] == "down")
        error = error_of(chat(http), 503)
        assert error["code"] == "engine_unavailable"
        assert "5 times" in error["message"]
        assert http.get("/readyz").status_code == 503
        assert http.get("/v1/models").status_code == 200
        time.sleep(0.5)
        assert len(server.spawner.engines) == 5


def test_pinned_adapters_come_back(serve_fleet):
    server = serve_fleet(Behaviour(dies_after_tokens=3), Behaviour())
    with httpx.Client(base_url=server.url, timeout=10) as http:
        path = server.registry.get("upper").path
        body = {"lora_name": "pinned", "lora_path": path, "pinned": True}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        chat(http, max_tokens=9)
        wait_for(lambda: len(server.spawner.engines) == 2)
        wait_for(lambda: server.spawner.engine._adapters)
        (status,) = server.spawner.engine._adapters.values()
        assert (status.digest, status.tier) == (server.registry.get("pinned").digest, "hot")


class Failing(Spawner):
    """The second start fails to make a process."""

    def __call__(self):
        if len(self.engines) == 1:
            self.engines.append(self.engines[0])
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super().__call__()


def test_spawn_that_fails_once(serve_fleet):
    """F14: a failed fork counts as a death and is tried again."""
    server = serve_fleet(spawner=Failing(Behaviour(dies_after_tokens=1), Behaviour()))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        chat(http, max_tokens=9)
        wait_for(lambda: len(server.spawner.engines) == 3)
        wait_for(lambda: chat(http, max_tokens=1).status_code == 200)

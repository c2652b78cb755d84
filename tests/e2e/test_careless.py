"""What operators do to a server without thinking: full disks, closed terminals, signals."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import START_S, Served, start
from tests.signature import deep_adapter


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Under nohup the tests would start servers that ignore SIGHUP, as they should then."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own(signature_fleet: Path, tmp_path: Path) -> Iterator[Served]:
    """A server on a fleet file of its own, that the test may change."""
    fleet = signature_fleet.with_name(f"own-{tmp_path.name}.yaml")
    fleet.write_text(signature_fleet.read_text())
    server = start(fleet, log=tmp_path / "log")
    try:
        yield server
    finally:
        server.close()
        fleet.unlink()


def reloads(server: Served, outcome: str) -> float:
    line = f'mlora_fleet_reloads_total{{outcome="{outcome}"}} '
    found = [text for text in server.metrics().splitlines() if text.startswith(line)]
    return float(found[0].removeprefix(line)) if found else 0.0


def test_f08_sighup_serves_the_changed_file_or_nothing_of_it(own: Served) -> None:
    """F08, F82: a good file is applied whole, a bad one changes nothing and says one line."""
    added = own.fleet.with_name("late")
    deep_adapter(added, 77, r=8)
    good = own.fleet.read_text()
    changed = good.replace("./adapters/*}", "./adapters/*}, {name: late, source: ./late}")
    assert changed != good
    own.fleet.write_text(changed.replace("server:", "serve_r:"))
    own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: reloads(own, "refused") == 1)
    assert "late" not in own.adapters()
    (line,) = [text for text in own.log.read_text().splitlines() if "is not served" in text]
    assert f"{own.fleet}:5:1: serve_r: unknown key; did you mean 'server'?" in line
    own.fleet.write_text(changed)
    for _ in range(50):
        own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "late" in own.adapters())
    own.fleet.write_text(changed.replace("max_num_seqs: 64", "max_num_seqs: 32"))
    own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: reloads(own, "refused") == 2)
    assert "limits.max_num_seqs: running 64, the file says 32" in own.log.read_text()
    assert own.stop() == 0


def test_f08_sighup_during_the_start_ends_nothing(signature_fleet: Path, tmp_path: Path) -> None:
    """As `systemctl reload` right after `start` sends it."""
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "multilora_cli", "serve", str(signature_fleet), "--json"],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    server = Served(process, "", signature_fleet, {}, log)
    try:
        assert process.stdout is not None
        stat = Path(f"/proc/{process.pid}/status")
        wait_for(lambda: _catches(stat, signal.SIGHUP))
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        while not lines and process.poll() is None:
            process.send_signal(signal.SIGHUP)
            time.sleep(0.02)
        assert process.poll() is None, log.read_text()
        assert server.stop() == 0
    finally:
        server.close()


def _catches(status: Path, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    (mask,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_f09_a_full_disk_of_the_log_is_not_the_servers(
    signature_fleet: Path, tmp_path: Path, full: str
) -> None:
    """Neither the line that says it is ready nor what is logged may end the engine or the start."""
    port = 18300 + os.getpid() % 1000
    with open("/dev/full", "wb") as nowhere, (tmp_path / "other").open("wb") as other:
        streams = {"stdout": other, "stderr": other} | {full: nowhere}
        process = subprocess.Popen(
            [sys.executable, "-m", "multilora_cli", "serve", str(signature_fleet),
             "--port", str(port)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, **streams,
        )  # fmt: skip
    server = Served(process, f"http://127.0.0.1:{port}", signature_fleet, {}, tmp_path / "other")
    try:
        server.wait_ready(START_S)
        assert "mlora_engine_restarts_total 0.0" in server.metrics()
        reply = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "r8", "prompt": "x", "max_tokens": 4},
            timeout=30,
        )
        assert reply.status_code == 200, reply.text
        assert server.stop() == 0
    finally:
        server.close()


def test_f15_few_descriptors_are_many_503s_and_no_more(
    signature_fleet: Path, tmp_path: Path
) -> None:
    """The hard limit of open files is below what connections may be: some are refused in words,
    adapters are still read, and all is well once they are gone."""
    limited = [sys.executable, "-c", _FEW_FILES, str(signature_fleet)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            limited, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdout is not None
    server = Served(process, "", signature_fleet, {}, tmp_path / "log")
    try:
        url = json.loads(b"".join(iter(process.stdout.readline, b"}\n")) + b"}")["url"]
        server.url = url
        sockets = [socket.create_connection(("127.0.0.1", int(url[-5:]))) for _ in range(120)]
        for each in sockets:
            each.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        refused = [each for each in sockets if _is_refused(each)]
        assert 70 <= len(refused) < 120
        for each in sockets[10:]:
            each.close()
        body = {"model": "r24", "prompt": "x", "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        for each in sockets[:10]:
            each.close()
        assert "at most 40 connections: the limit of open files is 80" in server.log.read_text()
        assert server.stop() == 0
    finally:
        server.close()


_FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 80))
from multilora_cli.cli.app import app
app(["serve", sys.argv[1], "--port", "0", "--json"])
"""


def _is_refused(connection: socket.socket) -> bool:
    """Whether 503 came; a connection that is served waits for the rest of our headers."""
    connection.settimeout(2 if not _is_refused.seen else 0.2)  # type: ignore[attr-defined]
    try:
        refused = connection.recv(4096).startswith(b"HTTP/1.1 503 ")
    except TimeoutError:
        return False
    _is_refused.seen = True  # type: ignore[attr-defined]
    return refused


_is_refused.seen = False  # type: ignore[attr-defined]


def test_a_terminal_that_is_closed_drains(signature_fleet: Path, tmp_path: Path) -> None:
    """SIGHUP of a terminal is no wish to read a file again, and the engine leaves it to the
    front; what was admitted ends whole."""
    port = 19300 + os.getpid() % 1000
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "multilora_cli", "serve", str(signature_fleet),
         "--port", str(port), "--quiet"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=terminal, stdout=terminal,
        stderr=terminal, start_new_session=True, preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(terminal)
    server = Served(process, f"http://127.0.0.1:{port}", signature_fleet, {}, tmp_path / "log")
    try:
        server.log.write_text("")
        server.wait_ready(START_S)
        body = {"model": "r8", "prompt": "x", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.close(leader)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0
    finally:
        server.close()


def _own_terminal() -> None:
    """Make standard input the controlling terminal, so that closing it sends SIGHUP."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

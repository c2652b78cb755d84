"""The engine as a process: start, messages, how it ends. Faults F01, F04, F05, F06 and F07."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.link import Closed, Link, read_frame, read_message, write_frame
from multilora_cli.engine.messages import (
    Abort,
    AdapterRef,
    Delta,
    Drain,
    FromEngine,
    LoadAdapter,
    Progress,
    Query,
    Ready,
    Reply,
    SamplingParams,
    StartFailed,
    Step,
    Submit,
    ToEngine,
)
from multilora_cli.engine.process import EXIT_CRASHED, spawn
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import F2_PAGE

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
START_S = 60.0  # a loaded machine imports torch in ten seconds


class Front:
    """The other end of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.process, self.socket = spawn(config)
        self.socket.settimeout(START_S)
        self.progress: list[str] = []

    def send(self, message: ToEngine) -> None:
        """One message to the engine."""
        write_frame(self.socket, msgspec.msgpack.encode(message))

    def next(self) -> FromEngine:
        """One message from it. Raises Closed."""
        return read_message(self.socket, FromEngine)

    def wait_ready(self) -> Ready:
        """Read up to Ready."""
        while isinstance(message := self.next(), Progress):
            self.progress.append(message.phase)
        assert isinstance(message, Ready), message
        return message

    def deltas(self, until: Callable[[Delta], bool]) -> Iterator[Delta]:
        """Deltas up to the first that `until` accepts."""
        while True:
            message = self.next()
            for delta in message.deltas if isinstance(message, Step) else ():
                yield delta
                if until(delta):
                    return

    def read_to_end(self) -> list[FromEngine]:
        """All that still comes."""
        messages = []
        while True:
            try:
                messages.append(self.next())
            except Closed:
                return messages

    def close(self) -> None:
        """End it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def config_of(fleet: SignatureFleet, **how: object) -> EngineConfig:
    settings = {"pool_bytes": 128 * F2_PAGE, "max_num_seqs": 32, "max_num_batched_tokens": 256,
                "num_slots": 9, "num_threads": 1}  # fmt: skip
    return EngineConfig(model_path=str(fleet.base), **(settings | how))


@pytest.fixture
def start(fleet: SignatureFleet) -> Iterator[Callable[..., Front]]:
    """Engines that are ready, and ended with the test."""
    fronts: list[Front] = []

    def started(**how: object) -> Front:
        fronts.append(Front(config_of(fleet, **how)))
        fronts[-1].wait_ready()
        return fronts[-1]

    yield started
    for front in fronts:
        front.close()


def is_gone(pid: int, within_s: float) -> bool:
    """Whether a process that is no child of ours ends in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_requests_adapters_calls_and_drain(
    start: Callable[..., Front], fleet: SignatureFleet
) -> None:
    """F06 within the engine: what was admitted ends, then the process does, with status 0."""
    front = start()
    assert {"import", "weights", "pool"} <= set(front.progress)
    ref = fleet.adapter(20)
    front.send(Submit(1, [1, 2, 3], GREEDY))
    front.send(Submit(2, [1, 2, 3], GREEDY, ref, n=2))
    front.send(LoadAdapter(3, fleet.adapter(95), hot=True))
    front.send(LoadAdapter(4, AdapterRef("no", "0" * 64, "/nowhere", 1)))
    front.send(Query(5))
    front.send(Submit(6, [1, 2, 3], msgspec.structs.replace(GREEDY, max_tokens=900)))
    replies: dict[int, Reply] = {}
    text: dict[tuple[int, int], list[int]] = {}
    while len(replies) < 3 or sum(len(t) == 5 for k, t in text.items() if k[0] < 6) < 3:
        message = front.next()
        if isinstance(message, Reply):
            replies[message.call_id] = message
        for delta in message.deltas if isinstance(message, Step) else ():
            text.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert text[1, 0] == [4, 5, 6, 7, 8] and text[2, 0] == text[2, 1] == [21] * 5
    assert replies[3].status is not None and replies[3].status.tier == "hot"
    assert replies[4].fault is not None and "/nowhere" in replies[4].fault.message
    assert replies[5].snapshot is not None
    front.send(Drain(0.5))
    front.send(Submit(7, [1], GREEDY))
    rest = [d for m in front.read_to_end() if isinstance(m, Step) for d in m.deltas]
    ends = {d.request_id: d for d in rest if d.finish_reason is not None}
    assert {6, 7} <= set(ends)
    assert all(d.fault is not None and d.fault.code == "server_shutting_down"
               for d in ends.values() if d.request_id > 5)  # fmt: skip
    assert front.process.wait(10) == 0


def test_f01_a_killed_engine_is_noticed_and_a_new_one_serves(start: Callable[..., Front]) -> None:
    front = start()
    for request in range(20):
        front.send(Submit(request, [1, 2, 3], msgspec.structs.replace(GREEDY, max_tokens=900)))
    for _ in front.deltas(until=lambda delta: True):
        pass
    front.process.kill()
    ends = [d for m in front.read_to_end() if isinstance(m, Step) for d in m.deltas]
    assert not any(delta.finish_reason for delta in ends), "a cut stream looks complete"
    assert front.process.wait(5) == -signal.SIGKILL
    again = start()
    again.send(Submit(1, [1, 2, 3], GREEDY))
    deltas = list(again.deltas(until=lambda delta: delta.finish_reason is not None))
    assert [t for d in deltas for t in d.token_ids] == [4, 5, 6, 7, 8]


_PARENT = """
import sys, time
import msgspec
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.process import spawn
process, connection = spawn(msgspec.json.decode(sys.argv[1], type=EngineConfig))
connection.recv(1)  # the engine speaks once it is tied to this process
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("hung", [False, True])
def test_f04_a_killed_front_takes_the_engine_with_it(fleet: SignatureFleet, hung: bool) -> None:
    """By the end of the socket; and by the kernel's signal where the engine cannot notice."""
    config = msgspec.json.encode(config_of(fleet)).decode()
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, config], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        if hung:
            os.kill(engine, signal.SIGSTOP)
        parent.kill()
        assert is_gone(engine, within_s=2.0)


def test_f05_a_step_that_hangs_is_told_of(start: Callable[..., Front]) -> None:
    front = start(debug=True, failpoints={"step": "sleep:3@3"})
    front.send(Query(1))
    assert isinstance(front.next(), Reply)
    front.send(Submit(2, [1, 2, 3], GREEDY))
    list(front.deltas(until=lambda delta: len(delta.token_ids) == 1))
    ages = []
    for call in range(3, 40):
        front.send(Query(call))
        while not isinstance(message := front.next(), Reply):
            pass
        assert message.snapshot is not None
        ages.append(message.snapshot.counters["loop_age_s"])
        time.sleep(0.1)
    assert max(ages) > 1.0, "nobody was told that the step hangs"
    assert ages[-1] == 0.0, "it does not count as hanging any more"


def test_f07_signals_are_the_fronts_to_act_on(start: Callable[..., Front]) -> None:
    front = start()
    front.send(Submit(1, [1, 2, 3], msgspec.structs.replace(GREEDY, max_tokens=100)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        front.process.send_signal(number)
    deltas = list(front.deltas(until=lambda delta: delta.finish_reason is not None))
    assert deltas[-1].finish_reason == "length"
    front.send(Submit(2, [1, 2, 3], msgspec.structs.replace(GREEDY, max_tokens=900)))
    front.send(Drain(0.0))
    ends = [d for m in front.read_to_end() if isinstance(m, Step) for d in m.deltas]
    assert ends[-1].fault is not None and ends[-1].fault.code == "server_shutting_down"
    assert front.process.wait(10) == 0


def test_a_crash_of_the_loop_ends_the_process(start: Callable[..., Front]) -> None:
    front = start(debug=True, failpoints={"step": "raise@2"})
    front.send(Submit(1, [1, 2, 3], GREEDY))
    front.read_to_end()
    assert front.process.wait(10) == EXIT_CRASHED


def test_a_base_that_cannot_be_served_is_told_in_one_message(tmp_path: Path) -> None:
    front = Front(EngineConfig(model_path=str(tmp_path)))
    messages = front.read_to_end()
    failed = messages[-1]
    assert isinstance(failed, StartFailed) and "no config.json" in failed.message
    assert failed.exit_code == 2 and front.process.wait(10) == 2
    front.close()


def test_junk_on_the_socket_ends_the_engine(start: Callable[..., Front]) -> None:
    for junk in (b"\xff" * 64, (5).to_bytes(4, "little") + b"abcde"):
        front = start()
        front.socket.sendall(junk)
        front.read_to_end()
        assert front.process.wait(10) == 0


def test_a_slow_reader_does_not_stop_the_engine() -> None:
    """Nobody reads, and `send` returns all the same; nothing is lost or out of order."""
    here, there = socket.socketpair()
    link = Link(there, lost=lambda: None)
    link.start()
    for number in range(3_000):
        link.send(Step([Delta(number, 0, list(range(100)))]))
    write_frame(here, msgspec.msgpack.encode(Abort(7)))
    assert link.take(None) == [Abort(7)] and link.take(0.0) == []
    got = [msgspec.msgpack.decode(read_frame(here), type=Step) for _ in range(3_000)]
    assert [step.deltas[0].request_id for step in got] == list(range(3_000))
    here.close()
    link.close()


def test_frames_that_are_cut_or_too_long() -> None:
    for data in (b"\x05\x00\x00\x00ab", b"\x00\x00", (2**30).to_bytes(4, "little")):
        here, there = socket.socketpair()
        with here, there:
            here.sendall(data)
            here.shutdown(socket.SHUT_WR)
            with pytest.raises(Closed):
                read_frame(there)

"""The engine client alone: starts that fail, calls that time out, frames that are broken."""

import asyncio
import signal
import socket

import msgspec
import pytest

from multilora_cli.engine.messages import Progress, Ready, SamplingParams, Submit
from multilora_cli.errors import BadInput, MloraError, RequestError
from multilora_cli.server.client import EngineClient, _ending
from multilora_cli.server.wire import MAX_FRAME_BYTES, Wire
from tests.fakes import Behaviour, Spawner

SUBMIT = Submit(0, [1], SamplingParams(max_tokens=4))


def frame(message):
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_a_failed_start_is_told_as_it_is():
    async def main():
        client = EngineClient(Spawner(Behaviour(start_failed="config.json: no such family")))
        client.start()
        with pytest.raises(BadInput, match="no such family"):
            await client.wait_ready()
        with pytest.raises(RequestError) as caught:
            client.submit([SUBMIT])
        assert caught.value.code == "engine_unavailable"
        await client.stop()
        assert len(client._spawn.engines) == 1

    run(main())


def test_an_engine_that_only_ends():
    class Ends(Spawner):
        def __call__(self):
            process, connection = super().__call__()
            self.engine._socket.shutdown(socket.SHUT_RDWR)
            return process, connection

    async def main():
        client = EngineClient(Ends(Behaviour(start_s=0.1)))
        client.start()
        with pytest.raises(MloraError, match="ended while it started"):
            await client.wait_ready()
        await client.stop()

    run(main())


def test_an_engine_that_is_killed_is_said_to_be():
    assert "memory" in _ending(-signal.SIGKILL) and _ending(3) == "exit status 3"


def test_deaths_are_counted_in_time_of_serving(monkeypatch):
    """F03: an engine that takes long to load and dies at once stays down too."""
    monkeypatch.setattr("multilora_cli.server.client.BREAKER_WINDOW_S", 0.5)

    async def main():
        client = EngineClient(Spawner(Behaviour(start_s=0.3, dies_after_tokens=1)))
        client.on_ready.append(lambda _: client.submit([SUBMIT]))
        client.start()
        await client.wait_ready()
        while client.state != "down":
            await asyncio.sleep(0.05)
        assert "5 times" in client.reason
        assert len(client._spawn.engines) == 5
        await client.stop()

    run(main())


def test_a_process_that_cannot_be_made():
    def spawn():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def main():
        client = EngineClient(spawn)
        client.start()
        with pytest.raises(MloraError, match="temporarily unavailable"):
            await client.wait_ready()
        await client.stop()

    run(main())


def test_nothing_is_admitted_before_ready():
    async def main():
        client = EngineClient(Spawner(Behaviour(start_s=0.3)))
        client.start()
        with pytest.raises(RequestError) as caught:
            client.submit([SUBMIT])
        assert (caught.value.code, caught.value.retry_after_s) == ("engine_unavailable", 2)
        await client.wait_ready()
        with client.submit([SUBMIT]) as ticket:
            deltas = []
            while batch := await ticket.next():
                deltas += batch
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        assert client.num_sequences == 0
        await client.stop()

    run(main())


def test_ids_are_never_used_twice_and_leaving_aborts():
    async def main():
        spawner = Spawner(Behaviour(silent=True))
        client = EngineClient(spawner)
        client.start()
        await client.wait_ready()
        for _ in range(3):
            with client.submit([SUBMIT, SUBMIT]):
                assert client.num_sequences == 2
            assert client.num_sequences == 0
        await client.query()
        ids = [submit.request_id for submit in spawner.engine.submits]
        assert len(set(ids)) == 6
        assert spawner.engine.aborted == ids
        await client.stop()

    run(main())


def test_a_call_that_is_not_answered():
    async def main():
        client = EngineClient(Spawner(Behaviour()))
        client.start()
        await client.wait_ready()
        client._receive = lambda message: None
        client._wire._receive = client._receive
        with pytest.raises(RequestError) as caught:
            await client.forget("d" * 64, timeout_s=0.05)
        assert caught.value.code == "adapter_loading"
        assert client._calls == {}
        assert await client.query(0.05) is None
        await client.stop()

    run(main())


def test_frames_in_any_pieces():
    async def main():
        got = []
        wire = Wire(got.append)
        messages = [Progress("weights", place, 9) for place in range(50)]
        data = b"".join(map(frame, messages))
        for size in (1, 3, 4, 7, 1000, len(data)):
            got.clear()
            for start in range(0, len(data), size):
                wire.data_received(data[start : start + size])
            assert got == messages

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        frame({"type": "nonsense"}),
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        frame(["ready"]),
    ],
)
def test_a_broken_frame_ends_the_connection(data):
    """The other side is our own engine: junk from it is a death, not a guess."""

    async def main():
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        wire = Wire(lambda message: None)
        ours.setblocking(False)
        await loop.create_unix_connection(lambda: wire, sock=ours)
        theirs.sendall(data)
        await asyncio.wait_for(wire.lost, 5)
        theirs.close()

    run(main())


def test_ready_during_a_drain_changes_nothing():
    async def main():
        client = EngineClient(Spawner(Behaviour(start_s=0.2)))
        client.start()
        await asyncio.sleep(0.1)
        client.begin_drain()
        ready = await client.wait_ready()
        assert isinstance(ready, Ready)
        assert client.state == "draining"
        with pytest.raises(RequestError) as caught:
            client.submit([SUBMIT])
        assert caught.value.code == "server_shutting_down"
        await client.stop()

    run(main())


def test_stopped_before_it_was_ready():
    async def main():
        client = EngineClient(Spawner(Behaviour(start_s=0.3)))
        client.start()
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0.05)
        await client.stop(0.1)
        with pytest.raises(MloraError, match="stopped before"):
            await waiting

    run(main())

"""What a request costs the front, counted in calls: writes, threads, system calls, looks."""

import asyncio
import ipaddress
import json
import os
from dataclasses import replace

import pytest

from multilora_cli.server import protocol
from multilora_cli.server.bodies import ChatBody, CompletionBody
from multilora_cli.server.fresh import Fresh, fresh_id, fresh_seed
from multilora_cli.server.joined_writes import JoinedWrites
from multilora_cli.server.protocol import parse_body
from tests.fakes import Behaviour
from tests.server.conftest import InProcess
from tests.server.test_connection import connect


class Written(asyncio.Transport):
    """Remembers what was written in which piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.ended = ""

    def write(self, data) -> None:
        assert not self.ended
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


def in_loop(function) -> None:
    async def main() -> None:
        behind = Written()
        await function(behind, JoinedWrites(behind, asyncio.get_running_loop()))

    asyncio.run(main())


def test_what_is_written_in_one_turn_is_one_piece() -> None:
    async def check(behind, joined) -> None:
        for part in (b"head", b"", b"body", b"end"):
            joined.write(part)
        assert behind.pieces == []
        await asyncio.sleep(0)
        assert behind.pieces == [b"headbodyend"]
        await asyncio.sleep(0)
        joined.write(b"next")
        await asyncio.sleep(0)
        assert behind.pieces == [b"headbodyend", b"next"]

    in_loop(check)


def test_what_is_written_at_once_keeps_its_place() -> None:
    async def check(behind, joined) -> None:
        joined.write_at_once(b"0")
        joined.write(b"1")
        joined.write_at_once(b"2")
        assert behind.pieces == [b"0", b"12"]
        joined.write(b"3")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert behind.pieces == [b"0", b"12", b"3"]

    in_loop(check)


def test_closing_sends_what_waits_and_aborting_does_not() -> None:
    async def check(behind, joined) -> None:
        joined.write(b"last")
        joined.close()
        assert (behind.pieces, behind.ended) == ([b"last"], "closed")

    async def check_abort(behind, joined) -> None:
        joined.write(b"lost")
        joined.abort()
        await asyncio.sleep(0)
        assert (behind.pieces, behind.ended) == ([], "aborted")

    in_loop(check)
    in_loop(check_abort)


@pytest.mark.parametrize("stream", [False, True])
def test_writes_of_a_reply(serve_fleet, monkeypatch, stream) -> None:
    """A reply is one write; a stream begins with its head and first chunk in one, and ends with its
    last chunk, [DONE] and the end of the body."""
    writes: list[bytes] = []
    write, at_once = JoinedWrites.flush, JoinedWrites.write_at_once

    def counted(self) -> None:
        if self._parts:
            writes.append(b"".join(self._parts))
        write(self)

    def counted_at_once(self, data) -> None:
        if not self._parts:
            writes.append(data)
        at_once(self, data)

    monkeypatch.setattr(JoinedWrites, "flush", counted)
    monkeypatch.setattr(JoinedWrites, "write_at_once", counted_at_once)
    server = serve_fleet(Behaviour(token_s=0.02))
    body = {"model": "upper", "prompt": [65, 66], "max_tokens": 2, "stream": stream}
    raw = json.dumps(body).encode()
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(raw), raw)
        )
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"".join(writes) == received and received.startswith(b"HTTP/1.1 200")
    assert len(writes) == (3 if stream else 1)
    if stream:
        assert writes[0].count(b"data: ") == 1
        assert writes[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("prompt", "more", "threads"),
    [
        ([65, 66, 67], {}, 0),
        ("short", {}, 0),
        ("a" * 1000, {}, 1),
        ([65] * 3000, {}, 0),
        ([65] * 6000, {}, 1),
        ([65] * 400, {"echo": True}, 1),
        ([[65] * 400, [66]], {}, 1),
    ],
)
def test_a_thread_is_woken_only_for_longer_work(tmp_path, prompt, more, threads) -> None:
    woken = []

    async def main() -> None:
        async with InProcess(tmp_path, Behaviour(max_model_len=8192)) as app:
            in_thread = app.front.in_thread

            async def counted(function):
                woken.append(1)
                return await in_thread(function)

            app.front.in_thread = counted
            body = {"model": "upper", "prompt": prompt, "max_tokens": 2} | more
            reply = await app.http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text

    asyncio.run(main())
    assert len(woken) == threads


def test_adapters_own_templates_never_run_on_the_loop(tmp_path) -> None:
    """A template may take as long as it likes."""

    async def main() -> None:
        async with InProcess(tmp_path) as app:
            base = app.front.texts.base
            own = replace(base, template_owner="adapter")
            start = b'{"model":"a","messages":[{"role":"user","content":"x"}]'
            plain = parse_body(start + b"}", ChatBody)
            assert base.is_quick(plain, 60) and not own.is_quick(plain, 60)
            variables = parse_body(start + b',"chat_template_kwargs":{"n":9}}', ChatBody)
            assert not base.is_quick(variables, 60) and not base.is_quick(plain, 2000)

    asyncio.run(main())


def test_a_body_is_scanned_without_a_call_for_every_number(monkeypatch) -> None:
    calls = []
    real = protocol._digits
    decoder = json.JSONDecoder(
        object_pairs_hook=protocol._unique, parse_int=lambda text: calls.append(text) or real(text)
    )
    monkeypatch.setattr(protocol, "_LONG", decoder)
    body = {"model": "a", "prompt": list(range(500))}
    parse_body(json.dumps(body).encode(), CompletionBody)
    assert calls == []
    long = b'{"model":"a","prompt":[1],"logit_bias":{"1":%b}}' % (b"1" * 5000)
    with pytest.raises(protocol.RequestError):
        parse_body(long, CompletionBody)
    fine = b'{"model":"a","prompt":[1],"temperature":0.%b}' % (b"1" * 5000)
    assert parse_body(fine, CompletionBody).temperature == pytest.approx(1 / 9)


def test_random_bytes_are_fetched_for_many_at_a_time(monkeypatch) -> None:
    calls = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda count: calls.append(count) or real(count))
    fresh = Fresh()
    taken = [fresh.take(16) for _ in range(1000)]
    assert len(set(taken)) == 1000 and {len(each) for each in taken} == {16}
    assert calls == [4096] * 4
    assert len({fresh_id() for _ in range(300)}) == 300
    seeds = [fresh_seed() for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert 0 <= min(seeds) < 2**61 < max(seeds) < 2**63


def test_a_host_is_looked_into_once(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with InProcess(tmp_path) as app:
            looks = []
            real = ipaddress.ip_address
            monkeypatch.setattr(
                ipaddress, "ip_address", lambda text: looks.append(text) or real(text)
            )
            for _ in range(20):
                assert (await app.http.get("/version")).status_code == 200
            for _ in range(3):
                reply = await app.http.get("/version", headers={"host": "evil.example"})
                assert reply.status_code == 403
            assert len(looks) == 2

    asyncio.run(main())

"""What a request costs the front, counted in calls: threads, looks."""

import asyncio
import ipaddress
import json
from dataclasses import replace

import pytest

from multilora_cli.server import protocol
from multilora_cli.server.bodies import ChatBody, CompletionBody
from multilora_cli.server.protocol import parse_body
from tests.fakes import Behaviour
from tests.server.conftest import InProcess


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

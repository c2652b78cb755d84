"""Requests beside one another: each answer is its own, one failure is one failure."""

import asyncio
import json
import random

import httpx

from multilora_cli.server.config import ServerLimits
from tests.fakes import Behaviour, write_adapter
from tests.server.conftest import InProcess
from tests.server.test_chat import chat, error_of, text_of

NAMES = tuple(f"team{i}/job-{i}" for i in range(8))


async def _one(http, model, prompt, stream):
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "stream": stream}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    if not stream:
        return reply.json()["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def _together(url, seed) -> None:
    rng = random.Random(seed)
    calls = []
    for place in range(64):
        model = rng.choice([*NAMES, "demo"])
        prompt = rng.choice(["x", f"say:answer {place} \u00e9\U0001f600", "ids:97,240,159,152,128"])
        calls.append((model, prompt, place % 3 > 0))
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http:
        together = await asyncio.gather(*(_one(http, *call) for call in calls))
        alone = [await _one(http, *call) for call in calls[::4]]
    assert together[::4] == alone
    for (model, prompt, _), text in zip(calls, together, strict=True):
        if prompt == "x":
            name = f"{model}#{NAMES.index(model) + 1}" if model in NAMES else "base"
            assert text == (f"<{name}>" * 9)[:40]


def test_many_streams_answer_as_each_alone(serve_fleet):
    """64 concurrent requests over all adapters and the base, streamed and not (seed 11)."""
    server = serve_fleet(Behaviour(token_s=0.001, max_model_len=4096), names=NAMES)
    asyncio.run(_together(server.url, 11))
    assert server.spawner.engine.num_live == 0
    assert server.spawner.engine.aborted == []


def test_a_failing_adapter_fails_alone(serve_fleet):
    """Promise 6: one broken adapter among good ones."""
    broken = {NAMES[3]: "adapter_unavailable"}
    server = serve_fleet(Behaviour(broken=broken), names=NAMES)

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            posts = [
                http.post("/v1/completions", json={"model": name, "prompt": "x"})
                for name in NAMES * 4
            ]
            return await asyncio.gather(*posts)

    for name, reply in zip(NAMES * 4, asyncio.run(run()), strict=True):
        assert reply.status_code == (503 if name in broken else 200)


def test_templates_of_adapters_are_not_used(serve_fleet):
    """A-SEC-04: an adapter's template is data that nobody renders; the base's decides."""
    server = serve_fleet()
    marker = server.folder / "marker"
    hostile = "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    folder = write_adapter(server.folder / "hostile", seed=5)
    (folder / "chat_template.jinja").write_text(hostile)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": hostile}))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"lora_name": "hostile", "lora_path": str(folder)}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert text_of(chat(http, model="hostile", max_tokens=8)) == "<hostile"
        prompt = server.spawner.engine.submits[-1].prompt
        assert bytes(t for t in prompt if t < 256) == b"user\nhiassistant\n"
        body = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
        reply = http.post("/v1/chat/completions", json=body | {"chat_template": hostile})
        assert error_of(reply)["param"] == "chat_template"
    assert not marker.exists()


def test_a_base_without_a_template(tmp_path):
    """A-OUT-14: chat is refused in words, completions go on."""
    from tests.fakes import byte_tokenizer

    plain = byte_tokenizer(tmp_path / "plain", template=None)

    async def run():
        async with InProcess(tmp_path, base_path=plain) as app:
            body = {"model": "upper", "messages": [{"role": "user", "content": "a"}]}
            reply = await app.http.post("/v1/chat/completions", json=body)
            assert error_of(reply)["code"] == "no_chat_template"
            body = {"model": "upper", "prompt": "a", "max_tokens": 1}
            assert (await app.http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_large_bodies_are_bounded(serve_fleet):
    """What large requests hold together has a limit; small ones go on."""
    server = serve_fleet(limits=ServerLimits(max_large_bodies=2, body_s=5))
    host, port = server.url.removeprefix("http://").split(":")

    async def run():
        held = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n"
                b"content-type: application/json\r\n\r\n{"
            )
            await writer.drain()
            held.append(writer)
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            big = {"prompt": "a" * 100_000}
            for _ in range(100):
                reply = await http.post("/tokenize", json=big)
                if reply.status_code == 503:
                    break
                await asyncio.sleep(0.02)
            assert error_of(reply, 503)["code"] == "server_is_overloaded"
            assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
            for writer in held:
                writer.close()
            for _ in range(100):
                reply = await http.post("/tokenize", json=big)
                if reply.status_code == 400:  # too long for the context, but it was read
                    break
                await asyncio.sleep(0.02)
            assert reply.status_code == 400

    asyncio.run(run())


def test_failed_adapters_are_listed_as_failed(tmp_path):
    """Not servable, so not a model; the list of adapters says why."""
    from multilora_cli.adapters.entry import AdapterRequest

    async def run():
        async with InProcess(tmp_path) as app:
            app.registry.register_all([AdapterRequest("gone", str(tmp_path / "nowhere"))])
            cards = (await app.http.get("/v1/models")).json()["data"]
            assert "gone" not in [card["id"] for card in cards]
            rows = (await app.http.get("/v1/lora_adapters")).json()["data"]
            (row,) = [row for row in rows if row["id"] == "gone"]
            assert row["tier"] == "failed"
            assert "nowhere" in row["detail"]
            body = {"model": "gone", "prompt": "a"}
            reply = await app.http.post("/v1/completions", json=body)
            assert error_of(reply, 503)["code"] == "adapter_unavailable"

    asyncio.run(run())


def test_a_bug_is_answered_in_the_error_contract(serve_fleet, monkeypatch, caplog):
    """A 500 is our object with an id that the log knows, and says nothing else; others go on."""
    server = serve_fleet()

    def broken(_: object) -> None:
        raise ValueError("secret words")

    monkeypatch.setattr("multilora_cli.server.front.Front.view", broken)
    with httpx.Client(base_url=server.url, timeout=20) as http:
        reply = http.get("/metrics", headers={"x-request-id": "bug-17"})
        assert reply.status_code == 500 and reply.headers["x-request-id"] == "bug-17"
        assert reply.json()["error"]["code"] == "internal_error" and "secret" not in reply.text
        assert http.get("/health").status_code == 200
    assert "request bug-17 failed" in caplog.text and "secret words" in caplog.text

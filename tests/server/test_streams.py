"""The stream protocol as properties (RELIABILITY 8.4), and clients that go away."""

import asyncio
import json
import socket
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_cli.engine.messages import Delta, SamplingParams, Submit
from multilora_cli.server.auth import Grant
from multilora_cli.server.choice import TextRules
from multilora_cli.server.metrics import Metrics
from multilora_cli.server.quota import Quotas
from multilora_cli.server.replies import Frame
from multilora_cli.server.run import Job, Run
from multilora_cli.server.sse import EventStream, whole_reply
from multilora_cli.server.ticket import Ticket
from multilora_cli.text.tokenizer import load_tokenizer
from tests.fakes import EOS, Behaviour, byte_tokenizer
from tests.server.conftest import InProcess
from tests.server.test_chat import chat, error_of

METRICS = Metrics("m", 4)
ALPHABET = "ab\u00e9\u20ac\U0001f600 \n"


class Scripted:
    """Stands for the engine client: gives a ticket whose deltas come in chosen batches."""

    def __init__(self, batches):
        self._batches = batches
        self.aborted = []

    def submit(self, submits):
        ticket = Ticket(submits, self.aborted.append)
        loop = asyncio.get_running_loop()

        def push(place=0):
            if place < len(self._batches):
                for delta in self._batches[place]:
                    ticket.push(delta)
                ticket.tell()
                loop.call_soon(push, place + 1)

        loop.call_soon(push)
        return ticket


def job_of(tokenizer, kind, prompts, n, stops, min_tokens):
    params = SamplingParams(max_tokens=100, stop_token_ids=(EOS,))
    submits = [Submit(place, [97], params, n=n) for place in range(prompts)]
    rules = TextRules(stops, min_tokens=min_tokens, stop_ids=frozenset({EOS}))
    return Job(Frame(kind, "m", None, ""), submits, rules, tokenizer, include_usage=True)


async def never():
    await asyncio.Event().wait()


def run_of(job, batches):
    run = Run(job, METRICS, Quotas(9, 1).take(Grant(), 1, 1))
    engine = Scripted(batches)
    run.admit(engine, never, 60, 60)
    return run, engine


async def whole(job, batches):
    run, _ = run_of(job, batches)
    try:
        return await whole_reply(run, await run.next())
    finally:
        run.close()


async def streamed(job, batches):
    run, engine = run_of(job, batches)
    sent = []

    async def send(message):
        sent.append(message)

    await EventStream(run, await run.next(), 60)({}, never, send)
    assert sent[-1]["more_body"] is False
    lines = b"".join(m["body"] for m in sent[1:]).decode().split("\n\n")
    assert lines[-1] == ""
    return [line.removeprefix("data: ") for line in lines[:-1]], engine


@st.composite
def scripts(draw):
    """Per sequence the ids it says; and all their deltas in one arbitrary interleaving."""
    prompts, n = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    pending = {}
    for request_id in range(prompts):
        for index in range(n):
            text = draw(st.text(ALPHABET, max_size=12))
            ids = list(text.encode())
            if draw(st.booleans()):
                ids.insert(draw(st.integers(0, len(ids))), 255)  # never valid UTF-8
            finish = "stop" if draw(st.booleans()) else "length"
            pending[request_id, index] = ([*ids, EOS] if finish == "stop" else [*ids, 97], finish)
    batches = []
    while pending:
        batch = []
        for key in draw(st.lists(st.sampled_from(sorted(pending)), min_size=1, unique=True)):
            ids, finish = pending[key]
            count = draw(st.integers(1, 4))
            rest = ids[count:]
            batch.append(Delta(*key, ids[:count], finish_reason=None if rest else finish))
            if rest:
                pending[key] = (rest, finish)
            else:
                del pending[key]
        batches.append(batch)
    return prompts, n, batches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_stream_equals_whole(tokenizer, kind):
    """One script, streamed and whole: same texts, reasons and usage; the protocol's invariants."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(scripts(), st.lists(st.text("ab\u00e9\u20ac ", min_size=1, max_size=3), max_size=3),
           st.integers(0, 3))  # fmt: skip
    def check(script, stops, min_tokens):
        prompts, n, batches = script
        job = job_of(tokenizer, kind, prompts, n, stops, min_tokens)
        reply = runner.run(whole(job, batches))
        lines, engine = runner.run(streamed(job, batches))
        assert lines[-1] == "[DONE]"
        assert lines.count("[DONE]") == 1
        chunks = [json.loads(line) for line in lines[:-1]]
        assert {chunk["id"] for chunk in chunks} == {job.frame.id}
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == reply["usage"]
        texts, ended, begun = [""] * len(reply["choices"]), {}, set()
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            index = choice["index"]
            assert index not in ended
            if kind == "chat":
                assert ("role" in choice["delta"]) == (index not in begun)
                texts[index] += choice["delta"].get("content") or ""
            else:
                texts[index] += choice["text"]
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended[index] = choice["finish_reason"]
        whole_texts = [
            c["message"]["content"] if kind == "chat" else c["text"] for c in reply["choices"]
        ]
        assert texts == whole_texts
        assert ended == {c["index"]: c["finish_reason"] for c in reply["choices"]}
        for text in texts:
            assert not any(stop in text for stop in stops) or min_tokens
        assert set(engine.aborted) <= set(range(prompts))

    with asyncio.Runner() as runner:
        check()


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_token_shows_when_it_came(tokenizer, kind):
    """The first two of the three bytes of a euro sign have no text; nor has what may be a stop."""
    job = job_of(tokenizer, kind, 1, 1, ["€b"], 0)
    batches = [[Delta(0, 0, [byte])] for byte in "a€".encode()]
    batches.append([Delta(0, 0, [99], finish_reason="length")])
    lines, _ = asyncio.run(streamed(job, batches))
    choices = [json.loads(line)["choices"][0] for line in lines[:-2]]
    texts = [c["delta"].get("content") if kind == "chat" else c["text"] for c in choices]
    assert texts == [*([""] if kind == "chat" else []), "a", "", "", "", "€c"]
    assert [c["finish_reason"] for c in choices[-2:]] == [None, "length"]


# ---- clients that go away


def wait_for(condition, timeout_s=5.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "not within the time"
        time.sleep(0.01)


def raw_request(server, body, path="/v1/chat/completions"):
    """A connection on which a request was sent and nothing read."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


BODY = {"model": "upper", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_client_goes_away(serve_fleet, stream, silent):
    """A-RUN-14: in mid-stream, in a plain request, and while queued; 200 in all, everything comes
    back."""
    server = serve_fleet(Behaviour(token_s=0.005, silent=silent, max_model_len=4096))
    connections = [raw_request(server, BODY | {"stream": stream}) for _ in range(50)]
    engine = server.spawner.engine
    wait_for(lambda: len(engine.submits) == 50)
    if stream and not silent:
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    for place, connection in enumerate(connections):
        if place % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_for(lambda: engine.num_live == 0)
    assert sorted(engine.aborted) == sorted(submit.request_id for submit in engine.submits)
    with httpx.Client(base_url=server.url, timeout=10) as http:
        body = {"lora_name": "upper"}
        assert http.post("/v1/unload_lora_adapter", json=body).status_code == 200
        assert 'finished_reason="abort",model_name="demo"} 50.0' in http.get("/metrics").text


def test_a_client_that_reads_slowly_is_cut_off(serve_fleet, monkeypatch):
    """Write stall: the sequence is aborted and nothing is held for a reader that stopped."""
    from dataclasses import replace

    from multilora_cli.server.config import ServerLimits

    limits = replace(ServerLimits(), write_stall_s=0.3)
    server = serve_fleet(Behaviour(tokens_per_step=50, max_model_len=10**7), limits=limits)
    connection = raw_request(server, BODY | {"stream": True, "max_tokens": 10**7})
    engine = server.spawner.engine
    wait_for(lambda: len(engine.submits) == 1)
    wait_for(lambda: engine.num_live == 0, 15)
    assert engine.aborted == [engine.submits[0].request_id]
    connection.close()


def test_stop_strings_abort_in_the_engine(serve_fleet):
    """The engine works on until the front tells it; then nothing is left."""
    server = serve_fleet(Behaviour(token_s=0.001, max_model_len=10**5))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        reply = chat(http, "x", model="upper", stop="per", n=2)
        assert [c["message"]["content"] for c in reply.json()["choices"]] == ["<up", "<up"]
        wait_for(lambda: server.spawner.engine.num_live == 0)
        assert server.spawner.engine.aborted == [server.spawner.engine.submits[0].request_id]


def test_faults_before_the_first_token_are_statuses(serve_fleet):
    broken = {"upper": "adapter_loading", "acme/legal": "something_new"}
    server = serve_fleet(Behaviour(broken=broken))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for stream in (False, True):
            reply = chat(http, model="upper", stream=stream)
            assert error_of(reply, 503)["code"] == "adapter_loading"
            assert reply.headers["retry-after"] == "3"
            reply = chat(http, model="acme/legal", stream=stream)
            assert error_of(reply, 500)["code"] == "internal_error"
            assert "acme" not in reply.text


def test_a_deadline_ends_a_request(serve_fleet):
    from multilora_cli.server.config import ServerLimits

    server = serve_fleet(Behaviour(silent=True), limits=ServerLimits(request_s=0.2))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        assert error_of(chat(http), 408)["code"] == "timeout"
    wait_for(lambda: server.spawner.engine.num_live == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_is_not_read_in_time(tmp_path, monkeypatch, stream):
    """RELIABILITY 7: a disk that hangs is 503 with Retry-After, long before the deadline; what has
    begun, and what only waits for its turn, is left alone."""
    from multilora_cli.server.config import ServerLimits

    async def run():
        limits = ServerLimits(load_s=0.3)
        async with InProcess(tmp_path, Behaviour(silent=True), limits=limits) as app:
            tiers = {"upper": "stored", "acme/legal": "warm"}
            found = {app.registry.with_digest(name).digest: tier for name, tier in tiers.items()}
            monkeypatch.setattr(
                "multilora_cli.server.run.found_tier", lambda _, digest: found[digest]
            )
            ask = {
                name: asyncio.create_task(
                    app.http.post(
                        "/v1/chat/completions", json=BODY | {"model": name, "stream": stream}
                    )
                )
                for name in tiers
            }
            reply = await asyncio.wait_for(ask["upper"], 5)
            error = error_of(reply, 503)
            assert (error["code"], reply.headers["retry-after"]) == ("adapter_loading", "5")
            assert not ask["acme/legal"].done()
            ask["acme/legal"].cancel()

    asyncio.run(run())


def test_the_queue_is_bounded(serve_fleet):
    from multilora_cli.server.config import ServerLimits

    server = serve_fleet(Behaviour(silent=True), limits=ServerLimits(max_sequences=8))
    held = [raw_request(server, BODY | {"n": 4}) for _ in range(2)]
    wait_for(lambda: len(server.spawner.engine.submits) == 2)
    with httpx.Client(base_url=server.url, timeout=10) as http:
        reply = chat(http)
        assert error_of(reply, 503)["code"] == "server_is_overloaded"
        assert reply.headers["retry-after"] == "1"
    for connection in held:
        connection.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_both_http_versions_get_the_same_events(serve_fleet, version):
    """HTTP/1.0 knows no chunks: the events come as they are, and the end of the connection ends
    them."""
    server = serve_fleet(Behaviour())
    content = json.dumps(BODY | {"stream": True, "max_tokens": 5}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/{version}\r\nhost: {host}\r\n"
            f"content-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        raw = b""
        while part := connection.recv(65536):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    assert (b"chunked" in head.lower()) == (version == "1.1")
    if version == "1.1":
        body, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 1 + 5 + 2  # the role, five tokens, the end

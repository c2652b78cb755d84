"""F90: every raw body of a generated corpus against every POST route.

Never a 5xx, never more than 8 KB back, never an echo of what was sent, and the event loop is never
held for long.
"""

import asyncio
import json
import re
import time

import pytest

from tests.server.conftest import InProcess

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/tokenize", "/detokenize",
)  # fmt: skip
CANARY = "c4n4ry"
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"model": "demo", "messages": MESSAGES, "max_tokens": 1}
TEXT = {"model": "demo", "prompt": "a", "max_tokens": 1}
NUMBERS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"-1", b"-0.5", b"1.5", b"2147483648",
    b"9007199254740993", b"9223372036854775808", b"18446744073709551616", b"1" + b"0" * 30,
    b"9" * 5000, b"true", b'"5"', b'"' + CANARY.encode() + b'"', b"[]", b"{}", b"0x10", b"01",
    b"+1",
)  # fmt: skip
NUMERIC_FIELDS = (
    b"temperature", b"top_p", b"top_k", b"min_p", b"n", b"max_tokens", b"min_tokens", b"seed",
    b"presence_penalty", b"frequency_penalty", b"repetition_penalty",
)  # fmt: skip
# The combinations that are right: they may pass, all others must not.
ALLOWED = {
    (b"top_k", b"-1"), (b"top_k", b"2147483647"), (b"seed", b"-1"), (b"seed", b"2147483648"),
    (b"seed", b"9007199254740993"), (b"presence_penalty", b"-1"), (b"frequency_penalty", b"-1"),
    (b"presence_penalty", b"1.5"), (b"frequency_penalty", b"1.5"), (b"temperature", b"1.5"),
    (b"presence_penalty", b"-0.5"), (b"frequency_penalty", b"-0.5"),
    (b"repetition_penalty", b"1.5"),
}  # fmt: skip


ASKS = {
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"a"}]',
    "/v1/completions": b'"prompt":"a"',
}


def number_bodies(ask):
    for field in NUMERIC_FIELDS:
        for value in NUMBERS:
            if (field, value) not in ALLOWED:
                given = b',"max_tokens":1,' if field != b"max_tokens" else b","
                yield b'{"model":"demo",' + ask + given + b'"' + field + b'":' + value + b"}"


def dumped(**fields):
    return json.dumps({**CHAT, **TEXT, **fields}).encode()


def malformed_bodies():
    good = json.dumps(CHAT).encode()
    yield from (good[:end] for end in range(0, len(good), 3))
    yield from (
        b"", b" ", b"{", b"}", b"[]", b"null", b"3", b'"x"', b"{}{}", good + b"x", good + good,
        b"\xef\xbb\xbf" + good, good.decode().encode("utf-16"), good.decode().encode("utf-32"),
        b"\x00" + good, good + b"\x00", b"\xff\xfe\xfd", b"{'model': 'demo'}", b"{model: 1}",
        b'{"model":"demo",}', b'{"a" "b"}', b"<xml/>", b"a=b&c=d", b"\x80\x04\x95pickle",
        b'{"model":"de\xffmo"}', b'{"model":"demo\n"}', b'{"model":"\\x41"}', b'{"__proto__":{}}',
        b"// c\n" + good, b"NaN", b"-", b"[" * 63, b"[" * 10**6, b'{"a":' * 10**5, b"{" * 70000,
        b'{"model":"demo","x":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"model":"demo","x":' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"model":"demo","model":"upper","prompt":"a"}',
        b'{"model":"demo","messages":[{"role":"user","role":"system","content":"a"}]}',
        b'{"model":"demo","prompt":"a","logit_bias":{"1":1,"1":2}}',
        b'{"lora_name":"a","lora_name":"b","lora_path":"c"}',
        b'{"model":"demo","prompt":"\\ud800"}', b'{"model":"demo","prompt":"\\udc00x"}',
        b'{"model":"\\ud83d","prompt":"x"}', b'{"model":"demo","\\ud800":1}',
        b'{"tokens":[1,2,"3"]}', b'{"tokens":"' + b"9" * 1000 + b'"}', b'{"tokens":[[1]]}',
        b'{"model":"demo","messages":"hi"}', b'{"model":"demo","messages":{"0":{}}}',
        b'{"model":"demo","messages":[1]}', b'{"model":"demo","messages":[[]]}',
        b'{"model":"demo","messages":[]}', b'{"model":"demo","messages":[{}]}',
        b'{"model":"demo","messages":[' + b"{}," * 200000 + b"{}]}",
        b'{"model":"demo","prompt":[' + b'"",' * 200000 + b'""]}',
        b'{"model":"demo","prompt":[' + b"[]," * 200000 + b"[]]}",
        b'{"model":"demo","prompt":' + json.dumps([1] * 10**5).encode() + b"}",
        b'{"model":"demo","prompt":"' + b"a" * 3 * 10**6 + b'"}',
        b'{"model":"' + CANARY.encode() * 10**5 + b'","prompt":"a"}',
        b'{"' + CANARY.encode() * 10**5 + b'":1}',
        b"{" + b",".join(b'"k%d":1' % i for i in range(50000)) + b"}",
        b'{"model":"demo","prompt":"a","stop":' + json.dumps(["a"] * 5).encode() + b"}",
        b'{"model":"demo","prompt":"a","stop":["a",""]}',
        b'{"model":"demo","prompt":"a","stop":""}',
        b'{"model":"demo","prompt":"a","stop":["' + b"s" * 10**6 + b'"]}',
        b'{"model":"demo","prompt":"a","stop":' + json.dumps(["a"] * 10**4).encode() + b"}",
        b'{"model":"demo","prompt":"a","logprobs":21}', b'{"model":"demo","prompt":"a","n":9}',
        b'{"model":"demo","prompt":"a","max_tokens":0}',
        b'{"model":"demo","prompt":"a","stream_options":{"include_usage":true}}',
        b'{"model":"demo","prompt":"a","stream":true,"stream_options":{"x":true}}',
        b'{"model":"demo","prompt":"a","stream":"yes"}', b'{"model":["demo"],"prompt":"a"}',
    )  # fmt: skip


def field_bodies():
    deep = {"$ref": "#/a"}
    unsupported = {
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": deep},
                            {"type": "text", "x": 1}, {"type": 3}, {}, [], "json", 7],
        "tools": [[{"type": "function", "function": {"name": "f", "parameters": deep}}], {}, "x"],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 3],
        "functions": [[{"name": "f"}]], "function_call": [{"name": "f"}],
        "guided_json": [{}, ""], "guided_regex": ["(a+)+$"], "guided_choice": [["a"]],
        "structured_outputs": [{"json": ""}, {"json_object": False}], "best_of": [2, 0, True],
        "use_beam_search": [True], "length_penalty": [2.0], "suffix": ["x"], "bad_words": [["a"]],
        "chat_template": ["{{ 1 }}"], "documents": [[{"a": 1}]],
        "prompt_logprobs": [0, 1], "allowed_token_ids": [[1]], "logits_processors": [["a"]],
        "truncate_prompt_tokens": [0, -2], "priority": [1, -1],
        "audio": [{}], "modalities": [["audio"], ["text", "audio"]],
        "prompt_embeds": ["AAAA"], "adapter_source": ["s3", "hub"], "api_token": [CANARY],
        "vllm_xargs": [{}], "kv_transfer_params": [{}], "prediction": [{"type": "content"}],
        "web_search_options": [{}],
    }  # fmt: skip
    for field, values in unsupported.items():
        yield from (dumped(**{field: value}) for value in values)
    typed = {
        "model": [3, [], {}, True], "lora_path": [3, {}, "", "x/y/z"],
        "adapter": [{"generation": 1}, 3],
        "lora_request": [{}, {"lora_name": ""}, {"lora_name": "a", "x": 1}, "upper"],
        "stream": [1, "true", []], "stop_token_ids": [[-1], ["1"], [384], 5, [1] * 65],
        "logit_bias": [{"a": 1}, {"1": 101}, {"1": "5"}, {"-1": 1}, {"384": 1}, [1], {" 1": 1},
                       {str(i): 1 for i in range(301)}],
        "seed": ["5", 1.5, [], 2**63], "cache_salt": ["", 5, "x" * 300], "echo": ["yes", 1],
        "logprobs": [-1, "5", 1.5, 21], "top_logprobs": [21, -1, "5", 5], "n": [0, -1, 9, 10**9],
        "min_tokens": [-1, 5], "reasoning_effort": ["high", 3, "x" * 99],
        "chat_template_kwargs": [{"a": []}, {"messages": 1}, {"bos_token": "x"}, {"A": 1}, 3,
                                 {"enable_thinking": False}, {f"k{i}": 1 for i in range(17)}],
        "stream_options": [{}, 3, {"include_usage": "x"}], "ignore_eos": [1], "modle": ["demo"],
        "temprature": [1], "add_special_tokens": ["no"], "max_completion_tokens": [0, "5", 1.0],
    }  # fmt: skip
    for field, values in typed.items():
        yield from (dumped(**{field: value}) for value in values)


def message_bodies():
    contents = [
        None, 3, True, {}, [], [{}], [{"type": "image_url", "image_url": {"url": "http://x"}}],
        [{"type": "text"}], [{"type": "text", "text": 3}], [{"type": "text", "text": "a"}] * 65,
        [{"type": "text", "text": "a", "x": 1}], ["a"], [{"type": "input_audio"}],
    ]  # fmt: skip
    for content in contents:
        yield dumped(messages=[{"role": "user", "content": content}], prompt=None)
    for message in (
        {"role": "tool", "content": "a", "tool_call_id": "x"}, {"role": "root", "content": "a"},
        {"role": 3, "content": "a"}, {"content": "a"}, {"role": "user"},
        {"role": "user", "content": "a", "contnet": "b"},
        {"role": "user", "content": "a", "name": 3},
        {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "content": "a", "function_call": {"name": "x"}},
        {"role": "assistant", "content": "a", "audio": {"id": "x"}}, {"role": "user\u0000"},
    ):  # fmt: skip
        yield dumped(messages=[message], prompt=None)
    yield dumped(messages=MESSAGES * 2049, prompt=None)


CORPUS = [
    *malformed_bodies(),
    *number_bodies(ASKS["/v1/completions"]),
    *field_bodies(),
    *message_bodies(),
]
LEAKS = re.compile(rb"0x[0-9a-f]{6,}|Traceback|/root/|/home/|\.py\b|msgspec|Error\(|<class")


def test_the_corpus_is_large():
    assert len(CORPUS) > 300


class Heartbeat:
    """Longest time that the event loop did not come round, in seconds."""

    longest_s = 0.0

    async def run(self):
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.perf_counter() - started_s)
            await asyncio.sleep(0.001)


async def _attack(folder, route) -> list:
    failures = []
    async with InProcess(folder) as app:
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.run())
        headers = {"content-type": "application/json"}
        for body in CORPUS if route in ASKS else [*malformed_bodies(), *message_bodies()]:
            reply = await app.http.post(route, content=body, headers=headers)
            if reply.status_code >= 500 or len(reply.content) > 8192:
                failures.append((reply.status_code, len(reply.content), body[:80]))
            if reply.status_code == 200:
                continue
            error = reply.json()["error"]
            if (
                set(error) != {"message", "type", "param", "code"}
                or not reply.headers["x-request-id"]
            ):
                failures.append(("shape", reply.text[:200], body[:80]))
            echoes = reply.text.count(CANARY) > (1 if reply.status_code == 404 else 0)
            if echoes or LEAKS.search(reply.content):
                failures.append(("leak", reply.text[:200], body[:80]))
        beating.cancel()
        assert heartbeat.longest_s < 4.0  # aim 0.1 s; other work shares this machine
        alive = await app.http.post("/v1/completions", json=TEXT)
        assert alive.status_code == 200
    return failures


@pytest.mark.parametrize("route", ROUTES)
def test_hostile_bodies(tmp_path, route):
    """F90, A-API-15, A-API-17, A-API-19, A-OUT-13: 4xx of the catalogue for all of the corpus."""
    assert asyncio.run(_attack(tmp_path, route)) == []


async def _all_refused(folder, route, bodies) -> list:
    async with InProcess(folder) as app:
        headers = {"content-type": "application/json"}
        passed = []
        for body in bodies:
            reply = await app.http.post(route, content=body, headers=headers)
            if reply.status_code not in (400, 404):
                passed.append((reply.status_code, body[:160]))
        return passed


def test_what_must_not_pass(tmp_path):
    """A-API-15, A-API-17: numbers out of range and fields that change meaning are never ignored."""
    for route, extra in (("/v1/chat/completions", b"prompt"), ("/v1/completions", b"messages")):
        bodies = [
            json.dumps({k: v for k, v in json.loads(b).items() if k != extra.decode()}).encode()
            for b in field_bodies()
        ]
        others = {
            "/v1/chat/completions": ("echo", "logprobs"),
            "/v1/completions": ("top_logprobs", "reasoning_effort", "chat_template_kwargs"),
        }[route]
        bodies = [b for b in bodies if not any(f'"{o}"'.encode() in b for o in others)]
        bodies += number_bodies(ASKS[route])
        assert asyncio.run(_all_refused(tmp_path / extra.decode(), route, bodies)) == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "0"),
        ({"temperature": 2.5}, "temperature", "2"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.5}, "top_p", "1"),
        ({"top_k": -5}, "top_k", "-1"),
        ({"n": 0}, "n", "1"),
        ({"frequency_penalty": 100}, "frequency_penalty", "2"),
        ({"stop": ["a"] * 5}, "stop", "4"),
        ({"stop": [""]}, "stop[0]", "1"),
        ({"max_tokens": "5"}, "max_tokens", "int"),
        ({"temprature": 1}, "temprature", "temperature"),
        ({"tool": []}, "tool", "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
    ],
)
def test_messages_name_field_and_range(tmp_path, body, param, words):
    """A-API-15, A-OUT-13: the field, what is expected, the nearest known name."""

    async def run():
        async with InProcess(tmp_path) as app:
            for route, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                reply = await app.http.post(route, json={**good, **body})
                error = reply.json()["error"]
                assert reply.status_code == 400
                assert error["param"] == param
                assert words in error["message"]
                assert error["type"] == "invalid_request_error"

    asyncio.run(run())


def test_words_that_are_none_are_not_repeated(tmp_path):
    """RELIABILITY 3.4: no echo of input; the words that there are are told instead."""
    long = "\u001b[31mSECRET" * 20

    async def run():
        async with InProcess(tmp_path) as app:
            told = []
            for message in (
                {"role": long, "content": "x"},
                {"role": "user", "content": [{"type": long, "text": "x"}]},
            ):
                reply = await app.http.post(
                    "/v1/chat/completions", json={**CHAT, "messages": [message]}
                )
                assert reply.status_code == 400 and "SECRET" not in reply.text
                told.append(reply.json()["error"]["message"])
            reply = await app.http.post(
                "/v1/fleet",
                json={"settings": {}, "patterns": [],
                      "adapters": [{"name": "a", "source": "x", "pin": long}]},
            )  # fmt: skip
            assert reply.status_code == 400 and "SECRET" not in reply.text
            return [*told, reply.json()["error"]["message"]]

    assert asyncio.run(run()) == [
        "messages[0].role: expected 'assistant' or 'developer' or 'system' or 'user'",
        "messages[0].content[0].type: expected 'text'",
        "adapters[0].pin: expected 'hot' or 'warm'",
    ]


async def _kinds(folder) -> None:
    async with InProcess(folder) as app:
        body = json.dumps(CHAT).encode()
        for kind in (
            None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
            "application/xml", "application/jsonx", "text/json", "", "application/json, text/plain",
        ):  # fmt: skip
            headers = {"content-type": kind} if kind is not None else {}
            reply = await app.http.post("/v1/chat/completions", content=body, headers=headers)
            assert reply.status_code == 415, kind
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        reply = await app.http.post("/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 415
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        reply = await app.http.post("/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 200
        headers["content-length"] = str(50 * 10**6)
        reply = await app.http.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert (reply.status_code, reply.headers["connection"]) == (413, "close")
        for length in ("-1", "1e3", "\u0663", "x", "9" * 100):
            headers["content-length"] = length.encode()
            reply = await app.http.post("/v1/chat/completions", content=b"{}", headers=headers)
            assert reply.status_code == 413

        async def endless():
            for _ in range(100):
                yield b" " * 10**5

        headers = {"content-type": "application/json"}
        reply = await app.http.post("/v1/completions", content=endless(), headers=headers)
        assert reply.status_code == 413
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            reply = await app.http.request(method, "/v1/chat/completions")
            assert reply.status_code == 405
            assert reply.json()["error"]["code"] == "method_not_allowed"
        assert (await app.http.get("/nothing")).json()["error"]["code"] == "not_found"


def test_content_types_and_sizes(tmp_path):
    """A-API-19: 415, 413, 405 and 404 in the one shape."""
    asyncio.run(_kinds(tmp_path))

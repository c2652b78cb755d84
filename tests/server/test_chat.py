"""Chat and text completions over HTTP, answered by the fake engine's signatures."""

import json

import pytest


def chat(http, content="hi", model="demo", **fields):
    body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
    return http.post("/v1/chat/completions", json=body)


def events(text):
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_a_chat(http):
    reply = chat(http, "say:hello").json()
    assert reply["choices"][0]["message"]["content"] == "hello"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["model"] == "demo"


def test_a_stream(http):
    lines = events(chat(http, "say:hello", stream=True).text)
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "hello"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"


@pytest.mark.parametrize("model", ["upper", "demo:upper", "demo::upper"])
def test_adapter_by_model(http, model):
    reply = chat(http, model=model, max_tokens=9)
    assert reply.json()["choices"][0]["message"]["content"].startswith("<upper#1>")
    assert reply.json()["model"] == model
    assert reply.headers["x-mlora-adapter"] == "upper"

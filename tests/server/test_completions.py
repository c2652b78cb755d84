"""Text completions, tokenizing and its reverse."""

import json

import pytest

from tests.fakes import BOS, EOS
from tests.server.test_chat import error_of


def complete(http, prompt="a", model="demo", **fields):
    return http.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})


def texts(reply):
    return [choice["text"] for choice in reply.json()["choices"]]


def stream_texts(reply, count):
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    found = [""] * count
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            found[choice["index"]] += choice["text"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("say:hi", ["hi"]),
        (["say:hi"], ["hi"]),
        (["say:hi", "say:you"], ["hi", "you"]),
        ([*b"say:ids"], ["ids"]),
        ([[*b"say:a"], [*b"say:b"]], ["a", "b"]),
    ],
)
def test_prompts(http, prompt, expected, stream):
    reply = complete(http, prompt, stream=stream)
    assert (stream_texts(reply, len(expected)) if stream else texts(reply)) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_n_of_many_prompts(http, stream):
    reply = complete(http, ["a", "b"], model="upper", n=2, max_tokens=10, stream=stream)
    expected = [f"<upper#1{index}>" for index in (0, 1, 0, 1)]
    assert (stream_texts(reply, 4) if stream else texts(reply)) == expected


def test_bos_is_put_before_text_only(http, server):
    complete(http, "ab", max_tokens=1)
    assert server.spawner.engine.submits[-1].prompt == [BOS, 97, 98]
    complete(http, "ab", max_tokens=1, add_special_tokens=False)
    assert server.spawner.engine.submits[-1].prompt == [97, 98]
    complete(http, "<turn>a", max_tokens=1)
    assert server.spawner.engine.submits[-1].prompt == [BOS, 258, 97]
    complete(http, [97], max_tokens=1)
    assert server.spawner.engine.submits[-1].prompt == [97]


def test_default_is_sixteen_tokens(http):
    """A-API-13: as documented in the schema."""
    assert complete(http, "a").json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["say:x", [*b"say:x"]])
def test_echo(http, prompt, stream):
    reply = complete(http, prompt, echo=True, stream=stream)
    assert (stream_texts(reply, 1) if stream else texts(reply)) == ["say:xx"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_no_new_token(http, stream):
    """A-API-11: the prompt with its logprobs, the first null, nothing generated."""
    reply = complete(http, [97, 98, 99], echo=True, max_tokens=0, logprobs=1, stream=stream)
    body = (
        json.loads(reply.text.split("\n\n")[0].removeprefix("data: ")) if stream else reply.json()
    )
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25]
    assert logprobs["top_logprobs"] == [None, {"b": -0.25}, {"c": -0.25}]
    assert logprobs["text_offset"] == [0, 1, 2]
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == 0


def test_logprobs_of_prompt_and_answer(http):
    reply = complete(http, "say:y", echo=True, logprobs=0, max_tokens=1)
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", *"say:y", "y"]
    assert logprobs["text_offset"] == [0, 3, 4, 5, 6, 7, 8]
    assert logprobs["top_logprobs"][-1] == {"y": -0.25}
    alone = complete(http, "say:y", logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]
    assert (alone["tokens"], alone["text_offset"]) == (["y"], [0])
    assert alone["top_logprobs"] == [{"y": -0.25, "z": -1.25}]


@pytest.mark.parametrize(
    ("prompt", "good"), [("", True), ([""], True), ([], False), ([[]], False), ([[], [1]], False)]
)
def test_empty_prompts(http, server, prompt, good):
    """A-API-12: BOS only, or 400; the server lives."""
    reply = complete(http, prompt, max_tokens=1)
    if good:
        assert reply.status_code == 200
        assert server.spawner.engine.submits[-1].prompt == [BOS]
    else:
        assert error_of(reply)["param"] == "prompt"
    assert error_of(complete(http, "", add_special_tokens=False))["param"] == "prompt"
    assert complete(http, "a").status_code == 200


def test_lengths(http):
    """A-API-13, A-API-14: the same rules as chat."""
    assert complete(http, [97] * 511, max_tokens=5).json()["usage"]["total_tokens"] == 512
    for length in (512, 513):
        error = error_of(complete(http, [97] * length))
        assert error["code"] == "context_length_exceeded"
        assert f"{length} tokens" in error["message"]
    full = complete(http, [97] * 512, max_tokens=0, echo=True)
    assert full.json()["usage"] == {
        "prompt_tokens": 512, "completion_tokens": 0, "total_tokens": 512,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    error = error_of(complete(http, "word" * 10**6 + "x"))
    assert error["code"] in ("context_length_exceeded", "request_too_large")


@pytest.mark.parametrize("bad", [384, -1, 2**31, 2**63, 2**64])
def test_token_ids_out_of_range(http, bad):
    """A-API-16: 400, whatever the size; nothing reaches the engine."""
    for prompt in ([97, bad], [[97], [bad]]):
        assert error_of(complete(http, prompt))["param"].startswith("prompt")
    assert error_of(complete(http, logit_bias={str(bad): 1}))["param"] == "logit_bias"
    assert error_of(complete(http, stop_token_ids=[bad]))["param"].startswith("stop_token_ids")
    assert error_of(http.post("/detokenize", json={"tokens": [bad]}))["param"].startswith("tokens")


def test_mixed_prompts_are_refused(http):
    for prompt in (["a", 1], [1, [2]], ["a", [1]], [True], [1.5], [None], ["a"] * 129):
        assert error_of(complete(http, prompt))["param"].startswith("prompt")


def test_tokenize(http):
    reply = http.post("/tokenize", json={"model": "demo", "prompt": "ab"}).json()
    assert reply == {"count": 3, "max_model_len": 512, "tokens": [BOS, 97, 98], "token_strs": None}
    reply = http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
    assert reply["tokens"] == [97, 98]
    body = {"messages": [{"role": "user", "content": "<end>"}], "return_token_strs": True}
    reply = http.post("/tokenize", json={**body, "add_generation_prompt": False}).json()
    assert reply["token_strs"] == ["<turn>", *"user\n<end>", "<end>"]
    assert error_of(http.post("/tokenize", json={}))["param"] == "prompt"
    assert error_of(http.post("/tokenize", json={"prompt": "a", "model": "no"}), 404)


def test_detokenize(http):
    tokens = [BOS, *"a\u00e9".encode(), EOS]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<s>a\u00e9</s>"}
    assert error_of(http.post("/detokenize", json={}))["param"] == "tokens"

"""The official client over every route that it knows, on a real socket."""

import openai
import pytest

from tests.fakes import Behaviour
from tests.server.conftest import openai_client

USER = [{"role": "user", "content": "say:one two"}]


@pytest.fixture(scope="module")
def client(server):
    with openai_client(server.url) as client:
        yield client


def test_chat(client):
    reply = client.chat.completions.create(model="demo", messages=USER)
    assert reply.choices[0].message.content == "one two"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 8
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert reply._request_id


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="upper",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "<upper#1>"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert {chunk.model for chunk in chunks} == {"upper"}


def test_chat_stream_helper(client):
    with client.chat.completions.stream(model="demo", messages=USER) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "one two"


def test_chat_logprobs_and_choices(client):
    reply = client.chat.completions.create(
        model="demo", messages=USER, logprobs=True, top_logprobs=2, n=2, seed=3, max_tokens=3,
        stop=["zzz"], user="u", metadata={"a": "b"}, store=False, presence_penalty=0.1,
        logit_bias={"65": -1}, extra_body={"adapter": "upper", "top_k": 5, "min_p": 0.1},
    )  # fmt: skip
    assert [choice.index for choice in reply.choices] == [0, 1]
    entry = reply.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("o", [111], 2)


def test_completions(client):
    reply = client.completions.create(model="demo", prompt=["say:a", "say:b"], logprobs=1)
    assert [choice.text for choice in reply.choices] == ["a", "b"]
    assert reply.choices[0].logprobs.tokens == ["a", "</s>"]
    stream = client.completions.create(model="acme/legal", prompt="x", max_tokens=14, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "<acme/legal#2>"


def test_models(client):
    listed = client.models.list()
    assert {model.id for model in listed} == {"demo", "upper", "acme/legal"}
    assert client.models.retrieve("acme/legal").id == "acme/legal"
    assert client.models.retrieve("upper").parent == "demo"


def test_errors_have_their_types(client):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="nobody", messages=USER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="demo", messages=USER, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        create(model="nobody", messages=USER, stream=True)


def test_keys(serve_fleet):
    server = serve_fleet(api_keys=("sesame",))
    with openai_client(server.url, "sesame") as client:
        assert client.models.list().data
    with openai_client(server.url, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_broken_adapter_is_not_retried(serve_fleet):
    server = serve_fleet(Behaviour(broken={"upper": "adapter_unavailable"}))
    with openai_client(server.url) as client:
        counting = client.with_options(max_retries=3)
        with pytest.raises(openai.InternalServerError) as caught:
            counting.chat.completions.create(model="upper", messages=USER)
        assert caught.value.code == "adapter_unavailable"
        assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(server.spawner.engine.submits) == 1


def test_the_client_notices_a_cut_stream(serve_fleet):
    """RELIABILITY finding: this client takes a stream without [DONE] for a whole one."""
    server = serve_fleet(Behaviour(token_s=0.01, dies_after_tokens=5), Behaviour())
    with openai_client(server.url) as client:
        stream = client.completions.create(model="upper", prompt="x", max_tokens=99, stream=True)
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "engine_unavailable"

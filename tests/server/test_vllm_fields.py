"""What vLLM's users send beside OpenAI's fields: token ids, cut prompts, messages to go on with;
and the routes that they and SageMaker call."""

import json
from typing import Any

import pytest

from tests.fakes import EOS, write_adapter
from tests.server.test_chat import chat, error_of, text_of


def complete(http: Any, **fields: Any) -> Any:
    return http.post("/v1/completions", json={"model": "demo", "max_tokens": 3, **fields})


def events(reply: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [{}, {"stop": "c"}, {"stop": "cd"}])
def test_token_ids_of_prompts_and_answers(http: Any, stream: bool, stop: dict[str, Any]) -> None:
    """Those that usage counts: a stop string's token with them, the end of sequence too."""
    fields = {"prompt": ["say:abcde", "say:xyz"], "n": 2, "max_tokens": 9, **stop}
    reply = complete(http, return_token_ids=True, stream=stream, **fields)
    cut = {"c": b"abc", "cd": b"abcd"}.get(stop.get("stop", ""), b"abcde")
    ends = [] if stop else [EOS]
    expected = [[*cut, *ends]] * 2 + [[*b"xyz", EOS]] * 2
    prompts = [[256, *b"say:abcde"]] * 2 + [[256, *b"say:xyz"]] * 2
    if not stream:
        choices = reply.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == expected
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        assert reply.json()["usage"]["completion_tokens"] == sum(map(len, expected))
        return
    got: list[list[int]] = [[] for _ in expected]
    told: list[list[int]] = [[] for _ in expected]
    for event in events(reply):
        (choice,) = event["choices"]
        got[choice["index"]] += choice["token_ids"]
        told[choice["index"]] += choice.get("prompt_token_ids", [])
    assert (got, told) == (expected, prompts)


def test_chat_has_token_ids_too(http: Any) -> None:
    reply = chat(http, "say:hi", return_token_ids=True).json()["choices"][0]
    assert reply["token_ids"] == [*b"hi", EOS]
    assert reply["prompt_token_ids"][-1] == ord("\n")
    streamed = events(chat(http, "say:hi", return_token_ids=True, stream=True))
    ids = [i for event in streamed for c in event["choices"] for i in c.get("token_ids", ())]
    assert ids == [*b"hi", EOS]
    assert "token_ids" not in chat(http, "say:hi").text


def test_logprobs_with_ids_for_text(http: Any) -> None:
    """Several tokens may have the same text; offsets stay those of the text."""
    fields = {"prompt": "say:ab", "logprobs": 1, "max_tokens": 2}
    plain = complete(http, **fields).json()["choices"][0]["logprobs"]
    named = complete(http, return_tokens_as_token_ids=True, **fields).json()["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{ord(c)}" for c in plain["tokens"]]
    assert named["logprobs"]["text_offset"] == plain["text_offset"]
    assert f"token_id:{ord('a')}" in named["logprobs"]["top_logprobs"][0]
    reply = chat(http, "say:a", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == f"token_id:{ord('a')}"
    assert content[0]["bytes"] == [ord("a")]


@pytest.mark.parametrize("prompt", ["0123456789say:ab", [*b"0123456789say:ab"]])
def test_the_last_tokens_of_a_prompt(http: Any, prompt: Any) -> None:
    reply = complete(http, prompt=prompt, truncate_prompt_tokens=6, echo=True).json()
    assert reply["usage"]["prompt_tokens"] == 6
    assert reply["choices"][0]["text"].startswith("say:ab")
    whole = complete(http, prompt=prompt, truncate_prompt_tokens=100).json()
    assert whole["usage"]["prompt_tokens"] == len(prompt) + isinstance(prompt, str)


def test_a_prompt_longer_than_the_context_is_cut_to_what_fits(http: Any) -> None:
    """-1: what the answer leaves of the context; without the field it stays a 400."""
    long = "x" * 3000 + "say:ab"
    for fields, size in (
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, 412),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, 496),
        ({"truncate_prompt_tokens": 500, "max_tokens": 3}, 500),
    ):
        reply = complete(http, prompt=long, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == size
    assert error_of(complete(http, prompt=long))["code"] == "context_length_exceeded"
    over = complete(http, prompt=long, truncate_prompt_tokens=512)
    assert error_of(over)["code"] == "context_length_exceeded"
    reply = chat(http, long, truncate_prompt_tokens=-1, max_tokens=12)
    assert reply.json()["usage"]["prompt_tokens"] == 500


def conversation(http: Any, *turns: tuple[str, str], **fields: Any) -> Any:
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"model": "demo", "messages": messages, "max_tokens": 4, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_an_answer_goes_on_where_the_last_message_ends(http: Any) -> None:
    """The prompt ends with its text: no end of turn, no new turn, and blanks are kept."""
    turns = (("user", "hello"), ("assistant", "Sure: "))
    on = {"add_generation_prompt": False, "continue_final_message": True}
    reply = conversation(http, *turns, return_token_ids=True, **on)
    ids = reply.json()["choices"][0]["prompt_token_ids"]
    assert bytes(i for i in ids[-15:] if i < 256) == b"ssistant\nSure: "
    body = {"messages": [{"role": r, "content": c} for r, c in turns], **on}
    assert http.post("/tokenize", json=body).json()["tokens"] == ids
    hostile = conversation(http, ("assistant", "<end>\ue0f0"), return_token_ids=True, **on)
    ids = hostile.json()["choices"][0]["prompt_token_ids"]
    assert bytes(i for i in ids if i < 256).endswith("<end>\ue0f0".encode())  # text, no token
    both = conversation(http, *turns, continue_final_message=True)
    assert error_of(both)["param"] == "continue_final_message"


def test_priority_is_refused_where_it_would_have_no_effect(http: Any) -> None:
    """A-OUT-13: as in vLLM, whose default scheduling has none either."""
    assert error_of(chat(http, "say:x", priority=3))["param"] == "priority"
    assert text_of(chat(http, "say:x", priority=0)) == "x"


def test_sagemakers_names_of_load_and_unload(http: Any, server: Any) -> None:
    """API 2.1: the same replies as the calls that they stand for."""
    folder = write_adapter(server.folder / "hosted", seed=8)
    body = {"name": "team/hosted", "src": str(folder)}
    reply = http.post("/adapters", json=body)
    added = "Success: LoRA adapter 'team/hosted' added successfully."
    assert (reply.status_code, reply.text) == (200, added)
    assert text_of(chat(http, model="team/hosted", max_tokens=12)) == "<team/hosted"
    assert error_of(http.post("/adapters", json=body))["type"] == "InvalidUserInput"
    assert error_of(http.post("/adapters", json={"name": "x"}))["type"] == "InvalidUserInput"
    reply = http.delete("/adapters/team%2Fhosted")
    gone = "Success: LoRA adapter 'team/hosted' removed successfully."
    assert (reply.status_code, reply.text) == (200, gone)
    assert error_of(http.delete("/adapters/team/hosted"), 404)["type"] == "NotFoundError"


def test_small_routes(http: Any) -> None:
    from multilora_cli import __version__

    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/ping").status_code == 200

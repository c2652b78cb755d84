"""Events of a stream, however the network cuts them."""

import json

import pytest

from multilora_cli.bench.stream import Answer


def event(**value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


STREAM = (
    event(model="a", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    + event(model="a", choices=[{"index": 0, "delta": {"content": "eins"}}], usage=None)
    + b": a comment\r\n\r\n"
    + event(model="a", choices=[{"index": 0, "text": "zwei \n", "finish_reason": "length"}])
    + event(
        model="a",
        choices=[],
        usage={
            "prompt_tokens": 7, "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 3}, "adapter": {"name": "a"},
        },
    )
    + b"data: [DONE]\n\n"
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_any_cut_of_the_bytes_says_the_same(size: int) -> None:
    answer = Answer()
    for start in range(0, len(STREAM), size):
        answer.feed(STREAM[start : start + size], float(start))
    assert len(answer.times_s) == 2  # the role alone is no text
    assert answer.times_s == sorted(answer.times_s)
    assert (answer.model, answer.adapter) == ("a", "a")
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (7, 5, 3)
    assert answer.done and answer.error is None


def test_a_stream_without_done_and_without_reason_is_not_whole() -> None:
    answer = Answer()
    answer.feed(event(choices=[{"text": "x"}]), 1.0)
    assert not answer.done


def test_tokens_without_text_still_have_their_time() -> None:
    """vLLM sends an empty chunk for half a character; what only ends an answer is no token."""
    answer = Answer()
    answer.feed(event(choices=[{"text": ""}]), 1.0)
    answer.feed(event(choices=[{"text": "ü"}]), 2.0)
    answer.feed(event(choices=[{"text": "", "finish_reason": "length"}]), 3.0)
    assert (answer.times_s, answer.last_s, answer.done) == ([1.0, 2.0], 3.0, True)


def test_a_chat_opens_without_a_token_and_may_say_an_empty_one() -> None:
    answer = Answer()
    chat = [
        ({"role": "assistant", "content": ""}, None),  # vLLM, SGLang and we open like this
        ({"role": "assistant", "content": None}, None),
        ({"content": ""}, None),  # half a character
        ({"content": "ü"}, None),
        ({"content": ""}, "stop"),
        ({}, "stop"),
    ]
    for place, (delta, reason) in enumerate(chat):
        choice = {"delta": delta, "finish_reason": reason}
        answer.feed(event(choices=[choice]), float(place))
    assert (answer.times_s, answer.last_s) == ([2.0, 3.0], 5.0)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (event(error={"message": "out of luck"}), "out of luck"),
        (event(error="plain"), "plain"),
        (b"data: {broken\n\n", "OpenAI's shape"),
        (b'data: {"choices": 3}\n\n', "OpenAI's shape"),
    ],
)
def test_errors_in_mid_stream_are_kept(data: bytes, error: str) -> None:
    answer = Answer()
    answer.feed(data, 1.0)
    assert error in str(answer.error)


def test_an_endless_line_does_not_grow_for_ever() -> None:
    answer = Answer()
    for _ in range(20):
        answer.feed(b"x" * 2**20, 1.0)
    assert "16 MiB" in str(answer.error)
    assert len(answer._pending) < 17 * 2**20

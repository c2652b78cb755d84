"""The demo base beside itself: an adapter with a tokenizer of its own, and without."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from multilora_cli.cli.fleet_adapters import read_fleet_adapters
from multilora_cli.cli.startup import prepare
from multilora_cli.demo import demo_adapter_path, demo_base_path
from multilora_cli.errors import AdapterError
from tests.e2e.serving import Served, start

NOTE, STOP = 1022, 1023  # the two rarest tokens of the demo base make room for them


def own_folder(folder: Path) -> Path:
    """`upper-case` with the base's tokenizer, two more special tokens and another template."""
    shutil.copytree(demo_adapter_path("upper-case"), folder)
    tokenizer = json.loads((demo_base_path() / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    gone = {token for token, i in vocab.items() if i in (NOTE, STOP)}
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [m for m in merges if "".join(m) not in gone]
    tokenizer["model"]["vocab"] = {t: i for t, i in vocab.items() if t not in gone}
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        special | {"id": NOTE, "content": "<|note|>"},
        special | {"id": STOP, "content": "<|stop|>"},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{{ bos_token }}<|note|>{% for m in messages %}{{ m.content }}{% endfor %}<|end|>"
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("own")
    own_folder(folder / "own")
    fleet = folder / "fleet.yaml"
    fleet.write_text(
        "base: {model: demo:base, name: demo}\n"
        "memory: {device: cpu, device_bytes: 256MiB}\n"
        "limits: {max_num_seqs: 8, max_num_batched_tokens: 256}\n"
        "adapters:\n"
        "- {name: plain, source: demo:upper-case}\n"
        "- {name: own, source: ./own, tokenizer: adapter}\n"
        "- {name: mixed, source: ./own, tokenizer: adapter, chat_template: base}\n"
        "server: {port: 0, state_file: off}\n"
    )
    server = start(fleet, log=folder / "log")
    yield server
    assert server.stop() == 0, server.log.read_text()


def post(served: Served, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(served: Served, **body: Any) -> str:
    reply = httpx.post(
        f"{served.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60
    )
    lines = [line[6:] for line in reply.text.split("\n\n") if line and line != "data: [DONE]"]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_same_text_other_ids(own: Served) -> None:
    text = "the ship <|note|> sails"
    ids = {
        model: post(own, "/tokenize", model=model, prompt=text)["tokens"]
        for model in ("demo", "plain", "own", "mixed")
    }
    assert ids["demo"] == ids["plain"] and ids["own"] == ids["mixed"]
    assert NOTE in ids["own"] and NOTE not in ids["plain"] and len(ids["own"]) < len(ids["plain"])
    for model, tokens in ids.items():
        assert post(own, "/detokenize", model=model, tokens=tokens)["prompt"].strip() == text


def test_conversations_are_those_of_the_model_that_was_named(own: Served) -> None:
    """Streams equal whole replies; what is asked in words equals what is asked in ids."""
    messages = [{"role": "user", "content": "hello ships"}]
    prompts, answers = {}, {}
    for model in ("plain", "own", "mixed"):
        asked = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        whole = post(own, "/v1/chat/completions", **asked)
        answer = whole["choices"][0]["message"]["content"]
        assert streamed(own, **asked) == answer
        prompts[model] = post(own, "/tokenize", model=model, messages=messages)["tokens"]
        assert whole["usage"]["prompt_tokens"] == len(prompts[model])
        ids = {"model": model, "prompt": prompts[model], "max_tokens": 12, "temperature": 0}
        assert post(own, "/v1/completions", **ids)["choices"][0]["text"] == answer
        answers[model] = answer
    assert prompts["mixed"] == prompts["plain"] and answers["mixed"] == answers["plain"]
    assert prompts["own"][:2] == [0, NOTE] and NOTE not in prompts["mixed"]


def test_listing_says_whose_text_it_is(own: Served) -> None:
    for model in ("plain", "own", "mixed"):  # a digest is known from the first use on
        post(own, "/v1/completions", model=model, prompt="a", max_tokens=1)
    rows = own.adapters()
    shown = {name: (row["tokenizer"], row["chat_template"]) for name, row in rows.items()}
    assert shown == {
        "plain": ("base", "base"), "own": ("adapter", "adapter"), "mixed": ("adapter", "base"),
    }  # fmt: skip
    assert len({row["digest"] for row in rows.values()}) == 1  # the same weights


def test_a_broken_tokenizer_refuses_its_adapter_alone(tmp_path: Path) -> None:
    own_folder(tmp_path / "own")
    path = tmp_path / "own" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][0] | {"id": 1024, "content": "<|far|>"}
    )
    path.write_text(json.dumps(tokenizer))
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "base: {model: demo:base, name: demo}\n"
        "memory: {device: cpu, device_bytes: 256MiB}\n"
        "limits: {max_num_seqs: 8, max_num_batched_tokens: 256}\n"
        "adapters:\n"
        "- {name: plain, source: demo:upper-case}\n"
        "- {name: own, source: ./own, tokenizer: adapter}\n"
    )
    startup = prepare(fleet, report=lambda *_: None)
    ((name, error),) = startup.failures
    assert name == "own" and "the base's embedding has 1,024 rows" in error.message
    assert startup.registry.resolve("plain")
    found = read_fleet_adapters(startup.loaded, startup.geometry, lambda folder: folder)  # plan's
    problems = {adapter.name: result for adapter, result in found}
    assert isinstance(problems["own"], AdapterError) and isinstance(problems["plain"], Path)

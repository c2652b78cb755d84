"""Adapters with a tokenizer and a template of their own, beside some without."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.errors import AdapterError
from multilora_cli.fleet.statefile import StateFile
from multilora_cli.server import texts
from multilora_cli.server.changes import RuntimeChanges, ServedFleet, merge
from tests.fakes import (
    BOS,
    END_TURN,
    EOS,
    TURN,
    VOCAB,
    Behaviour,
    own_tokenizer,
    tiny_registry,
    write_adapter,
)
from tests.server.conftest import InProcess

IDS = f"ids:97,98,{END_TURN},99"  # what the engine is made to say


def own_adapter(folder: Path, seed: int = 5, **options: Any) -> Path:
    return own_tokenizer(write_adapter(folder, seed=seed), **options)


def app_of(folder: Path, *behaviours: Behaviour, **fields: Any) -> InProcess:
    """A server of `own`, whose text is its own, and `upper`, whose is the base's."""
    source = own_adapter(folder / "own")
    registry = tiny_registry(folder, ("upper",))
    registry.register(AdapterRequest("own", str(source), **({"tokenizer": "adapter"} | fields)))
    return InProcess(folder, *behaviours, registry=registry)


async def post(app: InProcess, path: str, **body: Any) -> Any:
    reply = await app.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def streamed(app: InProcess, path: str, **body: Any) -> str:
    reply = await app.http.post(path, json=body | {"stream": True})
    lines = [line[6:] for line in reply.text.split("\n\n") if line and line != "data: [DONE]"]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def test_the_same_text_is_other_tokens_and_the_same_tokens_other_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with app_of(tmp_path) as app:
            tokens = {}
            for model in ("demo", "upper", "own"):
                reply = await post(
                    app, "/tokenize", model=model, prompt="ab<note>", return_token_strs=True
                )
                tokens[model] = reply["tokens"]
                back = await post(app, "/detokenize", model=model, tokens=reply["tokens"])
                assert back["prompt"].removeprefix("<s>") == "ab<note>"
            assert tokens["own"] == [98, 97, VOCAB - 1] and reply["token_strs"][2] == "<note>"
            assert tokens["demo"] == tokens["upper"] != tokens["own"]
            assert (await post(app, "/detokenize", model="upper", tokens=[97]))["prompt"] == "a"

            body = {"prompt": IDS, "max_tokens": 6, "logprobs": 1, "echo": True}
            own = (await post(app, "/v1/completions", model="own", **body))["choices"][0]
            upper = (await post(app, "/v1/completions", model="upper", **body))["choices"][0]
            assert own["text"] == f"{IDS}ba" and own["finish_reason"] == "stop"
            assert upper["text"] == f"{IDS}abcab" and upper["finish_reason"] == "length"
            assert own["logprobs"]["tokens"][-3:] == ["b", "a", "<end>"]
            stops = {name: s.params.stop_token_ids for name, s in _submits(app)}
            assert tuple(stops["own"]) == (END_TURN,) and tuple(stops["upper"]) == (EOS,)
            for model, text in (("own", "ba"), ("upper", "abcab")):
                asked = {"model": model, "prompt": IDS, "max_tokens": 6}
                assert await streamed(app, "/v1/completions", **asked) == text

            shown = body | {"skip_special_tokens": False, "echo": False}
            own = (await post(app, "/v1/completions", model="own", **shown))["choices"][0]
            assert own["text"] == "ba"  # its end is no part of the answer
            stopped = {"model": "own", "prompt": IDS, "stop": "a", "max_tokens": 6}
            assert (await post(app, "/v1/completions", **stopped))["choices"][0]["text"] == "b"
            ids = {"model": "own", "prompt": [97, 98], "max_tokens": 0, "echo": True}
            assert (await post(app, "/v1/completions", **ids))["choices"][0]["text"] == "ba"

    asyncio.run(main())


def test_conversations_use_the_template_that_was_asked_for(tmp_path: Path) -> None:
    """A-OUT-14: the adapter's own, or the base's, with whichever tokenizer applies."""

    async def prompts(folder: Path, **fields: Any) -> tuple[list[int], list[int]]:
        async with app_of(folder, **fields) as app:
            messages = [{"role": "user", "content": "b" + IDS}]
            asked = {"model": "own", "messages": messages, "max_tokens": 6}
            reply = await post(app, "/v1/chat/completions", **asked)
            text = reply["choices"][0]["message"]["content"]
            assert text == await streamed(app, "/v1/chat/completions", **asked)
            own = await post(app, "/tokenize", model="own", messages=messages)
            base = await post(app, "/tokenize", model="upper", messages=messages)
            (first, *_) = [s.prompt for name, s in _submits(app) if name == "own"]
            assert first == own["tokens"]
            return own["tokens"], base["tokens"]

    own, base = asyncio.run(prompts(tmp_path / "both"))
    assert bytes(own[:5]) == b"own:a" and base[0] == TURN  # b is the own tokenizer's id 97
    own, base = asyncio.run(prompts(tmp_path / "tokenizer", chat_template="base"))
    assert TURN in own and len(own) == len(base) and own != base
    only = {"tokenizer": "base", "chat_template": "adapter"}
    own, _ = asyncio.run(prompts(tmp_path / "template", **only))
    assert bytes(own[:5]) == b"own:b"


def test_a_request_keeps_the_tokenizer_that_it_was_admitted_with(tmp_path: Path) -> None:
    async def main() -> None:
        async with app_of(tmp_path, Behaviour(token_s=0.02)) as app:
            asked = {"model": "own", "prompt": "ids:97,98", "max_tokens": 40}
            slow = asyncio.create_task(streamed(app, "/v1/completions", **asked))
            while not app.spawner.engine.submits:
                await asyncio.sleep(0.01)
            newer = own_adapter(tmp_path / "newer", seed=6)
            config = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
            (newer / "tokenizer.json").write_text(json.dumps(config))
            body = {"lora_name": "own", "lora_path": str(newer), "load_inplace": True}
            reply = await app.http.post("/v1/load_lora_adapter", json=body)
            assert reply.status_code == 200, reply.text
            assert app.front.texts.num_kept == 0  # of the version that is gone
            asked["max_tokens"] = 4
            assert await streamed(app, "/v1/completions", **asked) == "abab"
            assert await slow == "ba" * 20
            assert app.front.texts.num_kept == 1
            gone = await app.http.post("/v1/unload_lora_adapter", json={"lora_name": "own"})
            assert gone.status_code == 200 and app.front.texts.num_kept == 0

    asyncio.run(main())


def test_another_tokenizer_with_the_same_weights_is_another_version(tmp_path: Path) -> None:
    registry = tiny_registry(tmp_path, ())
    request = AdapterRequest("own", str(own_adapter(tmp_path / "own")), tokenizer="adapter")
    first = registry.register(request).entry
    assert registry.register(request).outcome == "unchanged"
    (tmp_path / "own" / "chat_template.jinja").write_text("new")
    with pytest.raises(AdapterError, match="already registered"):
        registry.register(request)
    second = registry.register(request, replacing=True)
    assert second.outcome == "replaced" and second.entry.generation > first.generation
    assert (
        second.entry.text != first.text
        and second.entry.digest == registry.with_digest("own").digest
    )


def test_changed_and_missing_files_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with app_of(tmp_path) as app:
            app.registry.with_digest("own")
            (tmp_path / "own" / "chat_template.jinja").write_text("other")
            for _ in range(2):
                reply = await app.http.post("/tokenize", json={"model": "own", "prompt": "a"})
                assert reply.status_code == 503
                assert "changed since it was registered" in reply.json()["error"]["message"]
            (tmp_path / "own" / "tokenizer.json").unlink()
            reply = await app.http.post("/tokenize", json={"model": "own", "prompt": "a"})
            assert reply.status_code == 503 and "tokenizer.json" in reply.text

    asyncio.run(main())


def test_what_is_loaded_is_bounded_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "KEPT", 2)

    async def main() -> None:
        app = app_of(tmp_path)
        for number in range(4):
            folder = own_adapter(tmp_path / f"more{number}", seed=number)
            if number:
                (folder / "chat_template.jinja").write_text(f"{number}")
            request = AdapterRequest(f"m{number}", str(folder), tokenizer="adapter")
            app.registry.register(request)
        async with app:
            front = app.front
            of = {entry.name: front.texts.of(entry) for entry in app.registry.entries()}
            assert front.texts.num_kept == 2
            assert of["own"] is of["m0"] and of["m1"] is not of["m2"]
            assert of["upper"] is front.texts.base

    asyncio.run(main())


def test_apply_and_restart_keep_the_choice(tmp_path: Path) -> None:
    """A fleet file that comes to ask for it; a broken folder changes nothing; the state file."""

    async def main() -> None:
        app = app_of(tmp_path, tokenizer="base")
        source = str(tmp_path / "own")
        declared = {"own": AdapterRequest("own", source, tokenizer="base")}
        fleet = ServedFleet(path=str(tmp_path / "fleet.yaml"), requests=declared)
        file = StateFile(tmp_path / "fleet.state.json", tmp_path / "fleet.yaml")
        app.changes = RuntimeChanges(fleet, file)
        body: dict[str, Any] = {"settings": {}, "patterns": []}
        body["adapters"] = [{"name": "own", "source": source, "tokenizer": "adapter"}]
        async with app:
            kept = tmp_path / "kept.json"
            shutil.move(tmp_path / "own" / "tokenizer.json", kept)
            reply = await app.http.post("/v1/fleet", json=body)
            assert reply.status_code == 400 and "tokenizer.json: not there" in reply.text
            assert (await post(app, "/tokenize", model="own", prompt="a"))["tokens"][-1] == 97
            shutil.move(kept, tmp_path / "own" / "tokenizer.json")
            report = await post(app, "/v1/fleet", **body)
            fields = report["changes"][0]["fields"]
            assert fields == {"tokenizer": {"running": "base", "file": "adapter"}}
            assert (await post(app, "/tokenize", model="own", prompt="a"))["tokens"] == [98]
            for changed, ids in (
                ({"chat_template": "base"}, [98]),
                ({"tokenizer": "base", "chat_template": "base"}, [BOS, 97]),
                ({"chat_template": None}, [98]),
            ):
                await post(app, "/v1/fleet", **body | {"adapters": [body["adapters"][0] | changed]})
                assert (await post(app, "/tokenize", model="own", prompt="a"))["tokens"] == ids
            await post(app, "/v1/adapters/own/warm", pin=True, hot=True)
            rows = (await app.http.get("/v1/lora_adapters")).json()["data"]
            shown = {row["id"]: (row["tokenizer"], row["chat_template"]) for row in rows}
            assert shown == {"upper": ("base", "base"), "own": ("adapter", "adapter")}
            now = app.front.adapters.changes.fleet
        file.close()
        saved = StateFile(file.path, tmp_path / "fleet.yaml").read()
        (request,), _, notes = merge(now, saved)
        assert request.uses_own_tokenizer and request.pin == "hot" and not notes

    asyncio.run(main())


def _submits(app: InProcess) -> list[tuple[str, Any]]:
    submits = app.spawner.engine.submits
    return [(s.adapter.name if s.adapter else "base", s) for s in submits]


def test_apply_notices_another_template_file_and_other_content(tmp_path: Path) -> None:
    """`chat_template: FILE`: the path is a field like others, and what the file says counts too."""

    async def main() -> None:
        app, file = app_of(tmp_path, tokenizer="base"), tmp_path / "chat.jinja"
        file.write_text("one:{{ messages[-1].content }}")
        source = str(tmp_path / "own")
        declared = {"own": AdapterRequest("own", source, tokenizer="base")}
        app.changes = RuntimeChanges(ServedFleet(path="fleet.yaml", requests=declared), None)
        adapter = {"name": "own", "source": source, "tokenizer": "base", "chat_template": str(file)}
        body: dict[str, Any] = {"settings": {}, "patterns": [], "adapters": [adapter]}

        async def prompt() -> str:
            messages = [{"role": "user", "content": "b"}]
            tokens = (await post(app, "/tokenize", model="own", messages=messages))["tokens"]
            return bytes(token for token in tokens if token < 256).decode()

        async with app:
            (row,) = (await post(app, "/v1/fleet", **body))["changes"]
            assert row["fields"] == {"chat_template": {"running": None, "file": str(file)}}
            assert await prompt() == "one:b"
            assert not (await post(app, "/v1/fleet", **body))["changes"]
            generation = app.registry.resolve("own").generation

            file.write_text("two:{{ messages[-1].content }}")
            (row,) = (await post(app, "/v1/fleet", **body, dry_run=True))["changes"]
            assert row["fields"]["chat_template"]["file"] == f"{file} as it is"
            assert await prompt() == "one:b", "what was registered is served until it is applied"
            await post(app, "/v1/fleet", **body)
            assert await prompt() == "two:b"
            entry = app.registry.resolve("own")
            assert entry.generation > generation and entry.digest
            listed = (await app.http.get("/v1/lora_adapters")).json()["data"]
            shown = {row["id"]: row["chat_template"] for row in listed}
            assert shown == {"upper": "base", "own": str(file)}

            file.write_text("{% broken")
            reply = await app.http.post("/v1/fleet", json=body)
            assert reply.status_code == 400 and f"chat_template: {file}: " in reply.text
            assert await prompt() == "two:b", "nothing was changed"
            for bad in ("chat.jinja", "/etc/passwd"):
                other = body | {"adapters": [adapter | {"chat_template": bad}]}
                assert (await app.http.post("/v1/fleet", json=other)).status_code == 400

    asyncio.run(main())

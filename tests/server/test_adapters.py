"""The list of models, loading and unloading in vLLM's words, and what may be read."""

import asyncio
import os
import shutil

import pytest

from tests.fakes import Behaviour, write_adapter
from tests.server.conftest import InProcess
from tests.server.test_chat import chat, error_of, text_of


def load(http, name, path, **fields):
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return http.post("/v1/load_lora_adapter", json=body)


def unload(http, name, **fields):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def names(http):
    return [card["id"] for card in http.get("/v1/models").json()["data"]]


def rows(http):
    return {row["id"]: row for row in http.get("/v1/lora_adapters").json()["data"]}


def test_models_are_listed(http, server):
    """A-API-01: every servable name, loaded or not, with root, parent and length."""
    reply = http.get("/v1/models").json()
    cards = {card["id"]: card for card in reply["data"]}
    assert reply["object"] == "list"
    assert set(cards) == {"demo", "upper", "acme/legal"}
    assert (cards["demo"]["parent"], cards["demo"]["max_model_len"]) == (None, 512)
    assert cards["demo"]["root"] == str(server.config.base_path)
    for name in ("upper", "acme/legal"):
        card = cards[name]
        assert (card["object"], card["parent"], card["max_model_len"]) == ("model", "demo", 512)
        assert card["root"] == server.registry.get(name).path
        assert isinstance(card["created"], int)


@pytest.mark.parametrize(
    "path", ["acme/legal", "acme%2Flegal", "demo:acme/legal", "demo::acme%2Flegal"]
)
def test_names_with_slashes(http, path):
    """A-API-04: opaque in bodies and in URLs, percent-encoded or not."""
    assert http.get(f"/v1/models/{path}").json()["id"] == "acme/legal"
    reply = chat(http, model="acme/legal", max_tokens=14)
    assert text_of(reply) == "<acme/legal#2>"


def test_unknown_model_card(http):
    assert http.get("/v1/models/demo").json()["id"] == "demo"
    for name in ("nobody", "acme", "acme/legal/x", "", "%00", "..%2f"):
        assert error_of(http.get(f"/v1/models/{name}"), 404)


def test_load_use_unload(http, server):
    """A-API-06: vLLM's exact replies, as text and as its error object."""
    folder = write_adapter(server.folder / "new", seed=7)
    reply = load(http, "new", folder)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert reply.headers["content-type"].startswith("text/plain")
    assert "new" in names(http)
    generation = server.registry.get("new").generation
    assert text_of(chat(http, model="new", max_tokens=7)) == f"<new#{generation}>"
    again = error_of(load(http, "new", folder))
    assert again == {
        "message": "The lora adapter 'new' has already been loaded. If you want to load the"
        " adapter in place, set 'load_inplace' to True.",
        "type": "InvalidUserInput",
        "param": None,
        "code": 400,
    }
    reply = unload(http, "new")
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert reply.headers["x-mlora-freed-pages"] == "3"
    assert "new" not in names(http)
    assert error_of(chat(http, model="new"), 404)["code"] == "model_not_found"
    gone = error_of(unload(http, "new"), 404)
    assert (gone["type"], gone["code"]) == ("NotFoundError", 404)
    assert gone["message"] == "The lora adapter 'new' cannot be found."


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("load", {}, 400),
        ("load", {"lora_name": "x"}, 400),
        ("load", {"lora_path": "x"}, 400),
        ("load", {"lora_name": "", "lora_path": "x"}, 400),
        ("load", {"lora_name": 3, "lora_path": "x"}, 400),
        ("load", {"lora_name": "x", "lora_path": "x", "load_inplace": "yes"}, 400),
        ("load", {"lora_name": "x", "lora_path": "x", "is_3d_lora_weight": True}, 400),
        ("load", {"lora_name": "x", "lora_path": "x", "load_in_place": True}, 400),
        ("load", {"lora_name": "demo", "lora_path": "new"}, 400),
        ("load", {"lora_name": "../x", "lora_path": "new"}, 400),
        ("load", {"lora_name": "a/b/c", "lora_path": "new"}, 400),
        ("load", {"lora_name": "UPPER", "lora_path": "new"}, 400),
        ("load", {"lora_name": "x" * 600, "lora_path": "new"}, 400),
        ("unload", {}, 400),
        ("unload", {"lora_name": ""}, 400),
        ("unload", {"lora_name": "nobody"}, 404),
        ("unload", {"lora_name": "demo"}, 404),
        ("unload", {"lora_name": "\u001b[31m"}, 404),
    ],
)
def test_bad_calls(http, server, path, body, status):
    """A-API-06: the table of refusals."""
    write_adapter(server.folder / "new", seed=7)
    error = error_of(http.post(f"/v1/{path}_lora_adapter", json=body), status)
    assert "\u001b" not in error["message"]
    assert set(names(http)) == {"demo", "upper", "acme/legal"}


def test_the_listing_tells_its_limits(http, server):
    """API 2.4: what may run in a step, of which rank, and how much host memory holds."""
    listing = http.get("/v1/lora_adapters").json()
    limits = [listing[f"max_{name}"] for name in ("adapters", "rank", "bytes")]
    assert limits == [server.config.max_loras, 512, server.config.host_adapter_bytes]
    assert {row["revision"] for row in listing["data"]} == {None}  # of local folders


def test_what_is_not_there_is_404(http, server):
    """API 2.1: no folder, or none with an adapter in it, is vLLM's NotFoundError; what is there
    and cannot be served is 400."""
    (server.folder / "hollow").mkdir(exist_ok=True)
    write_adapter(server.folder / "weightless", seed=1).joinpath(
        "adapter_model.safetensors"
    ).unlink()
    for path in ("no-such", "hollow", "weightless", "adapters"):
        error = error_of(load(http, "x", path), 404)
        assert (error["type"], error["code"]) == ("NotFoundError", 404)
    write_adapter(server.folder / "wrong", seed=1, peft_type="IA3")
    error = error_of(load(http, "x", "wrong"))
    assert (error["type"], error["code"]) == ("InvalidUserInput", 400)


def test_paths_that_may_not_be_read(http, server, tmp_path):
    """A-SEC-01, A-RUN-02, A-API-05: only real folders below a root; nothing else is touched."""
    outside = write_adapter(tmp_path / "outside", seed=1)
    os.symlink(outside, server.folder / "link")
    os.mkfifo(server.folder / "fifo")
    paths = [
        "/nope", "nope", "acme/legal", "..", "../..", "../../etc", "/etc", "/etc/passwd", "",
        str(outside), "link", "link/", "./link", "fifo", "/dev/zero", "http://127.0.0.1:1/a",
        "https://x/y", "file:///etc", "file:/etc", "hf://a/b", "s3://a/b", "a\u0000b", "~root",
        "~", "//etc", "x" * 5000, "adapters/../../../etc", f"{server.folder}/../outside",
        "adapters/upper/adapter_config.json", "$HOME", "%2e%2e/etc", "..\\..\\etc", "\u202e",
    ]  # fmt: skip
    for path in paths:
        reply = load(http, "x", path)
        error = error_of(reply, reply.status_code)
        assert reply.status_code in (400, 404)
        assert "root:" not in error["message"]
        assert len(error["message"]) < 6000
    assert "x" not in names(http)
    inside = os.path.relpath(server.registry.get("upper").path, server.folder)
    assert load(http, "x", inside).status_code == 200
    assert unload(http, "x").status_code == 200


def test_broken_adapters_are_not_listed(serve_fleet):
    """A-RUN-02: refused at load, by headers and by the engine that reads every byte."""
    server = serve_fleet(Behaviour(broken={"nan": "adapter_unavailable", "late": "internal_error"}))
    import httpx

    with httpx.Client(base_url=server.url, timeout=20) as http:
        folder = write_adapter(server.folder / "dora", use_dora=True)
        assert "use_dora" in error_of(load(http, "dora", folder))["message"]
        folder = write_adapter(server.folder / "nan", seed=3)
        assert "not finite" in error_of(load(http, "nan", folder))["message"]
        assert error_of(load(http, "late", folder), 500)
        assert names(http) == ["demo", "upper", "acme/legal"]
        assert load(http, "good", folder).status_code == 200


def test_replacing_in_place(http, server):
    """A new generation for new requests; the old digest is freed; a wrong generation is refused."""
    folder = write_adapter(server.folder / "swap", seed=20)
    assert load(http, "swap", folder).status_code == 200
    first = server.registry.get("swap")
    chat(http, model="swap", max_tokens=1)
    other = write_adapter(server.folder / "swap2", seed=21)
    wrong = load(http, "swap", other, load_inplace=True, expected_generation=first.generation + 9)
    assert "expected_generation" in error_of(wrong)["message"]
    right = load(http, "swap", other, load_inplace=True, expected_generation=first.generation)
    assert right.status_code == 200
    second = server.registry.get("swap")
    assert second.generation > first.generation
    assert text_of(chat(http, model="swap", max_tokens=50)).startswith(
        f"<swap#{second.generation}>"
    )
    evicted = [call.digest for call in server.spawner.engine.calls if hasattr(call, "purge_cache")]
    assert first.digest in evicted
    assert second.digest not in evicted
    wrong = unload(http, "swap", expected_generation=first.generation)
    assert "expected_generation" in error_of(wrong)["message"]
    assert unload(http, "swap", expected_generation=second.generation).status_code == 200


def test_shared_content_is_freed_with_its_last_name(http, server):
    folder = write_adapter(server.folder / "twin", seed=30)
    copy = shutil.copytree(folder, server.folder / "twin2", dirs_exist_ok=True)
    assert load(http, "one", folder).status_code == 200
    assert load(http, "two", copy).status_code == 200
    digest = server.registry.get("one").digest
    assert "x-mlora-freed-pages" not in unload(http, "one").headers
    assert text_of(chat(http, model="two", max_tokens=4)) == "<two"
    assert unload(http, "two").headers["x-mlora-freed-pages"] == "3"
    assert digest not in [status.digest for status in server.spawner.engine._adapters.values()]


async def _parallel_loads(folder, rounds) -> None:
    async with InProcess(folder) as app:
        one = write_adapter(folder / "one", seed=40)
        two = write_adapter(folder / "two", seed=41)
        for turn in range(rounds):
            body = {"lora_name": "race"}
            posts = [
                app.http.post(
                    "/v1/load_lora_adapter",
                    json=body | {"lora_path": str(two if index % 2 else one)},
                )
                for index in range(20)
            ]
            replies = await asyncio.gather(*posts)
            assert sorted(reply.status_code for reply in replies) == [200] + [400] * 19, turn
            cards = (await app.http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in cards].count("race") == 1
            held = app.spawner.engine._adapters
            assert list(held) == [app.registry.get("race").digest]
            reply = await app.http.post("/v1/unload_lora_adapter", json=body)
            assert reply.status_code == 200
            assert not app.spawner.engine._adapters


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_parallel_loads_of_one_name(tmp_path, rounds):
    """A-RUN-10: of 20 at once exactly one wins; one entry, one copy in memory."""
    asyncio.run(_parallel_loads(tmp_path, rounds))


def test_adapter_list(http, server):
    chat(http, model="upper", max_tokens=1)
    found = rows(http)
    row = found["upper"]
    assert (row["tier"], row["pages"], row["rank"], row["generation"]) == ("hot", 3, 4, 1)
    assert row["digest"] == f"sha256:{server.registry.get('upper').digest}"
    assert row["requests"] >= 1
    assert (row["object"], row["source"]) == ("lora_adapter", row["source"])
    assert set(row) >= {
        "pinned", "in_flight", "last_used_s", "hits", "loads", "bytes", "modules", "pin", "detail",
    }  # fmt: skip
    listed = http.get("/v1/lora_adapters").json()
    (held,) = [g for g in listed["generations"] if g["digest"] == row["digest"]]
    assert (held["aliases"], held["retired"], held["generation"]) == (["upper"], False, 1)
    assert listed["resident_generations"] == len(listed["generations"])
    assert listed["retired_generations"] == 0
    folder = write_adapter(server.folder / "pinned", seed=50)
    assert rows(http).get("pinned") is None
    assert load(http, "pinned", folder, pinned=True).status_code == 200
    row = rows(http)["pinned"]
    assert (row["pin"], row["pinned"], row["tier"]) == ("hot", True, "hot")
    assert unload(http, "pinned").status_code == 200


def test_a_folder_that_changed_is_a_new_version(serve_fleet):
    """Promise 1: what is served is what was digested, never a mixture."""
    import httpx

    server = serve_fleet()
    write_adapter(server.folder / "adapters" / "upper", seed=99)
    with httpx.Client(base_url=server.url, timeout=20) as http:
        reply = chat(http, model="upper", max_tokens=9)
        assert text_of(reply) == "<upper#3>"
        shutil.rmtree(server.folder / "adapters" / "acme-legal")
        error = error_of(chat(http, model="acme/legal"), 503)
        assert error["code"] == "adapter_unavailable"
        assert chat(http, model="demo", max_tokens=1).status_code == 200

"""Name patterns on a server: resolved when asked for, 404 where there is nothing, bounded."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.entry import ServedBase
from multilora_cli.adapters.registry import Registry
from multilora_cli.adapters.store import DiskStore
from multilora_cli.errors import RequestError
from multilora_cli.fleet.pattern import NamePattern
from multilora_cli.server.changes import RuntimeChanges, ServedFleet
from multilora_cli.server.names import NameLimits, Names
from multilora_cli.server.threads import Threads
from tests.adapters import fault_origin as faults
from tests.adapters.fault_origin import FaultOrigin
from tests.fakes import tiny_geometry, write_adapter
from tests.server.conftest import InProcess
from tests.server.test_metrics import samples, value

BUCKET = NamePattern("{tenant}/{name}", "s3://adapters/{tenant}/{name}/")


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultOrigin]:
    """A public bucket with acme/legal and acme/medical."""
    with faults.fault_origin() as origin:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", origin.url)
        for seed, name in enumerate(("legal", "medical")):
            folder = write_adapter(tmp_path / "origin" / name, seed=seed)
            origin.put_objects(f"adapters/acme/{name}/", folder)
        yield origin


def in_process(folder: Path, *patterns: NamePattern, **changes: Any) -> InProcess:
    """A server with patterns and a store, without upkeep."""
    registry = Registry(
        ServedBase(tiny_geometry(folder / "base"), "demo"),
        relative_to=folder,
        roots=[folder],
        store=DiskStore(folder / "store", 2**30),
    )
    fleet = ServedFleet(patterns=patterns)
    return InProcess(folder, registry=registry, changes=RuntimeChanges(fleet), **changes)


async def ask(app: InProcess, model: str) -> tuple[int, str]:
    """Status and answer or error code of a short completion."""
    body = {"model": model, "prompt": "x", "max_tokens": 16}
    reply = await app.http.post("/v1/completions", json=body)
    value = reply.json()
    if reply.status_code == 200:
        return 200, value["choices"][0]["text"]
    return reply.status_code, value["error"]["code"]


async def rows(app: InProcess) -> dict[str, dict[str, Any]]:
    reply = (await app.http.get("/v1/lora_adapters")).json()
    return {row["id"]: row for row in reply["data"]}


def test_resolved_when_asked_for(tmp_path: Path, origin: FaultOrigin) -> None:
    """Found, fetched once, listed, a model like any other; tokenize and cards know it too."""

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            assert await rows(app) == {}
            card = await app.http.get("/v1/models/acme%2Flegal")
            assert card.json()["id"] == "acme/legal"
            assert await ask(app, "acme/legal") == (200, "<acme/legal#1><a")
            asked = len(origin.seen)
            assert await ask(app, "demo:acme/legal") == (200, "<acme/legal#1><a")
            body = {"model": "acme/legal", "prompt": "x"}
            assert (await app.http.post("/tokenize", json=body)).status_code == 200
            assert len(origin.seen) == asked
            row = (await rows(app))["acme/legal"]
            assert (row["via"], row["source"]) == ("pattern", "s3://adapters/acme/legal/")
            assert row["rank"] == 4 and row["digest"] and row["tier"] == "hot"
            assert row[
                "revision"
            ]  # what was fetched, so that it can be told from what is there now
            found = samples((await app.http.get("/metrics")).text)
            assert value(found, "mlora_adapter_load_seconds_count", hop="source_stored") == 1
            listed = (await app.http.get("/v1/lora_adapters")).json()
            assert listed["patterns"] == [{"pattern": BUCKET.pattern, "source": BUCKET.source}]
            body = {"lora_name": "acme/legal"}
            assert (await app.http.post("/v1/unload_lora_adapter", json=body)).status_code == 200
            origin.put_objects("adapters/acme/legal/", write_adapter(tmp_path / "v2", seed=9))
            assert (await ask(app, "acme/legal"))[0] == 200  # found again, in its new version
            again = (await rows(app))["acme/legal"]
            assert again["digest"] != row["digest"] and again["revision"] != row["revision"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "name",
    ["acme/nobody", "nobody", "acme/legal/x", "acme/..", "../legal", "acme//legal", "acme/",
     "/legal", "acme/%2e%2e", "acme%2flegal", "acme%2f..", "..%2f..", "acme/legal\u0000", "ACME/*"],
)  # fmt: skip
def test_unknown_names(tmp_path: Path, origin: FaultOrigin, name: str) -> None:
    """404, never the base; nothing outside the pattern reaches the origin; asked once, then
    remembered."""

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            assert await ask(app, name) == (404, "model_not_found")
            asked = len(origin.seen)
            assert bool(asked) == (name == "acme/nobody")
            for _ in range(3):
                assert await ask(app, name) == (404, "model_not_found")
            assert (await app.http.get("/v1/models/acme%2Fnobody")).status_code == 404
            for route in ("warm", "evict"):
                reply = await app.http.post(f"/v1/adapters/acme/nobody/{route}", json={})
                assert reply.status_code == 404
                long = await app.http.post(f"/v1/adapters/acme/{'x' * 129}/{route}", json={})
                assert long.status_code == 404
            assert len([seen for seen in origin.seen if "nobody" in seen.path]) <= max(asked, 4)
            assert await rows(app) == {}

    asyncio.run(run())


def test_a_name_that_differs_by_case(tmp_path: Path, origin: FaultOrigin) -> None:
    """One of two twins, whoever came first; also while it is being fetched."""

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            origin.put_objects("adapters/ACME/legal/", tmp_path / "origin" / "legal")
            first, second = await asyncio.gather(ask(app, "acme/legal"), ask(app, "ACME/legal"))
            assert (first[0], second) == (200, (404, "model_not_found"))
            assert await ask(app, "ACME/legal") == (404, "model_not_found")

    asyncio.run(run())


def test_one_search_however_many_ask(tmp_path: Path, origin: FaultOrigin) -> None:
    """F37: a burst of 100 costs what one request costs, for names that are there or not."""

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            answers = await asyncio.gather(*(ask(app, "acme/legal") for _ in range(100)))
            assert {status for status, _ in answers} == {200}
            assert sum(seen.method == "GET" for seen in origin.seen) == 2  # config and weights
            missing = await asyncio.gather(*(ask(app, "acme/nobody") for _ in range(100)))
            assert set(missing) == {(404, "model_not_found")}
            asked = [seen.path for seen in origin.seen if "nobody" in seen.path]
            assert len(asked) == len(set(asked))

    asyncio.run(run())


def test_idle_names_make_room(
    tmp_path: Path, origin: FaultOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: the name that nobody used for longest goes, with its pages and its claim on the
    disk; a pinned one, one in use and one just asked for stay."""
    monkeypatch.setattr("multilora_cli.server.adapters._FRESH_S", 0.0)
    for index in range(3):
        folder = write_adapter(tmp_path / "more" / str(index), seed=20 + index)
        origin.put_objects(f"adapters/acme/n{index}/", folder)

    async def run() -> None:
        async with in_process(tmp_path, BUCKET, max_resolved=2) as app:
            assert (await ask(app, "acme/legal"))[0] == 200
            body = {"hot": True, "pin": True}
            warm = await app.http.post("/v1/adapters/acme/legal/warm", json=body)
            assert warm.json()["pin"] == "hot"
            digest = warm.json()["digest"].removeprefix("sha256:")
            for name in ("acme/n0", "acme/n1", "acme/n2"):
                assert (await ask(app, name))[0] == 200
                assert set(await rows(app)) == {"acme/legal", name}
            for _ in range(100):
                used = app.registry._store.opened._use.all()
                if used == {digest, (await rows(app))["acme/n2"]["digest"][7:]}:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError(used)
            monkeypatch.setattr("multilora_cli.server.adapters._FRESH_S", 60.0)
            assert await ask(app, "acme/medical") == (503, "server_is_overloaded")
            monkeypatch.setattr("multilora_cli.server.adapters._FRESH_S", 0.0)
            await app.http.post("/v1/adapters/acme/n2/warm", json=body)
            assert await ask(app, "acme/medical") == (503, "server_is_overloaded")

    asyncio.run(run())


def test_broken_and_denied_ones_are_unavailable(tmp_path: Path, origin: FaultOrigin) -> None:
    """503 with the reason, no base, no listing; the origin is not asked again at once."""
    write_adapter(tmp_path / "dora", use_dora=True)
    origin.put_objects("adapters/acme/dora/", tmp_path / "dora")
    origin.always["acme/denied"] = faults.status(403)

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            for name in ("acme/dora", "acme/denied"):
                assert await ask(app, name) == (503, "adapter_unavailable")
                asked = len(origin.seen)
                assert await ask(app, name) == (503, "adapter_unavailable")
                assert len(origin.seen) == asked
            assert await rows(app) == {}
            assert app.registry._store.opened._use.all() == set()
            assert (await ask(app, "acme/legal"))[0] == 200

    asyncio.run(run())


def test_the_hub_without_a_token(
    tmp_path: Path, origin: FaultOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers 401 for a repository that is not there, and says so in a header: 404 here."""
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    origin.put_repository("acme-ai/legal", tmp_path / "origin" / "legal")
    origin.always["nobody"] = faults.status(401, x_error_code="RepoNotFound")
    origin.always["secret"] = faults.status(401, x_error_code="GatedRepo")
    pattern = NamePattern("{org}/{name}", "hf://{org}-ai/{name}")

    async def run() -> None:
        async with in_process(tmp_path, pattern) as app:
            assert (await ask(app, "acme/legal"))[0] == 200
            assert await ask(app, "acme/nobody") == (404, "model_not_found")
            assert await ask(app, "acme/secret") == (503, "adapter_unavailable")
            assert await ask(app, "acme/a..b") == (404, "model_not_found")

    asyncio.run(run())


def test_folders_and_links(tmp_path: Path) -> None:
    """A-SEC-01: a local pattern, and a link in it that leads elsewhere."""
    write_adapter(tmp_path / "tenants" / "acme" / "legal", seed=1)
    outside = write_adapter(tmp_path / "outside", seed=2)
    (tmp_path / "tenants" / "acme" / "link").symlink_to(outside)
    (tmp_path / "tenants" / "out").symlink_to(tmp_path)
    pattern = NamePattern("{tenant}/{name}", f"{tmp_path}/tenants/{{tenant}}/{{name}}")

    async def run() -> None:
        async with in_process(tmp_path / "server", pattern) as app:
            assert (await ask(app, "acme/legal"))[0] == 200
            for name in ("acme/link", "out/outside", "acme/nobody"):
                assert await ask(app, name) == (404, "model_not_found")

    asyncio.run(run())


def names_of(tmp_path: Path, limits: NameLimits) -> Names:
    """Names behind a bucket, without a server."""
    store = DiskStore(tmp_path / "store", 2**30)
    registry = Registry(ServedBase(tiny_geometry(tmp_path / "base"), "demo"), store=store)
    return Names(registry, Threads(2), (BUCKET,), limits)


def test_a_miss_is_remembered_for_a_while(tmp_path: Path, origin: FaultOrigin) -> None:
    """Published after it was asked for: found once the memory of the miss has run out, and only so
    many misses are remembered."""

    async def run() -> None:
        names = names_of(tmp_path, NameLimits(miss_s=0.2, misses=2))
        for name in ("acme/new", "acme/b", "acme/c"):
            with pytest.raises(RequestError):
                await names.find(name)
        assert list(names._misses) == ["acme/b", "acme/c"]
        origin.put_objects("adapters/acme/b/", tmp_path / "origin" / "legal")
        with pytest.raises(RequestError):
            await names.find("acme/b")
        await asyncio.sleep(0.25)
        assert (await names.find("acme/b")).name == "acme/b"

    asyncio.run(run())


def test_searches_are_bounded_and_waits_end(tmp_path: Path, origin: FaultOrigin) -> None:
    """A slow origin: a request waits so long and no longer, the search goes on for the next one;
    too many searches at once are refused."""

    async def run() -> None:
        names = names_of(tmp_path, NameLimits(searches=1, wait_s=0.2))
        origin.faults["adapter_config"] = [slow]
        with pytest.raises(RequestError) as caught:
            await names.find("acme/legal")
        assert (caught.value.status, caught.value.code) == (503, "adapter_loading")
        with pytest.raises(RequestError) as caught:
            await names.find("acme/medical")
        assert caught.value.code == "server_is_overloaded"
        for _ in range(100):
            if not names._searches:
                break
            await asyncio.sleep(0.05)
        assert (await names.find("acme/legal")).state == "ready"

    def slow(handler: Any, body: bytes) -> None:
        time.sleep(0.6)
        handler.answer(200, body)

    asyncio.run(run())


def test_unloading_gives_up_the_copy_on_disk(tmp_path: Path, origin: FaultOrigin) -> None:
    """A-RUN-05: pages, host bytes and the claim on the disk store go with the last name of a
    content, and the reply says how much; a refused version claims nothing."""
    origin.put_objects("adapters/acme/twin/", tmp_path / "origin" / "legal")
    write_adapter(tmp_path / "dora", use_dora=True)

    async def run() -> None:
        async with in_process(tmp_path, BUCKET) as app:
            for name in ("acme/legal", "acme/twin"):
                assert (await ask(app, name))[0] == 200
            store = app.registry._store.opened
            digests = {row["digest"][7:] for row in (await rows(app)).values()}
            assert store._use.all() == digests and len(digests) == 1
            first, second = [
                await app.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                for name in ("acme/legal", "acme/twin")
            ]
            assert "x-mlora-freed-pages" not in first.headers
            assert second.headers["x-mlora-freed-pages"] == "3"
            assert second.headers["x-mlora-freed-host-bytes"] == "12288"
            assert store._use.all() == set()
            store.make_room(2**30)  # everything may go now
            assert list((store.root / "entries").iterdir()) == []

    asyncio.run(run())


def test_threads_are_bounded_and_raise() -> None:
    """So many at a time; errors reach who asked; one who left harms nobody."""
    running, most = [0], [0]

    def work(value: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        if value == 3:
            raise ValueError("three")
        return value

    async def run() -> None:
        threads = Threads(2)
        found = await asyncio.gather(
            *(threads.run(work, value) for value in range(6)), return_exceptions=True
        )
        assert [str(value) for value in found] == ["0", "1", "2", "three", "4", "5"]
        assert most[0] == 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await threads.run(work, 1)
        assert await threads.run(work, 7) == 7

    asyncio.run(run())

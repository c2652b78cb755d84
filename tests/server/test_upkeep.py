"""Time to live, sources that come back, versions that are checked before they take a name."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.errors import AdapterUnavailable
from multilora_cli.server.changes import RuntimeChanges, ServedFleet
from multilora_cli.server.upkeep import Upkeep
from tests.fakes import Behaviour, write_adapter
from tests.server.conftest import InProcess
from tests.server.test_adapters import rows


async def warm(app: InProcess, name: str, **body: Any) -> dict[str, Any]:
    reply = await app.http.post(f"/v1/adapters/{name}/warm", json=body)
    assert reply.status_code == 200, reply.text
    row: dict[str, Any] = reply.json()
    return row


async def row_of(app: InProcess, name: str) -> dict[str, Any]:
    found = (await app.http.get("/v1/lora_adapters")).json()["data"]
    return next(row for row in found if row["id"] == name)


def test_unused_pins_end(tmp_path: Path) -> None:
    """--pin --ttl: pinned while it is used, back to cold when unused that long, pages freed; what
    has no ttl stays."""

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            upkeep = Upkeep(app.front.adapters)
            row = await warm(app, "upper", hot=True, pin=True, ttl="300ms")
            assert (row["pin"], row["ttl_s"]) == ("hot", 0.3)
            assert 0.2 < row["expires_in_s"] <= 0.3
            await warm(app, "acme/legal", hot=True, pin=True)
            for _ in range(3):  # used: it stays
                await asyncio.sleep(0.15)
                body = {"model": "upper", "prompt": "x", "max_tokens": 1}
                assert (await app.http.post("/v1/completions", json=body)).status_code == 200
                await upkeep.tick()
                assert (await row_of(app, "upper"))["tier"] == "hot"
            await asyncio.sleep(0.35)
            await upkeep.tick()
            row = await row_of(app, "upper")
            assert (row["tier"], row["pin"], row["ttl_s"], row["expires_in_s"]) == (
                "stored", None, None, None,
            )  # fmt: skip
            assert (await row_of(app, "acme/legal"))["pin"] == "hot"
            evicted = [c for c in app.spawner.engine.calls if type(c).__name__ == "EvictAdapter"]
            assert [(call.to, call.unpin) for call in evicted] == [("cold", True)]

    asyncio.run(run())


def test_a_running_request_is_use(tmp_path: Path) -> None:
    """An adapter that a long stream holds does not expire under it."""

    async def run() -> None:
        async with InProcess(tmp_path, Behaviour(token_s=0.05)) as app:
            upkeep = Upkeep(app.front.adapters)
            await warm(app, "upper", ttl=0.1)
            body = {"model": "upper", "prompt": "x", "max_tokens": 10}
            asked = asyncio.create_task(app.http.post("/v1/completions", json=body))
            await asyncio.sleep(0.25)
            await app.client.query()
            await upkeep.tick()
            assert (await row_of(app, "upper"))["tier"] == "hot"
            assert (await asked).status_code == 200
            await asyncio.sleep(0.15)
            await app.client.query()
            await upkeep.tick()
            assert (await row_of(app, "upper"))["tier"] == "stored"

    asyncio.run(run())


def test_an_evict_is_no_use(tmp_path: Path) -> None:
    """What was never used holds nothing: it stays cold and unread, its time does not begin."""

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            before = await row_of(app, "upper")
            reply = await app.http.post("/v1/adapters/upper/evict", json={"cold": True})
            assert reply.status_code == 200 and reply.json()["freed_pages"] == 0
            after = await row_of(app, "upper")
            assert after == before
            assert (after["tier"], after["last_used_s"], after["digest"]) == ("cold", None, None)

    asyncio.run(run())


def test_two_names_of_one_content(tmp_path: Path) -> None:
    """One name's time is over: another that stays, or is pinned, keeps the pages."""

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            folder = str(write_adapter(tmp_path / "twin", seed=0))  # as `upper`
            body = {"lora_name": "twin", "lora_path": folder}
            assert (await app.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
            upkeep = Upkeep(app.front.adapters)
            await warm(app, "twin", hot=True, pin=True)
            await warm(app, "upper", hot=True, pin=True, ttl=0.05)
            await asyncio.sleep(0.1)
            await upkeep.tick()
            assert (await row_of(app, "upper"))["pin"] is None
            row = await row_of(app, "twin")
            assert (row["tier"], row["pin"], row["pinned"]) == ("hot", "hot", True)
            refused = await app.http.post("/v1/adapters/upper/evict", json={"unpin": True})
            assert refused.status_code == 400 and "twin, which is pinned" in refused.text
            await warm(app, "upper", hot=True, pin=True)  # both are pinned: each pin can end
            kept = (await app.http.post("/v1/adapters/upper/evict", json={"unpin": True})).json()
            assert (kept["kept_by"], kept["tier"], kept["pin"]) == ("twin", "hot", None)
            freed = await app.http.post(
                "/v1/adapters/twin/evict", json={"unpin": True, "cold": True}
            )
            assert freed.json()["tier"] == "stored" and freed.json()["freed_pages"] > 0

    asyncio.run(run())


def test_the_end_of_the_server_is_no_fault_of_what_is_still_to_be_pinned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fleet of hundreds that is stopped while it comes up: not a line for each of them."""

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            for entry in app.registry.entries():
                app.registry.set_kept(entry.name, "hot", None)
            app.front.client.begin_drain()
            await app.front.client.stop()
            await app.front.adapters.load_pinned()

    asyncio.run(run())
    assert "is not pinned" not in caplog.text


def test_what_the_file_says_about_time(tmp_path: Path) -> None:
    """ttl in the fleet file: every use counts, also the first; the pin of the file is not undone
    for the next start."""

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            adapters = app.front.adapters
            kept = app.registry.set_kept("upper", "hot", 0.1)
            assert kept is not None
            declared = {"upper": kept.request}
            adapters.changes = RuntimeChanges(ServedFleet(requests=declared))
            await adapters.load_pinned()
            upkeep = Upkeep(adapters)
            await upkeep.tick()  # nobody asked for it: its time begins
            assert (await row_of(app, "upper"))["pin"] == "hot"
            await asyncio.sleep(0.15)
            await upkeep.tick()
            row = await row_of(app, "upper")
            assert (row["tier"], row["pin"], row["ttl_s"]) == ("stored", None, 0.1)
            assert adapters.changes.names == frozenset()

    asyncio.run(run())


@pytest.mark.parametrize("ttl", [0, -1, "1", "soon", 1e9, "1h1m", "", "9" * 40])
def test_bad_times(tmp_path: Path, ttl: object) -> None:
    async def run() -> None:
        async with InProcess(tmp_path) as app:
            reply = await app.http.post("/v1/adapters/upper/warm", json={"ttl": ttl})
            assert reply.status_code == 400 and "ttl" in reply.json()["error"]["param"]

    asyncio.run(run())


def test_a_source_that_was_down_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F69: with growing pauses, visible in the list, pinned where it is pinned once it is there; a
    refusal is tried again when an operator asks."""
    monkeypatch.setattr("multilora_cli.adapters.registry.RETRY_S", (0.5, 2.0))
    folder = tmp_path / "late"

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            request = AdapterRequest("late", str(folder), pin="hot")
            app.registry.enter_failed(request, AdapterUnavailable("the bucket does not answer"))
            row = await row_of(app, "late")
            assert (row["tier"], row["detail"]) == ("failed", "the bucket does not answer")
            assert row["attempts"] == 1 and 0 < row["retry_in_s"] <= 0.5
            reply = await app.http.post("/v1/completions", json={"model": "late", "prompt": "x"})
            assert reply.status_code == 503
            upkeep = Upkeep(app.front.adapters, period_s=0.02)
            write_adapter(folder, seed=70)
            app.front.adapters.background(upkeep.run())
            for _ in range(100):
                row = await row_of(app, "late")
                if row["pinned"]:
                    break
                await asyncio.sleep(0.02)
            assert (row["tier"], row["pin"], row["attempts"]) == ("hot", "hot", 0)

    asyncio.run(run())


def test_pauses_grow_and_refusals_wait_for_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-RUN-09: never for ever at full speed."""
    monkeypatch.setattr("multilora_cli.adapters.registry.RETRY_S", (0.05, 0.2))
    attempts: list[float] = []

    async def run() -> None:
        async with InProcess(tmp_path) as app:
            registry = app.registry

            def down(request: AdapterRequest, **_: object) -> None:
                attempts.append(time.monotonic())
                raise AdapterUnavailable("still down")

            monkeypatch.setattr(registry, "register", down)
            request = AdapterRequest("late", str(tmp_path / "late"))
            registry.enter_failed(request, AdapterUnavailable("down"))
            app.front.adapters.background(Upkeep(app.front.adapters, period_s=0.01).run())
            await asyncio.sleep(0.9)
            assert 4 <= len(attempts) <= 7
            pauses = [b - a for a, b in itertools.pairwise(attempts)]
            assert pauses[0] >= 0.1 and pauses[-1] >= 0.2
            assert (await row_of(app, "late"))["detail"] == "still down"
            monkeypatch.undo()
            for _ in range(100):  # a missing folder is a refusal: no more attempts
                row = await row_of(app, "late")
                if row["retry_in_s"] is None:
                    break
                await asyncio.sleep(0.02)
            assert "no such folder" in row["detail"]
            write_adapter(tmp_path / "late", seed=71)
            await asyncio.sleep(0.1)
            assert (await row_of(app, "late"))["tier"] == "failed"
            assert (await warm(app, "late"))["tier"] == "warm"

    asyncio.run(run())


def test_upkeep_runs_in_a_server(serve_fleet: Any) -> None:
    """From start to end of a real server, once a second."""
    server = serve_fleet()
    with httpx.Client(base_url=server.url, timeout=20) as http:
        http.post("/v1/adapters/upper/warm", json={"pin": True, "ttl": 0.2})
        assert rows(http)["upper"]["pin"] == "warm"
        deadline = time.monotonic() + 15
        while rows(http)["upper"]["pin"] is not None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert rows(http)["upper"]["tier"] == "stored"

"""Keys that may ask for some models only, and for so much: what each sees, and what it is told."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_cli.cli.startup import prepare
from multilora_cli.errors import FleetError, RequestError
from multilora_cli.fleet.load import load_fleet
from multilora_cli.fleet.schema import ApiKey, KeyLimits
from multilora_cli.server.auth import Grant, grant_of, key_id
from multilora_cli.server.quota import WINDOW_S, Quotas, Window
from tests.fakes import Behaviour
from tests.fleet.test_shares import write
from tests.server.conftest import InProcess
from tests.server.test_metrics import samples, value

ACME, SECOND, OTHER, ALL, ADMIN = "acme-key", "acme-key-2", "other-key", "all-key", "admin-key"
NAMES = ("upper", "acme/legal", "acme/medical", "other/legal")


def keys(**limits: Any) -> dict[str, Any]:
    """Two keys of acme, one of another tenant, one for everything."""
    entries = {
        ACME: {"tenant": "acme", "models": ("acme/*",), **limits},
        SECOND: {"tenant": "acme", "models": ("acme/*", "demo"), **limits},
        OTHER: {"tenant": "other", "models": ("other/*", "upper")},
        ALL: {},
    }
    granted = {k: grant_of(ApiKey(key="env:X", **fields), k) for k, fields in entries.items()}
    return {
        "api_keys": tuple(entries),
        "admin_key": ADMIN,
        "grants": {key_id(key): grant for key, grant in granted.items()},
        "names": NAMES,
    }


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def told(reply: httpx.Response) -> tuple[int, bytes, list[str]]:
    """Everything a client could tell two replies apart by."""
    return reply.status_code, reply.content, sorted(reply.headers)


async def complete(app: InProcess, key: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "x", "max_tokens": 2, **fields}
    return await app.http.post("/v1/completions", json=body, headers=by(key))


def test_what_each_key_sees(tmp_path: Path) -> None:
    """RELIABILITY 3.2: models and the listing have what the key may ask for, and nothing else."""

    async def run() -> None:
        async with InProcess(tmp_path, **keys()) as app:
            seen = {
                ACME: {"acme/legal", "acme/medical"},
                SECOND: {"acme/legal", "acme/medical", "demo"},
                OTHER: {"other/legal", "upper"},
                ALL: {"demo", *NAMES},
                ADMIN: {"demo", *NAMES},
            }
            for name in NAMES:
                assert (await complete(app, ALL, name)).status_code == 200
            for key, expected in seen.items():
                cards = (await app.http.get("/v1/models", headers=by(key))).json()["data"]
                assert {card["id"] for card in cards} == expected
                listing = (await app.http.get("/v1/lora_adapters", headers=by(key))).json()
                adapters = expected - {"demo"}
                assert {row["id"] for row in listing["data"]} == adapters
                aliases = [name for row in listing["generations"] for name in row["aliases"]]
                assert sorted(aliases) == sorted(adapters)
                assert listing["resident_generations"] == len(adapters)
                sees_all = key in (ALL, ADMIN)
                assert ("traffic" in listing, "patterns" in listing) == (sees_all, sees_all)
                scrape = await app.http.get("/metrics", headers=by(key))
                assert scrape.status_code == (200 if sees_all else 403)

    asyncio.run(run())


DOORS = [
    lambda name: {"model": name},
    lambda name: {"model": f"demo:{name}"},
    lambda name: {"model": f"demo::{name}"},
    lambda name: {"model": name, "lora_path": name},
    lambda name: {"model": name, "adapter_id": name},
    lambda name: {"model": name, "lora_request": {"lora_name": name}},
]


def test_what_is_not_allowed_is_not_there(tmp_path: Path) -> None:
    """RELIABILITY 3.2: forbidden and unknown are the same reply, to the byte, by every door."""

    async def run() -> None:
        async with InProcess(tmp_path, **keys()) as app:

            async def ask(key: str, path: str, body: Mapping[str, Any] | None) -> Any:
                method = "GET" if body is None else "POST"
                reply = await app.http.request(method, path, json=body, headers=by(key))
                return told(reply)

            for door in DOORS:
                for fields in (
                    ("/v1/completions", {"prompt": "x"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ):
                    path, rest = fields
                    there = await ask(ACME, path, {**door("other/legal"), **rest})
                    absent = await ask(ACME, path, {**door("other/lagel"), **rest})
                    assert there[0] == 404
                    assert (there[0], there[1].replace(b"legal", b"lagel"), there[2]) == absent
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                for name in ("upper", "nobody"):
                    reply = await ask(ACME, path, {**body, "model": name})
                    assert reply[0] == 404 and b"model_not_found" in reply[1]
            assert (await ask(ACME, "/v1/models/upper", None))[0] == 404
            assert (await ask(ACME, "/v1/models/demo", None))[0] == 404
            assert (await ask(SECOND, "/v1/models/demo", None))[0] == 200
            for fields in ({}, {"lora_path": "other/legal"}):  # the base's name, and beside it
                assert (await complete(app, ACME, "demo", **fields)).status_code == 404
            assert (await complete(app, ACME, "demo", lora_path="acme/legal")).status_code == 200
            assert (await complete(app, ACME, "acme/legal")).status_code == 200
            warm = await ask(ACME, "/v1/adapters/acme%2Flegal/warm", {})
            assert warm[0] == 403

    asyncio.run(run())


def test_keys_of_one_tenant_are_one(tmp_path: Path) -> None:
    """A key can be changed for another: cached prefixes and turns are the tenant's."""

    async def run() -> None:
        async with InProcess(tmp_path, **keys()) as app:
            for key in (ACME, SECOND, OTHER):
                name = "other/legal" if key == OTHER else "acme/legal"
                assert (await complete(app, key, name)).status_code == 200
            first, second, other = app.spawner.engine.submits
            assert (first.tenant, first.cache_salt) == (second.tenant, second.cache_salt)
            assert other.tenant != first.tenant and other.cache_salt != first.cache_salt

    asyncio.run(run())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def throttled(code: str = "rate_limit_exceeded", status: int = 429) -> Iterator[RequestError]:
    with pytest.raises(RequestError) as caught:
        yield caught  # type: ignore[misc]
    assert (caught.value.code, caught.value.status) == (code, status)


def test_requests_a_minute() -> None:
    clock = Clock()
    quotas = Quotas(100, 1, now=clock)
    grant = Grant("t", "t", limits=KeyLimits(requests_per_minute=3))
    for _ in range(3):
        held = quotas.take(grant, 5, 1)
        held.end()
        clock.now += 10
    assert held.headers["x-ratelimit-limit-requests"] == "3"
    assert held.headers["x-ratelimit-remaining-requests"] == "0"
    with throttled() as caught:
        quotas.take(grant, 5, 1)
    assert caught.value.retry_after_s == 30  # type: ignore[attr-defined]
    assert caught.value.headers["x-ratelimit-reset-requests"] == "50.000s"  # type: ignore[attr-defined]
    clock.now += 30
    quotas.take(grant, 5, 1)
    with throttled():
        quotas.take(grant, 5, 1)


def test_tokens_a_minute() -> None:
    """A prompt counts at once, an answer as it comes; what can never be admitted is no 429."""
    clock = Clock()
    quotas = Quotas(100, 1, now=clock)
    grant = Grant("t", "t", limits=KeyLimits(tokens_per_minute=100))
    held = quotas.take(grant, 40, 1)
    clock.now += 5
    held.used(50)
    with throttled() as caught:
        quotas.take(grant, 11, 1)
    assert caught.value.retry_after_s == 55  # type: ignore[attr-defined]
    quotas.take(grant, 10, 1)
    with throttled("request_too_large", 400):
        quotas.take(grant, 101, 1)
    clock.now += 55
    quotas.take(grant, 40, 1)


def test_requests_in_flight_and_a_share_of_the_queue() -> None:
    quotas = Quotas(100, 2)
    few = Grant("t", "t", limits=KeyLimits(max_requests=2))
    held = [quotas.take(few, 1, 8) for _ in range(2)]
    with throttled():
        quotas.take(few, 1, 1)
    held[0].end()
    quotas.take(few, 1, 1).end()
    many = Grant("u", "u")
    for _ in range(6):
        quotas.take(many, 1, 8)
    with throttled():
        quotas.take(many, 1, 8)  # more than half of the queue
    quotas.take(many, 1, 2)
    alone = Quotas(100, 1)
    for _ in range(12):
        alone.take(many, 1, 8)  # one tenant may fill it


@given(
    st.lists(st.tuples(st.integers(0, 30 * 1024), st.integers(0, 50)), max_size=200),
    st.integers(1, 400),
)
def test_no_window_holds_more(steps: list[tuple[int, int]], most: int) -> None:
    """RELIABILITY 8.6: whatever the steps of the clock, the last 60 s are never undercounted, what
    is older than 61 s never counts, and memory is bounded."""
    window, now, added = Window(), 0.0, []
    for step, amount in steps:
        now += step / 1024  # exact in binary, as are the edges of the window
        window.add(amount, now)
        added.append((now, amount))
        exact = sum(a for t, a in added if t > now - WINDOW_S)
        at_most = sum(a for t, a in added if t > now - WINDOW_S - 1)
        assert exact <= window.used(now) <= at_most
        wait = window.wait_s(min(most, window.used(now)), now)
        assert 0 <= wait <= WINDOW_S
        assert len(window._grains) <= 62


def test_the_official_client_is_told(serve_fleet: Any) -> None:
    """429 as OpenAI has it: its error, when to come back, and what is left before that."""
    server = serve_fleet(Behaviour(), **keys(requests_per_minute=2))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ACME, max_retries=0) as client:
        ask = client.completions.with_raw_response.create
        left = [
            ask(model="acme/legal", prompt="x", max_tokens=1).headers[
                "x-ratelimit-remaining-requests"
            ]
            for _ in range(2)
        ]
        assert left == ["1", "0"]
        with pytest.raises(openai.RateLimitError) as caught:
            ask(model="acme/legal", prompt="x", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    for key, model, status in ((SECOND, "acme/legal", 429), (OTHER, "upper", 200)):
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=by(key))
        assert reply.status_code == status, "limits are the tenant's, and no other's"
    found = samples(httpx.get(f"{server.url}/metrics", headers=by(ADMIN)).text)
    assert value(found, "mlora_tenant_requests_total", tenant="acme") == 2
    assert value(found, "mlora_tenant_throttled_total", tenant="acme") == 2
    assert value(found, "mlora_tenant_throttled_total", tenant="other") == 0
    assert value(found, "mlora_tenant_in_flight", tenant="acme") == 0


def test_streams_and_aborts_give_back_what_they_hold(tmp_path: Path) -> None:
    """F36: once, however a request ends."""

    async def run() -> None:
        async with InProcess(tmp_path, Behaviour(token_s=0.01), **keys(max_requests=2)) as app:
            rng = random.Random(5)

            async def one() -> int:
                fields = {"stream": rng.random() < 0.5, "max_tokens": rng.randrange(1, 9)}
                task = asyncio.create_task(complete(app, ACME, "acme/legal", **fields))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                    task.cancel()
                try:
                    return (await task).status_code
                except asyncio.CancelledError:
                    return 0

            seen = {await one() for _ in range(60)}
            seen |= set(await asyncio.gather(*(one() for _ in range(30))))
            assert seen <= {0, 200, 429} and 429 in seen
            (account,) = app.front.quotas._accounts.values()
            assert (account.in_flight, account.sequences) == (0, 0)

    asyncio.run(run())


# ---- the fleet file

KEYS = """server:
  api_keys:
    - env:PLAIN
    - {key: env:ACME, tenant: acme, models: [acme/*, demo], requests_per_minute: 60}
    - {key: file:acme-2, tenant: acme, models: [acme/*], requests_per_minute: 60}
limits: {weights: {acme: 3}}
"""


def test_from_the_fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN", "plain-secret")
    monkeypatch.setenv("ACME", "acme-secret")
    (tmp_path / "acme-2").write_text("acme-secret-2\n")
    server = prepare(write(tmp_path, KEYS), report=lambda *_: None).server
    assert len(server.tenants) == 2
    plain, acme, second = (
        server.grants[key_id(key)] for key in ("plain-secret", "acme-secret", "acme-secret-2")
    )
    assert (plain.tenant, plain.is_limited) == (key_id("plain-secret"), False)
    assert acme.tenant == second.tenant == "tenant:acme"
    assert acme.allows("demo") and not second.allows("demo") and second.allows("acme/x")
    assert acme.limits.requests_per_minute == 60
    assert dict(server.weights) == {"tenant:acme": 3.0}
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{key: sk-123}", "env:NAME or file:PATH"),
        ("{tenant: acme}", "required key 'key' is missing"),
        ("{key: env:A, modles: [x]}", "did you mean 'models'?"),
        ("{key: env:A, models: []}", "models"),
        ("{key: env:A, models: ['a b']}", "a name of a model, or a glob"),
        ("{key: env:A, requests_per_minute: 0}", "greater than or equal to 1"),
        ("{key: env:A, tenant: 'a b'}", "tenant"),
        ("5", "api_keys"),
        ("{key: env:A, tenant: t}, {key: env:B, tenant: t, max_requests: 3}", "other limits"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(FleetError) as caught:
        load_fleet(write(tmp_path, f"server: {{api_keys: [{entry}]}}\n"))
    assert words in caught.value.message
    assert "sk-123" not in caught.value.message
    assert "api_keys" in caught.value.message

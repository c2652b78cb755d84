"""Every route against every kind of caller, from the route table itself."""

import asyncio
import itertools

import httpx
import pytest

from multilora_cli.errors import BadInput
from multilora_cli.server import auth
from multilora_cli.server.app import Routes
from multilora_cli.server.auth import KeyRing, Policy
from multilora_cli.server.routing import RouteSpec
from tests.fakes import tiny_config
from tests.server.conftest import InProcess

GOLDEN = {
    "POST /v1/chat/completions": "tenant",
    "POST /v1/completions": "tenant",
    "GET /v1/models": "tenant",
    "GET /v1/models/{model_id:path}": "tenant",
    "GET /v1/lora_adapters": "tenant",
    "POST /v1/load_lora_adapter": "admin",
    "POST /v1/unload_lora_adapter": "admin",
    "POST /v1/adapters/{name:path}/warm": "admin",
    "POST /v1/adapters/{name:path}/evict": "admin",
    "POST /v1/fleet": "admin",
    "POST /tokenize": "tenant",
    "POST /detokenize": "tenant",
    "POST /adapters": "admin",
    "DELETE /adapters/{name:path}": "admin",
    "GET /health": "public",
    "GET /ping": "public",
    "GET /version": "public",
    "GET /readyz": "public",
    "GET /metrics": "tenant",
    "GET /openapi.json": "public",
    "GET /docs": "public",
}
KEY, OTHER, ADMIN = "tenant-key-1", "tenant-key-2", "admin-key"
CALLERS = {
    "nobody": [],
    "bad": [("authorization", "Bearer wrong")],
    "tenant": [("authorization", f"Bearer {KEY}")],
    "other": [("authorization", f"bearer  {OTHER} ")],
    "admin": [("authorization", f"Bearer {ADMIN}")],
}
LETS_IN = {
    "public": {"nobody", "bad", "tenant", "other", "admin"},
    "tenant": {"tenant", "other", "admin"},
    "admin": {"admin"},
}


def request_of(line, headers):
    method, path = line.split(" ")
    path = path.replace("{model_id:path}", "demo")
    content = b"{}" if method == "POST" else None
    kind = [("content-type", "application/json")] if content else []
    return {"method": method, "url": path, "headers": kind + headers, "content": content}


async def _matrix(folder) -> None:
    keys = {"api_keys": (KEY, OTHER), "admin_key": ADMIN}
    async with InProcess(folder, **keys) as app:
        table = {f"{r.method} {r.path}": str(r.policy) for r in Routes(app.front).table()}
        assert table == GOLDEN
        for (line, policy), caller in itertools.product(GOLDEN.items(), CALLERS):
            reply = await app.http.request(**request_of(line, CALLERS[caller]))
            expected = caller in LETS_IN[policy]
            denied = reply.status_code in (401, 403)
            assert denied != expected, (line, caller, reply.status_code)
            assert reply.headers["x-request-id"]
            if denied:
                known = caller in ("tenant", "other")
                assert reply.status_code == (403 if known else 401)
                assert ("www-authenticate" in reply.headers) != known
                assert reply.json()["error"]["code"] == (
                    "permission_denied" if known else "invalid_api_key"
                )


def test_every_route_and_caller(tmp_path):
    """A-SEC-02: the golden table; a route without a line in it fails."""
    asyncio.run(_matrix(tmp_path))


HOSTS = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil", "",
    "evil.example:8000", "[::2]", "0.0.0.0", "10.0.0.1", "169.254.169.254", "localhost:x",
    "a/../127.0.0.1", "127.0.0.1/v1", "/v1/models", "?x", "#x", "health", "127.0.0.1:8000:1",
    "xn--lcalhost-54a", "127.0.0.1 evil", "\x01", "[::1", "*",
]  # fmt: skip
PATHS = [
    "/v1/models", "//v1/models", "/v1//models", "/./v1/models", "/v1/../v1/models", "/v1/models/",
    "/%761/models", "/v1%2fmodels", "/V1/models", "/v1/models?x=1", "/v1/models;a=b",
    "/health/../v1/models", "/docs/../v1/models", "/v1/models%00", "/v1/models%20",
    "/health%2f..%2fv1%2fmodels", "/v1/models/demo", "/v1/models/%64emo", "/metrics", "/metrics/",
]  # fmt: skip


async def _spellings(folder) -> None:
    keys = {"api_keys": (KEY,), "admin_key": ADMIN}
    async with InProcess(folder, **keys) as app:
        for host, path in itertools.product(["127.0.0.1:8000", *HOSTS], PATHS):
            headers = {"host": host} if host else {"host": " "}
            reply = await app.http.get(
                httpx.URL("http://127.0.0.1:8000").join(path), headers=headers
            )
            assert reply.status_code in (400, 401, 403, 404), (host, path, reply.status_code)
            if host in HOSTS:
                assert reply.status_code == 403, (host, path)
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8000", "127.9.9.9:1"):
            reply = await app.http.get("/health", headers={"host": host})
            assert reply.status_code == 200, host


def test_hosts_and_spellings_never_pass_without_a_key(tmp_path):
    """RELIABILITY 3.2: 23 Host values x 20 paths; nothing is decided on a rebuilt URL."""
    asyncio.run(_spellings(tmp_path))


async def _browsers(folder) -> None:
    async with InProcess(folder) as app:
        for origin in ("http://evil.example", "null", "http://localhost.evil.example", "x"):
            reply = await app.http.get("/v1/models", headers={"origin": origin})
            assert reply.status_code == 403
        for origin in ("http://localhost:3000", "http://127.0.0.1"):
            reply = await app.http.get("/v1/models", headers={"origin": origin})
            assert reply.status_code == 200
            assert not [name for name in reply.headers if name.startswith("access-control")]
        headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        reply = await app.http.options("/v1/chat/completions", headers=headers)
        assert reply.status_code == 403
        headers["origin"] = "http://localhost"
        reply = await app.http.options("/v1/chat/completions", headers=headers)
        assert reply.status_code == 405
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_no_cross_origin_use(tmp_path):
    asyncio.run(_browsers(tmp_path))


async def _odd_keys(folder) -> None:
    async with InProcess(folder, api_keys=(KEY,)) as app:
        good = f"Bearer {KEY}"
        cases = [
            [("authorization", good), ("authorization", good)],
            [("authorization", KEY)],
            [("authorization", "Bearer")],
            [("authorization", "Bearer ")],
            [("authorization", f"Basic {KEY}")],
            [("authorization", f"Bearer {KEY}x")],
            [("authorization", f"Bearer {KEY[:-1]}")],
            [("authorization", "Bearer " + "k" * 10**6)],
            [("authorization", b"Bearer \xff\xfe")],
            [("x-api-key", KEY)],
        ]
        for headers in cases:
            reply = await app.http.get("/v1/models", headers=headers)
            assert reply.status_code == 401, headers[0][1][:20]
            assert KEY not in reply.text
        assert (await app.http.get(f"/v1/models?api_key={KEY}")).status_code == 401
        assert (await app.http.get("/v1/models", headers={"authorization": good})).is_success
        reply = await app.http.post(
            "/v1/load_lora_adapter", json={}, headers={"authorization": good}
        )
        assert reply.status_code == 403


def test_odd_keys(tmp_path, caplog):
    """F95: two headers, query strings, huge and non-ASCII keys; never logged."""
    with caplog.at_level(0):
        asyncio.run(_odd_keys(tmp_path))
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith("httpx")]
    assert not [line for line in ours if KEY in line]


async def _without_keys(folder) -> None:
    async with InProcess(folder) as app:
        for line in GOLDEN:
            reply = await app.http.request(**request_of(line, []))
            assert reply.status_code not in (401, 403), line
    async with InProcess(folder / "admin", admin_key=ADMIN) as app:
        assert (await app.http.get("/v1/models")).is_success
        assert (await app.http.post("/v1/load_lora_adapter", json={})).status_code == 401
        headers = {"authorization": f"Bearer {ADMIN}"}
        reply = await app.http.post("/v1/load_lora_adapter", json={}, headers=headers)
        assert reply.status_code == 400


def test_without_keys_on_loopback(tmp_path):
    asyncio.run(_without_keys(tmp_path))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", "[::]"])
def test_no_open_server_on_other_interfaces(tmp_path, host):
    with pytest.raises(BadInput, match="api_keys"):
        tiny_config(tmp_path, host=host)
    with pytest.raises(BadInput, match="api_keys"):
        tiny_config(tmp_path, host=host, admin_key="a")
    assert not tiny_config(tmp_path, host=host, api_keys=("k",)).loopback


def test_secrets_are_not_shown(tmp_path):
    config = tiny_config(tmp_path, api_keys=("canary-1",), admin_key="canary-2")
    assert "canary" not in repr(config)
    assert "canary" not in repr(vars(KeyRing(config.api_keys, config.admin_key)))


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Every stored key is looked at, whichever matches."""
    calls = []
    real = auth.compare_digest
    monkeypatch.setattr(auth, "compare_digest", lambda a, b: calls.append(1) or real(a, b))
    ring = KeyRing(["one", "two", "three"], "admin")
    for key in (b"one", b"three", b"admin"):
        calls.clear()
        ring.authorise(Policy.TENANT, [(b"authorization", b"Bearer " + key)])
        assert len(calls) == 4


def test_a_route_without_a_policy_cannot_be_written_down():
    """The table is all that is served, and each line of it says who may ask."""

    async def endpoint(request):
        raise AssertionError("called without a policy")

    with pytest.raises(TypeError, match="policy"):
        RouteSpec("GET", "/open", endpoint, summary="Nobody decided.")

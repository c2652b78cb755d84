"""Raw bytes at the port: junk, slow senders, huge headers, caps (F93, F94)."""

import json
import os
import socket
import time
from dataclasses import replace

import httpx
import pytest

from multilora_cli.server.config import ServerLimits
from tests.server.test_chat import chat
from tests.server.test_streams import wait_for


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def talk(server, *parts):
    """What comes back for some bytes until the server closes; b"" for nothing."""
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except OSError:
            return b""


GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
JUNK = {
    "random": os.urandom(2000),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: 127.0.0.1\r\n\r\n",
    "two lengths": GET + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "both lengths": GET + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": GET + b"transfer-encoding: chunked\r\n\r\nxyz\r\nab\r\n",
    "negative length": GET + b"content-length: -1\r\n\r\n",
    "header without colon": GET + b"oops\r\n\r\n",
    "folded header": GET + b"a: b\r\n c\r\n\r\n",
    "NUL": GET + b"a: \x00\r\n\r\n",
    "bare LF": b"GET /health HTTP/1.1\nhost: 127.0.0.1\n\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "absolute": b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "upgrade": GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "long target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "bad escape": b"GET /%zz%ff%00 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "non-ASCII target": b"GET /\xff\xfe HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
}


@pytest.mark.parametrize("name", JUNK)
def test_junk(server, name):
    """F93: 4xx in the one shape, or a plain close; the server lives."""
    reply = talk(server, JUNK[name])
    if reply and name not in ("upgrade", "bare LF", "folded header"):
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4"), reply
        assert b"x-request-id: " in head
        error = json.JSONDecoder().raw_decode(body.decode())[0]["error"]
        assert set(error) == {"message", "type", "param", "code"}
    elif reply:
        assert not reply.startswith(b"HTTP/1.1 5")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_random_bytes(server):
    """RELIABILITY 3.5: junk on the port is only a 400."""
    for size in range(1, 400, 4):
        reply = talk(server, os.urandom(size) + b"\r\n\r\n")
        assert not reply.startswith(b"HTTP/1.1 5")
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"a: " + b"x" * 10_000, 200),
        (b"a: " + b"x" * 200_000, 431),
        (b"a: " + b"x" * 5_000_000, 431),
        (b"\r\n".join(b"a%d: x" % i for i in range(90)), 200),
        (b"\r\n".join(b"a%d: x" % i for i in range(101)), 431),
        (b"\r\n".join(b"a%d: x" % i for i in range(5000)), 431),
    ],
)
def test_header_limits(server, headers, status):
    """RELIABILITY 3.4: 64 KB and 100 fields."""
    reply = talk(server, GET + headers + b"\r\nconnection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 %d" % status) or (status == 431 and not reply)


def test_keep_alive_and_pipelining(server):
    reply = talk(server, (GET + b"\r\n") * 3 + GET + b"connection: close\r\n\r\n")
    assert reply.count(b"HTTP/1.1 200") == 4


def test_expect_continue(server):
    body = b'{"model":"demo","prompt":"a","max_tokens":1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert b"HTTP/1.1 200" in connection.recv(4096)


def test_slow_senders_are_ended(serve_fleet):
    """F94: silent, slow headers, slow body, idle after a reply; others are unaffected."""
    limits = replace(ServerLimits(), header_s=0.4, body_s=0.4, idle_s=1.0)
    server = serve_fleet(limits=limits)
    post = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n"
    )
    starts = {"silent": b"", "headers": GET, "body": post + b"{", "idle": GET + b"\r\n"}
    starts["next headers"] = GET + b"\r\n" + GET[:20]
    starts["unread body"] = GET + b"content-length: 1000\r\n\r\nabc"
    held = {name: [connect(server) for _ in range(20)] for name in starts}
    for name, connections in held.items():
        for connection in connections:
            connection.sendall(starts[name])
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for _ in range(5):
            assert chat(http, max_tokens=1).status_code == 200
    expected = {"silent": b" 408", "headers": b" 408", "body": b" 408", "idle": b" 200"}
    started_s = time.monotonic()
    for name, connections in held.items():
        for connection in connections:
            reply = b"".join(iter(lambda c=connection: c.recv(65536), b""))
            assert reply.startswith(b"HTTP/1.1" + expected.get(name, b" 200")), (name, reply)
            connection.close()
    assert time.monotonic() - started_s < 8


def test_connection_cap(serve_fleet):
    server = serve_fleet(limits=replace(ServerLimits(), max_connections=10))
    held = [connect(server) for _ in range(10)]

    def refused():
        reply = talk(server, GET + b"connection: close\r\n\r\n")
        return not reply or b" 503 " in reply  # a reset may overtake the reply

    wait_for(refused)
    for connection in held:
        connection.close()

    def served():
        return talk(server, GET + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")

    wait_for(served)


def test_request_ids(http):
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, "a\tb", "<b>"):
        found = http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(found) == 32
    assert len(http.get("/nothing").headers["x-request-id"]) == 32

"""A hub and a bucket on loopback that misbehave on demand (RELIABILITY F60 to F68).

The good behaviour is the small part of both protocols that fetching uses. A fault is a function
that gets the handler and the good body; `faults[PART]` lists the faults of coming requests whose
path holds PART, one a request; None behaves well.
"""

import gzip
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Callable[["Handler", bytes], None]


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class FaultOrigin:
    """What the server holds, what it was asked, and how it will misbehave."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by org/name
    objects: dict[str, bytes] = field(default_factory=dict)  # by bucket/key
    commits: dict[str, str] = field(default_factory=dict)  # by org/name, for main
    extra_items: list[Any] = field(default_factory=list)  # told beside the files asked for
    faults: dict[str, list[Fault | None]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def put_repository(self, name: str, folder: Path) -> str:
        """Publish the files of `folder` as the repository's main; gives the commit."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repositories[name] = files
        content = b"".join(key.encode() + value for key, value in sorted(files.items()))
        self.commits[name] = hashlib.sha256(content).hexdigest()[:40]
        return self.commits[name]

    def put_objects(self, prefix: str, folder: Path) -> None:
        """Publish the files of `folder` below bucket/prefix/."""
        for path in folder.iterdir():
            self.objects[f"{prefix}{path.name}"] = path.read_bytes()

    def count(self, part: str) -> int:
        """Requests whose path holds `part`."""
        return sum(part in seen.path for seen in self.seen)

    def fault_for(self, path: str) -> Fault | None:
        """The next fault for `path`."""
        for part, fault in self.always.items():
            if part in path:
                return fault
        for part, faults in self.faults.items():
            if part in path and faults:
                return faults.pop(0)
        return None


class Handler(BaseHTTPRequestHandler):
    """Serves `origin`, an attribute that the server function sets."""

    protocol_version = "HTTP/1.1"
    origin: FaultOrigin

    def do_GET(self) -> None:
        """Every method: find the good body, then let a fault have it."""
        length = int(self.headers.get("content-length") or 0)
        form = parse_qs(self.rfile.read(length).decode()) if length else {}
        self.origin.seen.append(Seen(self.command, self.path, dict(self.headers)))
        body = self._find(unquote(urlsplit(self.path).path), form)
        fault = self.origin.fault_for(self.path)
        if fault is not None:
            fault(self, body or b"")
        elif body is None:
            self.answer(404)
        else:
            match = self.headers.get("if-match")
            if match is not None and match != etag(body):
                self.answer(412)
            else:
                self.answer(200, body)

    do_HEAD = do_GET
    do_POST = do_GET

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer; underscores of header names become dashes."""
        self.send_response(status)
        fields = {"content-length": str(len(body)), "etag": etag(body)}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _find(self, path: str, form: Mapping[str, list[str]]) -> bytes | None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 6:
            return self._api("/".join(parts[2:4]), parts[4], "/".join(parts[5:]), form)
        if len(parts) >= 5 and parts[2] == "resolve":
            name = "/".join(parts[:2])
            good = parts[3] == self.origin.commits.get(name)
            return self.origin.repositories[name].get("/".join(parts[4:])) if good else None
        return self.origin.objects.get("/".join(parts))

    def _api(
        self, name: str, kind: str, revision: str, form: Mapping[str, list[str]]
    ) -> bytes | None:
        commit = self.origin.commits.get(name)
        if commit is None or revision not in ("main", "refs/pr/1", commit):
            return None
        if kind == "revision":
            return json.dumps({"id": name, "sha": commit}).encode()
        files = self.origin.repositories[name]
        items = [describe(path, files[path]) for path in form["paths"] if path in files]
        return json.dumps([*items, *self.origin.extra_items]).encode()


def describe(path: str, body: bytes) -> dict[str, Any]:
    """A file as the Hub's paths-info has it."""
    item: dict[str, Any] = {"type": "file", "path": path, "size": len(body), "oid": "a" * 40}
    if path.endswith(".safetensors"):
        digest = hashlib.sha256(body).hexdigest()
        item["lfs"] = {"oid": digest, "size": len(body), "pointerSize": 133}
    return item


def etag(body: bytes) -> str:
    """The version of an object's bytes."""
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


# ---------------------------------------------------------------- faults


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    """Nothing but this status."""
    return lambda handler, _: handler.answer(code, body, **headers)


def reset(handler: Handler, _: bytes) -> None:
    """The connection is reset."""
    option = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    handler.close_connection = True
    handler.connection.close()


def stall(handler: Handler, body: bytes) -> None:
    """A good head, then nothing."""
    _head(handler, len(body))
    _pause(handler, 3.0)


def drip(handler: Handler, body: bytes) -> None:
    """A good head, then a byte now and then."""
    _head(handler, len(body))
    for index in range(200):
        try:
            handler.wfile.write(body[index : index + 1])
        except OSError:
            return
        time.sleep(0.03)
    handler.close_connection = True


def drip_head(handler: Handler, _: bytes) -> None:
    """A head that never ends."""
    try:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        for _index in range(200):
            handler.wfile.write(b"y")
            time.sleep(0.03)
    except OSError:
        return
    handler.close_connection = True


def short(handler: Handler, body: bytes) -> None:
    """The right length is promised, half of it comes."""
    _head(handler, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def long(handler: Handler, body: bytes) -> None:
    """No length is promised, more comes."""
    handler.send_response(200)
    handler.send_header("connection", "close")
    handler.end_headers()
    handler.wfile.write(body + b"more")
    handler.close_connection = True


def wrong_length(handler: Handler, body: bytes) -> None:
    """The length header says something else."""
    _head(handler, len(body) + 7)
    handler.wfile.write(body)
    handler.close_connection = True


def gzip_bomb(handler: Handler, _: bytes) -> None:
    """64 MiB of zeros in 64 KB."""
    handler.answer(200, gzip.compress(bytes(2**26), 1), content_encoding="gzip")


def flipped(handler: Handler, body: bytes) -> None:
    """The right size, one bit wrong, the right version claimed."""
    wrong = bytearray(body)
    wrong[-1] ^= 1
    handler.answer(200, bytes(wrong), etag=etag(body))


def redirect(url: str, code: int = 307) -> Fault:
    """Elsewhere."""
    return lambda handler, _: handler.answer(code, b"", location=url)


def _head(handler: Handler, length: int) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(length))
    handler.end_headers()


def _pause(handler: Handler, seconds: float) -> None:
    """Until the other side leaves, at most that long."""
    handler.connection.settimeout(seconds)
    with suppress(OSError):
        handler.connection.recv(1)
    handler.close_connection = True


@contextmanager
def fault_origin() -> Iterator[FaultOrigin]:
    """A running server."""
    origin = FaultOrigin()

    class Bound(Handler):
        pass

    Bound.origin = origin
    server = _Server(("127.0.0.1", 0), Bound)
    origin.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield origin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that a fault or the client broke are what the tests are about."""

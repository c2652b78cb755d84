"""A server that only pretends: tokens by the clock, to measure and to test the load generator.

It speaks just enough HTTP/1.1 for one, in one asyncio protocol, so that it is faster than what
measures it. `python -m multilora_cli.bench.loopback '{"gap_s": 0.1}'` prints its port.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_LOADING = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_STATUS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 500: b"Internal Server Error"}


@dataclass(frozen=True)
class Script:
    """How the server behaves; `failures` maps a model's name to what goes wrong with it.

    What can go wrong: a status (`http_500`), `cut` (the connection closes in mid-stream), `error`
    (an error event), `hang` (nothing ever comes), `other` (another model answers).
    """

    models: tuple[str, ...] = ("base", "a", "b", "c")  # the first one is the base
    unlisted: tuple[str, ...] = ()  # served as well, but not told
    first_s: float = 0.0
    gap_s: float = 0.0
    usage: bool = True
    admin: bool = True  # whether load and unload are allowed
    strict: bool = False  # whether ignore_eos is refused, as by servers that know only OpenAI's
    failures: tuple[tuple[str, str], ...] = ()


class Loopback:
    """The pretended server; use as an async context manager, on a free port of loopback."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.asked: Counter[str] = Counter()  # requests by model
        self.bodies: list[dict[str, Any]] = []
        self.admin_calls: list[tuple[str, dict[str, Any]]] = []
        self.url = ""
        self.port = 0
        self._server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Loopback":
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0,
                                                backlog=4096)  # fmt: skip
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def models(self) -> dict[str, Any]:
        """The reply of /v1/models."""
        base, *adapters = self.script.models
        cards: list[dict[str, Any]] = [{"id": base, "parent": None, "max_model_len": 4096}]
        cards += [{"id": name, "parent": base, "root": f"/adapters/{name}"} for name in adapters]
        return {"object": "list", "data": cards}

    def manage(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Load or unload: noted, and refused where the script says so."""
        self.admin_calls.append((path, body))
        if not self.script.admin:
            return 400, _error("loading is not allowed here")
        return 200, {}


class _Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, server: Loopback) -> None:
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, path, _ = head.split(b" ", 2)
        self._request(method, path.decode(), rest[:length])

    def _request(self, method: bytes, path: str, raw: bytes) -> None:
        body = json.loads(raw) if raw else {}
        if path == "/v1/models":
            self._reply(200, self._server.models())
        elif path in _LOADING or (path.startswith("/v1/adapters/") and path.endswith("/evict")):
            self._reply(*self._server.manage(path, body))
        elif method == b"POST" and path.endswith("completions"):
            self._complete(body, chat="chat" in path)
        else:
            self._reply(404, _error("no such route"))

    def _complete(self, body: dict[str, Any], *, chat: bool) -> None:
        server, model = self._server, body["model"]
        server.asked[model] += 1
        server.bodies.append(body)
        failure = dict(server.script.failures).get(model, "")
        if failure.startswith("http_"):
            self._reply(int(failure[5:]), _error("as scripted"))
        elif model not in server.script.models + server.script.unlisted:
            self._reply(404, _error(f"The model `{model}` does not exist."))
        elif server.script.strict and "ignore_eos" in body:
            self._reply(422, _error("Unexpected fields in the request: {'ignore_eos'}"))
        else:
            task = asyncio.get_running_loop().create_task(self._stream(body, failure, chat))
            server.tasks.add(task)
            task.add_done_callback(server.tasks.discard)

    async def _stream(self, body: dict[str, Any], failure: str, chat: bool) -> None:
        script, tokens = self._server.script, int(body["max_tokens"])
        model = "other" if failure == "other" else body["model"]
        piece: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
        head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": model}
        chunk = _event(head | {"choices": [{"index": 0, "finish_reason": None, **piece}]})
        self._write(_STREAM)
        await asyncio.sleep(script.first_s)
        if failure == "hang":
            await asyncio.Event().wait()
        for index in range(tokens):
            if index:
                await asyncio.sleep(script.gap_s)
            if failure == "cut" and index == 1 and self._transport is not None:
                self._transport.close()
            if failure == "error" and index == 1:
                self._write(_event(_error("as scripted")) + _END)
                return
            if self._transport is None:
                return
            self._write(chunk)
        last = b""
        if script.usage:
            used = {"prompt_tokens": len(body.get("prompt") or ()), "completion_tokens": tokens}
            last = _event(head | {"choices": [], "usage": used})
        self._write(last + _chunked(b"data: [DONE]\n\n") + _END)

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        reason = _STATUS.get(status, b"Error")
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, reason, len(raw)) + raw)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "scripted"}}


def _event(value: dict[str, Any]) -> bytes:
    return _chunked(b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(options: dict[str, Any]) -> None:
    """Serve until stdin closes, so that no server outlives whoever started it."""
    async with Loopback(Script(**options)) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))

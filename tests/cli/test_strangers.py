"""Commands that reach something else than mlora: one line, exit code 3, never a traceback."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app

runner = CliRunner()
BODIES = {
    "html": b"<html>It works!</html>",
    "empty": b"",
    "array": b"[]",
    "null": b"null",
    "object": b"{}",
    "number": b'{"data": 5}',
    "mixed": b'{"data": [1, null, "x"]}',
    "numbered": b'{"data": [{"id": 5}]}',
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "error": b'{"error": "x"}',
    "vllm": b'{"object": "list", "data": [{"object": "model"}]}',
    "escapes": json.dumps({"data": [{"id": "\x1b[31m", "tier": 3}]}).encode(),
    "stream": b'data: {"choices": 5}\n\n',
    "lines": b"data: [\n\ndata: nonsense\n\n",
}


class Stranger(http.server.BaseHTTPRequestHandler):
    """Answers everything with the body that the path begins with."""

    def do_GET(self) -> None:
        """Any GET or POST."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = BODIES[self.path.split("/")[1]]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """Its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


COMMANDS = [
    ["list"], ["list", "--traffic"], ["list", "--json"], ["warm", "x"], ["warm", "x*"],
    ["evict", "x"], ["diff", "FLEET"], ["apply", "FLEET"], ["chat", "--adapter", "x"],
]  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_mlora_is_told(
    stranger: str, tmp_path: Path, kind: str, command: list[str]
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("base: {model: demo:base}\n")
    words = [str(fleet) if word == "FLEET" else word for word in command]
    ran = runner.invoke(app, [*words, "--url", f"{stranger}/{kind}"], input="hello\n")
    assert not isinstance(ran.exception, Exception), ran.exception
    assert ran.exit_code == 3, ran.output
    assert "what answers is no mlora server" in ran.stderr
    assert "\x1b" not in ran.output


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://", "http://[::1", "http://a:b", "ftp://x", "http://x\x1b[0m"]
)
def test_addresses_that_are_none(url: str) -> None:
    ran = runner.invoke(app, ["list", "--url", url])
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1), ran.output
    assert "expected http://HOST:PORT" in ran.stderr and "\x1b" not in ran.stderr


def test_a_key_that_no_header_can_hold() -> None:
    ran = runner.invoke(app, ["list", "--url", "http://127.0.0.1:1", "--api-key", "клю\nч"])
    assert (ran.exit_code, "--api-key" in ran.stderr) == (2, True), ran.output
    assert "клю" not in ran.stderr

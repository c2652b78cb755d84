"""Fetching a base from a hub that runs in this process: pinned, complete, or a clean error."""

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from multilora_cli.errors import ModelError, Unreachable
from multilora_cli.models import hub as hub_module
from multilora_cli.models.hub import fetch_config, fetch_model
from tests.models import tiny

COMMIT = "c0ffee" + "0" * 34
NAME = "acme/tiny"


class FakeHub(BaseHTTPRequestHandler):
    """The three routes that a download uses: model info, file tree, files."""

    files: ClassVar[dict[str, bytes]] = {}
    requested: ClassVar[list[str]] = []
    status: ClassVar[int] = 200
    error_code: ClassVar[str] = ""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if self.status != 200:
            self.reply(self.status, b"{}", {"X-Error-Code": self.error_code}, body)
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
            self.reply(200, json.dumps(tree).encode(), {}, body)
        elif path.startswith(f"/api/models/{NAME}"):
            if "/revision/" in path and not path.endswith(("/main", COMMIT)):
                return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": NAME, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), {}, body)
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            data = self.files[name]
            if body:
                self.requested.append(name)
            etag = hashlib.sha256(data).hexdigest()
            self.reply(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def reply(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sharded model with what repositories carry besides."""
    folder = tiny.save_model(
        tiny.make_model("llama"), tmp_path_factory.mktemp("hub"), max_shard_size="90KB"
    )
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = (
        "tokenizer.json",
        "chat_template.jinja",
        "consolidated.safetensors",
        "evil.py",
        "a.bin",
    )
    return {**files, **{name: name.encode() for name in extra}}


@pytest.fixture
def hub(repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a fake hub."""
    monkeypatch.setattr(FakeHub, "files", repository)
    monkeypatch.setattr(FakeHub, "requested", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetches_what_the_model_needs_and_nothing_else(hub: str, tmp_path: Path) -> None:
    """Config, tokenizer, template and indexed shards; no code, no pickle, no second copy."""
    reports: list[tuple[str, int, int]] = []
    folder = fetch_model(
        NAME, report=lambda *args: reports.append(args), cache=tmp_path, endpoint=hub
    )
    assert folder.name == COMMIT
    fetched = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < fetched
    assert not fetched & {"consolidated.safetensors", "x.py", "a.bin"}
    assert tiny.load(folder).geometry.num_layers == 3
    done = [report[1] for report in reports]
    assert done == sorted(done) and {report[0] for report in reports} == {"download"}
    shards = sum(len(FakeHub.files[n]) for n in fetched if n.endswith(".safetensors"))
    assert done[-1] == reports[-1][2] == shards


def test_a_second_fetch_downloads_nothing(hub: str, tmp_path: Path) -> None:
    """The cache is complete."""
    first = fetch_model(NAME, cache=tmp_path, endpoint=hub)
    FakeHub.requested.clear()
    assert fetch_model(NAME, COMMIT, cache=tmp_path, endpoint=hub) == first
    assert not FakeHub.requested


def test_offline_uses_a_complete_copy(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is gone: what was fetched before is served, by branch and by commit."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's retries
    first = fetch_model(NAME, cache=tmp_path, endpoint=hub)
    nowhere = "http://127.0.0.1:9"
    assert fetch_model(NAME, cache=tmp_path, endpoint=nowhere) == first
    assert fetch_model(NAME, COMMIT, cache=tmp_path, endpoint=nowhere) == first
    next(first.glob("model-00002*")).unlink()
    with pytest.raises((Unreachable, ModelError), match="local cache"):
        fetch_model(NAME, cache=tmp_path, endpoint=nowhere)


def test_offline_without_a_copy(tmp_path: Path) -> None:
    """One line with a way out."""
    with pytest.raises(Unreachable, match="acme/tiny: the Hub does not answer") as caught:
        fetch_model(NAME, cache=tmp_path, endpoint="http://127.0.0.1:9")
    assert caught.value.hint is not None and "local folder" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (404, "RepoNotFound", ModelError, "no such model"),
        (401, "RepoNotFound", ModelError, "no such model"),
        (404, "RevisionNotFound", ModelError, "no revision"),
        (403, "GatedRepo", ModelError, "must be granted"),
    ],
)
def test_refusals_of_the_hub(
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    error: type[Exception],
    message: str,
) -> None:
    """Unknown, gated, private, no such revision."""
    monkeypatch.setattr(FakeHub, "status", status)
    monkeypatch.setattr(FakeHub, "error_code", code)
    with pytest.raises(error, match=message):
        fetch_model(NAME, "v9", cache=tmp_path, endpoint=hub)


def test_a_missing_shard_is_named(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index names a file the repository does not hold."""
    shard = next(name for name in FakeHub.files if name.startswith("model-00002"))
    rest = {name: data for name, data in FakeHub.files.items() if name != shard}
    monkeypatch.setattr(FakeHub, "files", rest)
    with pytest.raises(ModelError, match=shard):
        fetch_model(NAME, cache=tmp_path, endpoint=hub)


@pytest.mark.parametrize("name", ["../x", "a/b/c", "", "/etc", "a b", "org/", "x" * 300, "\x1b[2J"])
def test_names_that_are_no_hub_id(name: str, tmp_path: Path) -> None:
    """Refused before anything is asked; escaped in the message."""
    with pytest.raises(ModelError, match="neither an existing folder nor") as caught:
        fetch_model(name, cache=tmp_path, endpoint="http://127.0.0.1:9")
    assert caught.value.message.isprintable()


def test_a_plan_fetches_config_alone(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_config(NAME, COMMIT, cache=tmp_path, endpoint=hub)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert FakeHub.requested == ["config.json"]
    with monkeypatch.context() as patch:
        patch.setattr(FakeHub, "status", 404)
        patch.setattr(FakeHub, "error_code", "EntryNotFound")
        with pytest.raises(ModelError, match="not a model in Hugging Face format"):
            fetch_config(NAME, "main", cache=tmp_path, endpoint=hub)
        patch.setattr(FakeHub, "status", 503)  # busy: what is here is taken
        assert fetch_config(NAME, COMMIT, cache=tmp_path, endpoint=hub) == folder
    with pytest.raises(ModelError, match="no such model"):
        fetch_config("acme/other", cache=tmp_path, endpoint=hub)
    with pytest.raises(ModelError, match="neither an existing folder"):
        fetch_config("a/b/c")


@pytest.mark.parametrize("silence", ["nobody listens", "no answer", "no address"])
def test_a_hub_that_does_not_answer_is_asked_once(
    silence: str, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retries of huggingface-hub took 20 s; a look-up of a name cannot be ended."""
    fetch_config(NAME, COMMIT, cache=tmp_path / "filled", endpoint=hub)
    monkeypatch.setattr(hub_module, "ANSWER_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silence != "nobody listens":
            listener.listen()
        if silence == "no address":
            monkeypatch.setattr(hub_module, "_look_up", lambda *_: time.sleep(5))
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            fetch_config(NAME, cache=tmp_path / "empty", endpoint=endpoint)
        assert "does not answer" in caught.value.message and "\n" not in caught.value.message
        assert f"hf download {NAME} config.json" in (caught.value.hint or "")
        folder = fetch_config(NAME, COMMIT, cache=tmp_path / "filled", endpoint=endpoint)
        assert folder.name == COMMIT and time.monotonic() - began < 4.5

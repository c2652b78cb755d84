"""Recording the load of a server, and what reads it again."""

import json
import os
import time
from pathlib import Path

import httpx
import pytest

from multilora_cli.errors import BadInput
from multilora_cli.server.recorder import TraceRecorder
from multilora_cli.sizing.trace import read_trace
from tests.fakes import Behaviour
from tests.server.test_chat import chat


def test_requests_are_recorded_without_what_was_said(serve_fleet, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    server = serve_fleet(Behaviour(), record=path)
    before = time.time()
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for stream in (False, True):
            reply = chat(http, "my secret", model="upper", stream=stream, max_tokens=4)
            assert reply.status_code == 200 and reply.text
        usage = chat(http, "x", model="demo", max_tokens=3, n=2).json()["usage"]
        assert chat(http, "x", model="nobody").status_code == 404  # never came to the engine
    server.stop()
    calls = read_trace(path)
    assert [call.adapter for call in calls] == ["upper", "upper", None]
    assert [call.output_tokens for call in calls] == [4, 4, 6]
    assert calls[2].input_tokens == usage["prompt_tokens"]
    assert before - 1 <= calls[0].time_s <= calls[2].time_s <= time.time()
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_are_added_to_what_is_there_until_nobody_could_read_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "load.jsonl"
    for _ in range(2):
        recorder = TraceRecorder(path, max_bytes=4096 + 200)
        for index in range(3):
            recorder.ended(1.5 + index, "a", 7, 9)
        recorder.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"time": 1.5, "adapter": "a", "input": 7, "output": 9}
    assert len(rows) == 4 and "recording to" in caplog.text  # 54 bytes each: 216 are too many


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--record"):
        TraceRecorder(tmp_path / "nowhere" / "load.jsonl")


def test_a_pipe_holds_nobody(tmp_path: Path) -> None:
    """Opening one that nobody reads waits for ever, and no signal would end the server then."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(BadInput, match="--record"):
            TraceRecorder(path)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BadInput, match="no regular file"):
        TraceRecorder(tmp_path / "pipe")
    os.close(reader)

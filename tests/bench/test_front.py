"""`mlora bench front`: the front process over an engine that only pretends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from multilora_cli.bench.pretend_engine import pretend_spawn
from multilora_cli.cli.app import app
from multilora_cli.engine.link import read_message, write_frame
from multilora_cli.engine.messages import (
    Abort,
    FromEngine,
    Ready,
    SamplingParams,
    Step,
    Submit,
    ToEngine,
)


def front(*arguments: str, code: int = 0) -> Any:
    flags = ("--vocabulary", "2000", "--gap", "0.002", "--json")
    result = CliRunner().invoke(app, ["bench", "front", *flags, *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_every_token_of_every_stream_arrives() -> None:
    value = json.loads(front("--streams", "32", "--tokens", "150").stdout)
    assert value["tokens"] == 4800 and value["errors"] == 0
    assert 0 <= value["front_system_s"] <= value["front_cpu_s"] and value["front_cpu_s"] > 0
    assert value["tokens_per_cpu_s"] == value["tokens"] / value["front_cpu_s"]


def test_a_new_request_for_each_that_has_ended() -> None:
    few = ("--streams", "4", "--requests", "40", "--prompt", "50", "--tokens", "2")
    value = json.loads(front(*few).stdout)
    assert (value["streams"], value["requests"], value["tokens"]) == (4, 40, 80)
    assert value["requests_per_cpu_s"] == value["requests"] / value["front_cpu_s"]


def test_chats_are_streamed_too() -> None:
    value = json.loads(front("--streams", "2", "--tokens", "5", "--style", "chat").stdout)
    assert value["tokens"] == 10 and value["errors"] == 0


def test_wrong_styles_are_named() -> None:
    assert "speech" in front("--style", "speech", code=2).output


def test_the_pretended_engine_gives_each_sequence_its_tokens_and_forgets_aborted_ones() -> None:
    process, connection = pretend_spawn(0.001, 2000)()
    with connection, process:

        def send(message: ToEngine) -> None:
            write_frame(connection, msgspec.msgpack.encode(message))

        def read() -> FromEngine:
            return read_message(connection, FromEngine)  # type: ignore[arg-type]

        assert isinstance(read(), Ready)
        send(Submit(2, [1], SamplingParams(max_tokens=10**6)))
        send(Submit(1, [1], SamplingParams(max_tokens=3), n=2))
        found: dict[tuple[int, int], list[str | None]] = {}
        while len([1 for reasons in found.values() if reasons[-1] == "length"]) < 2:
            step = read()
            assert isinstance(step, Step)
            for delta in step.deltas:
                assert 300 <= delta.token_ids[0] < 1999
                key = (delta.request_id, delta.index)
                found.setdefault(key, []).append(delta.finish_reason)
        assert found[1, 0] == found[1, 1] == [None, None, "length"]
        send(Abort(2))
        connection.close()
        assert process.wait(10) == 0


@pytest.mark.parametrize("what", ["front", "selftest"])
def test_an_interrupt_ends_the_processes_without_a_word(what: str) -> None:
    """A terminal sends Ctrl-C to all of a command's processes: they ended in tracebacks."""
    command = [sys.executable, "-m", "multilora_cli", "bench", what, "--tokens", "9999"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=_hear_interrupts,
    ) as process:  # fmt: skip
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while not children.read_text().split():
                assert process.poll() is None
                time.sleep(0.05)
            (child,) = map(int, children.read_text().split())
            time.sleep(2)  # into their work
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert said == ""
    assert not Path(f"/proc/{child}").exists()


def _hear_interrupts() -> None:
    """Whoever runs the tests in the background lets them, and what they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""The start panel: every part planned beside allocated, and a word where they differ."""

import io
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.api import own_url
from multilora_cli.cli.app import app
from multilora_cli.cli.console import Console
from multilora_cli.cli.listing import told_notes
from multilora_cli.cli.serve import StartDisplay, memory_lines, show_ready
from multilora_cli.demo import DEMO_PROMPTS, demo_base_path
from multilora_cli.engine.messages import Progress, Ready


def test_planned_beside_allocated_by_part() -> None:
    """A-PERF-04: a part that is more than 2 % off is said to be; one nobody measured is not."""
    mib = 2**20
    ready = Ready(
        device="cuda:0", dtype="bfloat16", max_model_len=8192, num_pages=100, page_bytes=2 * mib,
        planned={"weights": 100 * mib, "pool": 200 * mib, "workspace": 50 * mib, "lists": 10 * mib,
                 "extras": mib, "margin": 60 * mib},
        allocated={"weights": 101 * mib, "pool": 200 * mib, "lists": 12 * mib, "margin": 5 * mib,
                   "context": mib},
    )  # fmt: skip
    assert memory_lines(ready) == [
        "weights 100 MiB planned, 101 MiB allocated",
        "pool 200 MiB planned, 200 MiB allocated",
        "workspace 50 MiB planned",
        "lists 10 MiB planned, 12 MiB allocated (+20.0%, more than 2 % off)",
        "extras 1 MiB planned, taken when an adapter with DoRA or biases first needs it",
        "margin 60 MiB planned, 5 MiB allocated",
        "context 1 MiB allocated, not planned",
    ]


def test_the_next_step_can_be_typed_as_it_stands() -> None:
    """A server that listens everywhere is reached from here by the loopback address."""
    startup: Any = SimpleNamespace(
        num_adapters=2, failures=(),
        server=SimpleNamespace(base_name="llama", base_path=Path("/models/llama")),
        changes=SimpleNamespace(fleet=SimpleNamespace(patterns=())),
    )  # fmt: skip
    ready = Ready(
        device="cpu", dtype="float32", max_model_len=8192, num_pages=26214, page_bytes=2**21,
        planned={}, allocated={},
    )  # fmt: skip
    for host, here in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("10.0.0.7", "10.0.0.7")):
        stream = io.StringIO()
        show_ready(Console(stdout=stream), startup, ready, f"http://{host}:8000")
        lines = stream.getvalue().splitlines()
        assert f"address: http://{host}:8000/v1" in lines
        assert f"chat: mlora chat --url http://{here}:8000" in lines
        assert not any(line.startswith("try: ") for line in lines)
    assert own_url("::1", 80) == "http://[::1]:80"


def test_the_demo_says_what_to_ask_it() -> None:
    """It answers a greeting with nonsense, which looks like a broken server."""
    startup: Any = SimpleNamespace(
        num_adapters=8, failures=(),
        server=SimpleNamespace(base_name="demo", base_path=demo_base_path()),
        changes=SimpleNamespace(fleet=SimpleNamespace(patterns=())),
    )  # fmt: skip
    ready = Ready(
        device="cpu", dtype="float32", max_model_len=1024, num_pages=26214, page_bytes=2**16,
        planned={}, allocated={},
    )  # fmt: skip
    stream = io.StringIO()
    show_ready(Console(stdout=stream), startup, ready, "http://127.0.0.1:8000")
    (said,) = [line for line in stream.getvalue().splitlines() if line.startswith("try: ")]
    assert DEMO_PROMPTS["law-glossary"] in said
    assert DEMO_PROMPTS["law-glossary"] == DEMO_PROMPTS["shipping-glossary"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return True


def test_a_start_that_ends_early_leaves_no_bar_and_shows_the_cursor_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, or a base that does not fit: the last thing on the terminal was half a bar."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Terminal()
    startup: Any = SimpleNamespace()
    with ExitStack() as bars:
        hooks = StartDisplay(Console(stdout=screen, stderr=screen), startup, bars).hooks()
        hooks.progress(Progress(phase="weights", done=1, total=4))
        assert "\x1b[?25l" in screen.getvalue()
    assert "loading weights" in screen.getvalue()
    hide, show = screen.getvalue().rfind("\x1b[?25l"), screen.getvalue().rfind("\x1b[?25h")
    assert hide < show
    assert screen.getvalue().endswith("\x1b[2K")  # the bar's line is erased


@pytest.mark.parametrize(
    ("server", "status", "said"),
    [
        ("{host: 0.0.0.0}", 2, "server.api_keys names no key"),
        ("{api_keys: [env:NO_SUCH_KEY]}", 2, "NO_SUCH_KEY is not set"),
        ("{host: 192.0.2.7, api_keys: [file:key]}", 2, "cannot listen on 192.0.2.7"),
        ("{port: TAKEN}", 4, "is in use"),
    ],
)
def test_address_and_keys_are_checked_before_a_base_is_fetched(
    server: str, status: int, said: str, tmp_path: Path
) -> None:
    """They were told after the base had been fetched and every adapter's headers read."""
    (tmp_path / "key").write_text("secret")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = server.replace("TAKEN", str(other.getsockname()[1]))
        file = tmp_path / "fleet.yaml"
        file.write_text(f"base: {{model: nobody/never-fetched}}\nserver: {server}\n")
        ran = CliRunner().invoke(app, ["serve", str(file)])
    assert ran.exit_code == status
    assert said in ran.stderr
    assert "never-fetched" not in ran.output and "finding the base" not in ran.output


def test_what_is_to_be_known_of_adapters_is_said_once_for_all() -> None:
    """An adapter for another base was served without a word; only --json told."""
    other = "trained on 'a', served on 'b'"
    assert told_notes([("x", (other,)), ("y", ()), ("z", (other, "odd"))]) == [
        f"x (and 1 more): {other}",
        "z: odd",
    ]
    many = told_notes((f"a{i}", (f"note {i}",)) for i in range(13))
    assert len(many) == 11 and many[-1] == "and 3 more: mlora list --json"

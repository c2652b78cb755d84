"""The command line as a whole: what it imports, its exit codes, its one-line errors."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli import __version__
from multilora_cli.cli.app import app
from multilora_cli.cli.tiers import with_name
from multilora_cli.errors import AdapterError, reason_of

runner = CliRunner()
REPOSITORY = Path(__file__).parents[2]
COMMANDS = (
    "plan",
    "schema",
    "lock",
    "quantize",
    "serve",
    "chat",
    "list",
    "diff",
    "apply",
    "warm",
    "evict",
    "bench",
)


def imported(*arguments: str) -> set[str]:
    """Top-level modules that a command has imported when it ends."""
    code = (
        "import sys\n"
        f"sys.argv = ['mlora', *{list(arguments)!r}]\n"
        "from multilora_cli.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stderr.write('\\n@@' + ' '.join(sorted({n.split('.')[0] for n in sys.modules})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    return set(ran.stderr.rsplit("@@", 1)[1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("serve", "--help")])
def test_help_imports_neither_torch_nor_the_server(arguments: tuple[str, ...]) -> None:
    heavy = {"torch", "triton", "starlette", "uvicorn", "numpy", "transformers", "httpx"}
    assert not imported(*arguments) & heavy


def test_plan_and_schema_import_no_torch() -> None:
    heavy = {"torch", "triton", "starlette", "transformers"}
    assert not imported("plan", "fleet.example.yaml", "--gpu", "h200") & heavy
    assert not imported("schema") & heavy


def test_help_lists_every_command_in_its_group() -> None:
    text = runner.invoke(app, ["--help"]).output
    for word in (*COMMANDS, "Before you start", "Run", "Operate"):
        assert word in text
    for command in COMMANDS:
        result = runner.invoke(app, [command, "--help"])
        assert result.exit_code == 0 and command in result.output


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"mlora {__version__}\n"


def test_schema_is_json() -> None:
    schema = json.loads(runner.invoke(app, ["schema"]).output)
    assert schema["properties"]["base"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "no-such-file.yaml"), "no-such-file.yaml"),
        (("plan", "no-such-file.yaml"), "no-such-file.yaml"),
        (("plan", "fleet.example.yaml", "--gpu", "rtx-4099"), "did you mean rtx-4090"),
        (("plan", "fleet.example.yaml", "--set", "base.quantisation=fp8"), "quantization"),
        (("plan", "fleet.example.yaml", "--assume", "rank=0"), "--assume"),
        (("list", "--url", "localhost:8000"), "http://HOST:PORT"),
        (("verify", "./no-such-adapter", "--base", "org/model"), "./no-such-adapter: no such"),
        (("serve", "tests"), "a folder, expected a fleet file"),
    ],
)
def test_bad_input_is_exit_2_and_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_unknown_flags_and_commands_are_exit_2() -> None:
    """A-OUT-13: nothing is accepted and ignored."""
    for arguments in (["serve", "--ports", "1"], ["plan", "--gpus", "x"], ["sevre"]):
        assert runner.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chat", "--adaptor", "x"), "no such option: --adaptor; did you mean --adapter?"),
        (("plna",), "no such command 'plna'; did you mean 'plan'?"),
        (("warm",), "missing argument 'NAME...'"),
        (("list", "nope"), "got unexpected extra argument(s) (nope)"),
        (("serve", "--port", "99999"), "invalid value for '--port': "),
        (("bench", "--sedd", "1"), "no such option: --sedd; did you mean --seed"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_like_any_other(
    arguments: tuple[str, ...], said: str
) -> None:
    """One line and where to look; Typer draws a box of four lines, in words of its own."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2 and result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith(f"error: {said}")
    words = " ".join(word for word in arguments[:1] if word in COMMANDS)
    assert hint == f"hint: see {' '.join(filter(None, ('mlora', words)))} --help"


@pytest.mark.parametrize("command", [(name,) for name in COMMANDS] + [("bench", "front")])
def test_help_says_what_flags_take_and_commands_as_they_are_typed(command: tuple[str, ...]) -> None:
    """`--json <bool>` reads as if a value were expected; `bench run` is nothing anybody types."""
    text = runner.invoke(app, [*command, "--help"], env={"COLUMNS": "100"}).output
    (usage,) = [line for line in text.splitlines() if "Usage:" in line]
    assert usage.split("Usage: ")[1].startswith(" ".join(("mlora", *command, "[OPTIONS]")))
    assert "{" not in usage and "......" not in usage
    assert "bool" not in text.lower()


def test_an_unreachable_server_is_exit_3() -> None:
    for arguments in (["list"], ["chat", "-a", "x"]):
        result = runner.invoke(app, [*arguments, "--url", "http://127.0.0.1:9"], input="hi\n")
        assert result.exit_code == 3
        assert "mlora serve" in result.stderr


def test_debug_shows_the_traceback() -> None:
    result = runner.invoke(app, ["--debug", "plan", "no-such-file.yaml"])
    assert result.exception is not None and "no-such-file" in str(result.exception)


@pytest.mark.parametrize("command", [(name,) for name in COMMANDS] + [("bench", "front")])
def test_help_is_broken_by_the_terminal_not_by_the_source(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns the source's line ends left half lines in the middle of a sentence."""
    monkeypatch.setenv("COLUMNS", "80")
    text = runner.invoke(app, [*command, "--help"]).output
    prose = text.split("\u256d")[0].splitlines()
    for line, following in itertools.pairwise(prose):
        if line.strip() and following.strip():
            first = following.split()[0]
            assert len(line.rstrip()) + 1 + len(first) > 77, f"{line!r} ends early"


def test_reasons_are_the_systems_words() -> None:
    """`All connection attempts failed`, `ssl:default [Connect call failed ...`: a library's."""
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)")
    outer = OSError("All connection attempts failed")
    outer.__cause__ = refused
    assert reason_of(outer) == reason_of(refused) == "Connection refused"
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(ValueError("odd")) == "odd"


def test_the_name_of_an_adapter_is_said_once() -> None:
    error = AdapterError("adapter acme: chat_template: x: not there, or not a file")
    assert error.about("acme") == "chat_template: x: not there, or not a file"
    assert error.about("acm") == error.message
    assert with_name("a", "found a folder") == "adapter a: found a folder"
    assert with_name("a", "adapter a is pinned hot") == "adapter a is pinned hot"
    assert with_name("a", "The model `a` does not exist.") == "The model `a` does not exist."

"""Plan never says "fits" where serve refuses: the same fleet files through both."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.cli.startup import prepare
from multilora_cli.engine.device_memory import plan_memory
from multilora_cli.errors import MloraError
from multilora_cli.sizing.geometry import read_geometry
from tests.signature import tiny_base

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fleet")
    tiny_base(root / "base")
    return root


def serve_says(fleet: Path) -> str | None:
    """What serving this file is refused with, up to the engine's plan of memory."""
    try:
        startup = prepare(fleet, report=lambda *_: None)
        plan_memory(startup.engine, read_geometry(Path(startup.engine.model_path)))
    except MloraError as error:
        return error.message
    return None


REFUSED = {
    "a key that is not set": ("server: {api_keys: [env:MLORA_NO_SUCH_KEY]}", "MLORA_NO_SUCH_KEY"),
    "an admin key that is not set": ("server: {admin_key: env:MLORA_NO_SUCH_KEY}", "MLORA_NO_SUCH"),
    "a key file that is not there": ("server: {api_keys: [file:nothing]}", "secret not readable"),
    "a public address without a key": ("server: {host: 0.0.0.0}", "reachable from other machines"),
    "awq of a 16-bit checkpoint": ("", "mlora quantize"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_serve_refuses_plan_refuses_with_the_same_words(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    more, words = REFUSED[kind]
    storage = ", quantization: awq" if kind.startswith("awq") else ""
    fleet = folder / "fleet.yaml"
    fleet.write_text(f"base: {{model: ./base, name: tiny{storage}}}\n{more}\n")
    result = runner.invoke(app, ["plan", str(fleet)])
    assert result.exit_code == 2, result.output
    said = serve_says(fleet)
    assert said is not None
    found = f"{result.stderr} {said}" if kind.startswith("awq") else result.stderr
    assert words in found
    shown = result.stderr.splitlines()[0].removeprefix("error: ")
    assert shown.split(": found")[-1] == said.split(": found")[-1]


def test_a_context_beyond_the_model(folder: Path) -> None:
    fleet = folder / "long.yaml"
    fleet.write_text("base: {model: ./base, name: tiny, max_model_len: 1024}\n")
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200"])
    assert result.exit_code == 2 and "trained for 512 positions" in result.stderr


def test_secrets_of_this_machine_are_a_note_for_a_plan_elsewhere(folder: Path) -> None:
    fleet = folder / "keys.yaml"
    fleet.write_text(
        "base: {model: ./base, name: tiny}\nserver: {api_keys: [env:MLORA_NO_SUCH_KEY]}\n"
    )
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200", "--json"])
    assert result.exit_code == 0
    assert "serve would refuse on this machine" in json.loads(result.stdout)["warnings"][0]


def test_more_bytes_than_the_card_has(folder: Path) -> None:
    fleet = folder / "bytes.yaml"
    fleet.write_text("base: {model: ./base, name: tiny}\nmemory: {device_bytes: 40GiB}\n")
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "rtx-4090"])
    assert result.exit_code == 1 and "40 GiB asked for" in result.stderr
    assert runner.invoke(app, ["plan", str(fleet), "--gpu", "h200"]).exit_code == 0

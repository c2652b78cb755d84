"""What the documents say is true: commands exist, files load, tables match the code."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.adapters import peft_config
from multilora_cli.cli.app import app
from multilora_cli.fleet.load import load_fleet

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip


def blocks(language: str) -> list[str]:
    """Fenced blocks of the README in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_two_commands_set_up_a_machine_and_ci_runs_the_second() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if "-m venv" in line]
    assert len(commands) == 2
    assert "pip install -e . &&" in commands[0] and "serve fleet.example.yaml" in commands[0]
    ci = (REPOSITORY / ".ci" / "run").read_text()
    for part in commands[1].split(" && "):
        assert part.split(" ", 1)[0].split("/")[-1] in ci
    assert "pip install" in ci and "-e '.[test]'" in ci and ".venv/bin/pytest" in ci


def test_every_command_in_the_documents_exists() -> None:
    text = README + (REPOSITORY / "docs" / "plan.md").read_text()
    lines = [line for line in text.splitlines() if line.lstrip("| `").startswith("mlora ")]
    used = {match for line in lines for match in re.findall(r"\bmlora ([a-z]+)", line)}
    assert used >= {"plan", "chat", "list"}
    help_text = CliRunner().invoke(app, ["--help"]).output
    for command in used:
        assert re.search(rf"^│ {command} ", help_text, re.MULTILINE), command


def test_the_example_fleets_load(tmp_path: Path) -> None:
    fleet = load_fleet(REPOSITORY / "fleet.example.yaml").fleet
    assert fleet.base.model == "demo:base"
    assert len(list(fleet.named_adapters())) >= 6
    (text,) = blocks("yaml")
    (tmp_path / "fleet.yaml").write_text(text)
    assert load_fleet(tmp_path / "fleet.yaml").fleet.base.served_name == "llama"


def test_adapter_fields_are_documented() -> None:
    text = (REPOSITORY / "docs" / "adapters.md").read_text()
    fields = peft_config._UNDERSTOOD | peft_config._HARMLESS | set(peft_config._REFUSED)
    assert set(re.findall(r"`([a-z_]+)`", text)) >= fields
    for field, why in peft_config._REFUSED.items():
        assert f"| `{field}` | {why} |" in text


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(LLAMA3_8B))
    path = tmp_path / "fleet.yaml"
    path.write_text("base: {model: ./8b, name: llama}\n")
    return path


def test_the_figures_of_the_planning_guide(fleet: Path) -> None:
    def plan(*arguments: str):
        result = CliRunner().invoke(app, ["plan", str(fleet), "--json", *arguments])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    rtx = plan("--gpu", "rtx-4090", "--set", "base.quantization=awq",
               "--assume", "rank=16,targets=all,count=200")  # fmt: skip
    fits = {(row["rank"], row["targets"]): row["fit_hot"] for row in rtx["per_rank"]}
    assert (fits[16, "attention"], fits[16, "all"]) == (435, 141)
    (row,) = [row for row in rtx["bounds"] if row["batch"] == 64]
    assert (round(row["base_ms"], 1), round(row["adapters_ms"], 1)) == (14.3, 20.1)
    assert rtx["break_even"] == 57
    load = {(r["rank"], r["targets"]): r["load_ms"] for r in rtx["per_rank"]}[16, "attention"]
    assert round(load, 2) == 1.09


def test_nothing_names_a_path_of_one_machine() -> None:
    for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        assert not re.search(r"(?<![\w.])/(home|root|Users)/", path.read_text()), path

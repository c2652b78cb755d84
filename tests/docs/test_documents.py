"""What the documents say is true: commands exist, files load, tables match the code."""

import re
from pathlib import Path

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
    pages = [REPOSITORY / "docs" / name for name in ("plan.md", "operating.md")]
    text = README + "".join(page.read_text() for page in pages)
    lines = [line for line in text.splitlines() if line.lstrip("| `").startswith("mlora ")]
    used = {match for line in lines for match in re.findall(r"\bmlora ([a-z]+)", line)}
    assert used >= {"plan", "chat", "list"}
    help_text = CliRunner().invoke(app, ["--help"]).output
    for command in used:
        assert re.search(rf"^│ {command} ", help_text, re.MULTILINE), command


def test_every_module_that_the_architecture_names_exists() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b((?:[a-z_]+/)+[a-z_]+)\b(?!\.)", text))
    packages = {path.name for path in (REPOSITORY / "multilora_cli").iterdir() if path.is_dir()}
    ours = {name for name in named if name.split("/")[0] in packages | {"kernels"}}
    assert len(ours) > 50
    roots = (REPOSITORY / "multilora_cli", REPOSITORY)
    missing = {name for name in ours if not any((r / f"{name}.py").is_file() or (r / name).is_dir()
                                                for r in roots)}  # fmt: skip
    assert not missing
    assert {f"`{package}`" for package in packages - {"demo", "__pycache__"}} <= set(
        re.findall(r"`[a-z]+`", text)
    )


def test_the_tour_loads_a_folder_that_a_clone_has() -> None:
    (path,) = re.findall(r'"lora_path": "([^"]+)"', README)
    assert (REPOSITORY / path / "adapter_config.json").is_file()


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


def test_nothing_names_a_path_of_one_machine() -> None:
    for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        assert not re.search(r"(?<![\w.])/(home|root|Users)/", path.read_text()), path


def test_decision_records_have_a_number_each_and_say_it() -> None:
    records = sorted((REPOSITORY / "docs" / "adr").glob("*.md"))
    numbers = [int(record.name[:4]) for record in records]
    assert numbers == list(range(1, len(records) + 1))
    for number, record in zip(numbers, records, strict=True):
        assert record.read_text().startswith(f"# {number}. ")
    text = "".join(page.read_text() for page in (REPOSITORY / "docs").glob("*.md"))
    assert {int(number) for number in re.findall(r"ADR (\d+)", text)} <= set(numbers)

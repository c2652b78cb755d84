"""`mlora plan`: golden figures, what-ifs, traces, exit codes; no GPU and no weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.cli.console import Console
from multilora_cli.cli.plan_tables import format_step

runner = CliRunner()
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16",
    "rope_theta": 500000.0,
}  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A fleet whose base is nothing but a config.json."""
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(LLAMA3_8B))
    path = tmp_path / "fleet.yaml"
    path.write_text("base: {model: ./8b, name: llama}\n")
    return path


def planned(fleet: Path, *arguments: str, code: int = 0) -> Any:
    result = runner.invoke(app, ["plan", str(fleet), "--json", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("targets", "size", "pages"), [("attention", 27_262_976, 13), ("all", 83_886_080, 40)]
)
def test_golden_adapters(fleet: Path, targets: str, size: int, pages: int) -> None:
    plan = planned(fleet, "--gpu", "h200", "--assume", f"rank=16,targets={targets},count=64")
    assert plan["schema"] == "mlora.plan/1"
    assert plan["fits"] is True
    costs = {(a["cost"]["weight_bytes"], a["cost"]["num_pages"]) for a in plan["adapters"]}
    assert costs == {(size, pages)} and len(plan["adapters"]) == 64
    assert plan["hot_together"] == 64
    assert plan["memory"]["page_bytes"] == 2 * 2**20


def test_adapters_and_kv_share_the_pool(fleet: Path) -> None:
    with_none = planned(fleet, "--gpu", "rtx-4090", "--set", "base.quantization=awq")
    arguments = ("--gpu", "rtx-4090", "--set", "base.quantization=awq")
    with_64 = planned(fleet, *arguments, "--assume", "rank=16,targets=all,count=64")
    assert with_none["kv_tokens"] - with_64["kv_tokens"] == 64 * 40 * 16


def test_a_16_bit_8b_does_not_fit_13_gib_and_says_what_would(fleet: Path) -> None:
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "4090", "--gpu-memory", "13GiB"])
    assert result.exit_code == 1
    assert "does not fit" in result.stderr and "base.quantization=" in result.stderr


def test_one_request_too_long_for_the_pool_is_a_no(fleet: Path) -> None:
    plan = planned(
        fleet, "--gpu", "4090", "--set", "memory.device_bytes=17.4GiB", code=1,
    )  # fmt: skip
    assert plan["fits"] is False and "max_model_len" in plan["problems"][0]


def test_what_if_grid(fleet: Path) -> None:
    rows = planned(
        fleet, "--gpu", "h200", "--set", "base.quantization=awq,fp8,none",
        "--set", "limits.max_num_seqs=32,64",
    )  # fmt: skip
    assert len(rows) == 6
    weights = [row["plan"]["memory"]["weights"] for row in rows]
    assert weights == sorted(weights)
    text = runner.invoke(
        app, ["plan", str(fleet), "--gpu", "h200", "--set", "base.quantization=awq,fp8"]
    ).stdout
    assert text.splitlines()[0].startswith("base.quantization\tfits")


def test_trace(fleet: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"time": i, "adapter": f"assumed-{i % 3}", "input": 5, "output": 5} for i in range(30)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    plan = planned(fleet, "--gpu", "h200", "--assume", "rank=8,count=3", "--trace", str(trace))
    assert plan["trace"]["hot_ratio"] == pytest.approx(0.9)
    assert plan["trace"]["reloads"] == 0


def test_a_trace_is_read_before_anything_is_said(fleet: Path) -> None:
    """And it goes with one plan, not with a table of several, where it was not looked at."""
    missing = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200", "--trace", "none.jsonl"])
    assert missing.exit_code == 2 and missing.stdout == ""
    grid = ["plan", str(fleet), "--gpu", "h200", "--set", "base.quantization=awq,fp8"]
    several = runner.invoke(app, [*grid, "--trace", "none.jsonl"])
    assert several.exit_code == 2 and "--trace" in several.stderr
    other = fleet.with_name("other.jsonl")
    other.write_text('{"time": 0, "adapter": "who", "input": 5, "output": 5}\n')
    unknown = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200", "--trace", str(other)])
    assert unknown.exit_code == 2 and unknown.stdout == "" and "'who'" in unknown.stderr


def test_a_list_in_a_setting_is_one_value(fleet: Path) -> None:
    entry = "adapters=[{name: a, source: 'dummy:rank=8,targets=attention'}]"
    plan = planned(fleet, "--gpu", "h200", "--set", entry)
    assert [(a["name"], a["rank"]) for a in plan["adapters"]] == [("a", 8)]


def test_a_plan_for_a_cpu_is_what_its_engine_takes() -> None:
    """One rule for the pool beside a base, on this machine's memory."""
    from multilora_cli.cli.startup import prepare
    from multilora_cli.engine.device_memory import plan_memory

    example = Path(__file__).parents[2] / "fleet.example.yaml"
    here = ("--set", "memory.device=cpu")
    startup = prepare(example, ("memory.device=cpu", "server.port=0"))
    engine = plan_memory(startup.engine, startup.geometry).plan
    planned_here = planned(example, *here)["memory"]
    assert {part: planned_here[part] for part in engine.parts()} == engine.parts()


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_on_a_terminal(fleet: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of memory is drawn, no cell is folded, and equal adapters are one row."""
    monkeypatch.setattr(Console, "interactive", True)
    monkeypatch.setenv("COLUMNS", str(width))
    card = ["--gpu", "rtx-4090", "--set", "base.quantization=awq"]
    assumed = ["--assume", "rank=16,targets=all,count=200"]
    shown = runner.invoke(app, ["plan", str(fleet), *card, *assumed])
    assert shown.exit_code == 0, shown.output
    for part in ("weights", "pool", "graphs", "lists", "workspace", "unused"):
        (row,) = [line for line in shown.stdout.splitlines() if line.startswith(f"│ {part} ")]
        assert row.count("│") == 5
    assert "assumed-0 and 199 like it" in shown.stdout and "assumed-1 " not in shown.stdout
    keys = ["base.quantization=none,awq", "limits.max_num_seqs=64,256"]
    settings = [text for key in keys for text in ("--set", key)]
    grid = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200", *settings])
    assert len([line for line in grid.stdout.splitlines() if line.startswith("│")]) == 4
    assert "max_num_seqs" in grid.stdout and max(map(len, grid.stdout.splitlines())) <= width


def test_a_small_model_has_times_too() -> None:
    assert [format_step(ms) for ms in (0.0004, 0.012, 5.891, 20.0)] == [
        "0.0004 ms", "0.012 ms", "5.89 ms", "20.00 ms",
    ]  # fmt: skip


def test_the_demo_fleet_plans_its_real_adapters() -> None:
    example = Path(__file__).parents[2] / "fleet.example.yaml"
    plan = planned(example, "--gpu", "rtx-4090")
    assert len(plan["adapters"]) >= 6
    assert all(adapter["cost"]["num_pages"] > 0 for adapter in plan["adapters"])


def test_every_bad_adapter_is_told_in_one_run(fleet: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    fleet.write_text(
        "base: {model: ./8b, name: llama}\n"
        "adapters: [{name: a, source: ./a}, {name: b, source: ./b}]\n"
    )
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200"])
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in lines] == ["adapter a", "adapter b"]


def test_a_bad_adapter_is_told_with_what_to_do(fleet: Path, tmp_path: Path) -> None:
    """`serve` said how a pickle is converted, `plan` only that it is one."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"x")
    fleet.write_text("base: {model: ./8b, name: llama}\nadapters: [{name: a, source: ./a}]\n")
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200"])
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: adapter a: ") and "pickle" in error
    assert hint.startswith("hint: ") and "safetensors" in hint


def test_quiet_is_one_word(fleet: Path) -> None:
    result = runner.invoke(app, ["plan", str(fleet), "--gpu", "h200", "--quiet"])
    assert (result.exit_code, result.stdout) == (0, "fits\n")

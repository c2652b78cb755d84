"""`mlora verify`: verdicts, exit codes and words, on a CPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multilora_cli.layers.linear as linear
from multilora_cli.cli.app import app
from multilora_cli.cli.console import Console
from tests.adapters.adapter_oracle import copy_of, edit_config, edit_tensors
from tests.signature import SEVEN, peft_adapter, tiny_base

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two adapters made by PEFT."""
    root = tmp_path_factory.mktemp("verify")
    base = tiny_base(root / "base")
    peft_adapter(base, root / "attention", r=8, b_scale=2.0)
    peft_adapter(
        base, root / "patterns", r=4, target_modules=list(SEVEN), b_scale=2.0, use_rslora=True,
        rank_pattern={"v_proj": 16}, alpha_pattern={"down_proj": 3},
    )  # fmt: skip
    return root


@pytest.fixture
def fleet(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A fleet file over named adapter folders."""

    def write(adapters: dict[str, Path], more: str = "") -> Path:
        path = tmp_path / "fleet.yaml"
        lines = [f"base: {{model: '{folder / 'base'}', name: tiny}}", "adapters:"]
        lines += [f"  - {{name: {name}, source: '{source}'}}" for name, source in adapters.items()]
        path.write_text("\n".join(lines) + f"\n{more}\n")
        return path

    return write


def verified(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, ["verify", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def by_name(value: Any) -> dict[str, Any]:
    return {adapter["name"]: adapter for adapter in value["adapters"]}


def test_sound_adapters_are_exact(folder: Path, fleet: Callable[..., Path]) -> None:
    path = fleet({name: folder / name for name in ("attention", "patterns")})
    value = verified(path)
    assert value["schema"] == "mlora.verify/1" and value["ok"] is True
    assert value["base"]["digest"].startswith("sha256:") and value["base"]["dtype"] == "float32"
    found = by_name(value)
    for adapter in found.values():
        assert adapter["verdict"] == "exact" and adapter["warnings"] == []
        assert adapter["base"]["match"] in ("unnamed", "same")
        assert adapter["parity"]["largest"] <= adapter["parity"]["tolerance"] == 1e-3
        assert adapter["parity"]["effect"] > 0.1 and adapter["parity"]["top1"] == 1.0
        assert adapter["pages"] * 8192 == adapter["pool_bytes"]
    assert found["attention"]["tensors"] == 8 and found["attention"]["modules"] == 4
    assert found["attention"]["bytes"] == 2 * 8 * (64 + 64 + 64 + 32) * 4


def test_a_table_has_no_columns_of_what_was_not_asked(
    folder: Path, fleet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "interactive", True)
    arguments = ["verify", str(fleet({"a": folder / "attention"})), "--no-parity"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0 and "verdict" in shown.stdout
    assert "off by" not in shown.stdout


def test_scales_are_printed_by_module(folder: Path) -> None:
    """A-CFG-09, A-CFG-10: which rule gave which number, rsLoRA and patterns included."""
    arguments = ("verify", str(folder / "patterns"), "--base", str(folder / "base"), "--no-parity")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "q_proj\t0-1\t4\t4\talpha 8 / sqrt(rank 4)" in lines
    assert "v_proj\t0-1\t16\t2\talpha 8 / sqrt(rank 16)" in lines
    assert "down_proj\t0-1\t4\t1.5\talpha 3 / sqrt(rank 4)" in lines
    assert any(line.startswith("patterns\tchecked") for line in lines)


def test_one_adapter_needs_its_base(folder: Path) -> None:
    result = runner.invoke(app, ["verify", str(folder / "attention")])
    assert result.exit_code == 2 and "--base MODEL" in result.stderr
    value = verified(folder / "attention", "--base", folder / "base")
    assert by_name(value)["attention"]["verdict"] == "exact"
    result = runner.invoke(app, ["verify", str(folder / "attention"), "--base", str(folder)])
    assert result.exit_code == 2 and "config.json" in result.stderr


def idle(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t) if part in n else t for n, t in tensors.items()}


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_an_adapter_that_changes_nothing_is_said(
    folder: Path, fleet: Callable[..., Path], tmp_path: Path, matrix: str
) -> None:
    """A-CFG-06: whichever factor is zero, and whether all modules are or some."""
    all_zero = edit_tensors(
        copy_of(folder / "attention", tmp_path / "z"), lambda t: idle(t, matrix)
    )
    some = edit_tensors(
        copy_of(folder / "attention", tmp_path / "s"), lambda t: idle(t, f"v_proj.{matrix}")
    )
    found = by_name(verified(fleet({"all": all_zero, "some": some}), "--no-parity"))
    assert [found[name]["verdict"] for name in found] == ["warning", "warning"]
    assert "changes nothing" in found["all"]["warnings"][0]
    assert "2 of 4 modules change nothing" in found["some"]["warnings"][0]
    assert found["some"]["idle_modules"] == [
        f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)
    ]


def test_factors_that_cancel_change_nothing(
    folder: Path, fleet: Callable[..., Path], tmp_path: Path
) -> None:
    """Neither factor is zero, their product is: no zero of A meets a number of B."""

    def halves(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if "lora_A" in name:
                tensor[4:] = 0
            else:
                tensor[:, :4] = 0
        return tensors

    source = edit_tensors(copy_of(folder / "attention", tmp_path / "h"), halves)
    (adapter,) = verified(fleet({"halves": source}), "--no-parity")["adapters"]
    assert "changes nothing" in adapter["warnings"][0]


def test_another_base_is_explained(
    folder: Path, fleet: Callable[..., Path], tmp_path: Path
) -> None:
    """A-CFG-20: shapes decide; a name that differs is a warning."""
    other = edit_config(
        copy_of(folder / "attention", tmp_path / "o"), base_model_name_or_path="org/other-7b"
    )
    (adapter,) = verified(fleet({"o": other}))["adapters"]
    assert adapter["verdict"] == "warning" and adapter["base"]["match"] == "other"
    assert "org/other-7b" in adapter["warnings"][0]


def test_a_fault_of_the_server_is_refused(
    folder: Path, fleet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "add_lora", lambda *_: None)
    value = verified(fleet({"attention": folder / "attention"}), code=1)
    assert value["ok"] is False
    (adapter,) = value["adapters"]
    assert adapter["verdict"] == "refused" and "differ from the reference" in adapter["reason"]


def test_prompts_of_a_file(folder: Path, fleet: Callable[..., Path], tmp_path: Path) -> None:
    path = fleet({"attention": folder / "attention"})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\nhello there\n")
    (adapter,) = verified(path, "--prompts", prompts)["adapters"]
    assert adapter["parity"]["positions"] == 2 + 10
    for content in (b"", b"\xff\xfe", b"x\n" * 257):
        prompts.write_bytes(content)
        result = runner.invoke(app, ["verify", str(path), "--prompts", str(prompts)])
        assert result.exit_code == 2 and str(prompts) in result.stderr


def test_a_base_without_tokenizer_is_compared_on_token_ids(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "bare"
    shutil.copytree(folder / "base", base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    value = verified(folder / "attention", "--base", base)
    assert by_name(value)["attention"]["parity"]["positions"] == 45


def test_drift(folder: Path, fleet: Callable[..., Path]) -> None:
    path = fleet({"attention": folder / "attention"}, "verify: {max_drift: 10}")
    fp8 = ("--drift", "--set", "base.quantization=fp8")
    value = verified(path, *fp8)
    (adapter,) = value["adapters"]
    assert adapter["verdict"] == "checked" and value["max_drift"] == 10
    assert 0 < adapter["drift"]["mean_kl"] < 0.1 and 0.5 < adapter["drift"]["top1"] <= 1
    assert 0 < value["base"]["drift"]["mean_kl"] < 0.1
    value = verified(path, *fp8, "--set", "verify.max_drift=1e-9", code=1)
    assert "max_drift" in value["adapters"][0]["reason"]
    result = runner.invoke(app, ["verify", str(path), "--drift"])
    assert result.exit_code == 2 and "nothing can drift" in result.stderr
    table = runner.invoke(app, ["verify", str(path), *fp8]).stdout
    assert "adapter\tsame likeliest token\tmean KL (nats)\tpositions" in table
    value = verified(path, "--drift", "--against", folder / "base")
    assert value["adapters"][0]["drift"]["mean_kl"] < 1e-6


def test_drift_of_an_fp8_kv_cache(folder: Path, fleet: Callable[..., Path]) -> None:
    path = fleet({"attention": folder / "attention"}, "verify: {max_drift: 10}")
    value = verified(path, "--drift", "--set", "base.kv_cache_dtype=fp8")
    assert 1e-6 < value["adapters"][0]["drift"]["mean_kl"] < 0.1
    parity = verified(path, "--set", "base.kv_cache_dtype=fp8")["adapters"][0]["parity"]
    assert parity["tolerance"] >= 2e-2


def test_drift_against_another_model_is_refused(
    folder: Path, fleet: Callable[..., Path], tmp_path: Path
) -> None:
    other = tiny_base(tmp_path / "other", num_hidden_layers=3)
    path = fleet({"attention": folder / "attention"})
    result = runner.invoke(app, ["verify", str(path), "--drift", "--against", str(other)])
    assert result.exit_code == 2 and "num_layers: found 3" in result.stderr


def test_only_some_of_a_fleet(folder: Path, fleet: Callable[..., Path]) -> None:
    path = fleet({name: folder / name for name in ("attention", "patterns")})
    assert list(by_name(verified(path, "--only", "patterns", "--no-parity"))) == ["patterns"]
    result = runner.invoke(app, ["verify", str(path), "--only", "pattern"])
    assert result.exit_code == 2 and "did you mean patterns?" in result.stderr


def test_patterns_are_said_not_to_be_verified(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"base: {{model: '{folder / 'base'}', name: tiny}}\n"
        "adapters: [{pattern: 'tenants/{name}', source: './{name}'}]\n"
    )
    value = verified(path)
    assert value["ok"] and value["adapters"] == []
    assert value["notes"][0].startswith("pattern tenants/{name}: ")


def test_quiet_is_one_line_an_adapter(folder: Path, fleet: Callable[..., Path]) -> None:
    path = fleet({"attention": folder / "attention"})
    result = runner.invoke(app, ["verify", str(path), "--no-parity", "--quiet"])
    assert (result.exit_code, result.stdout) == (0, "attention checked\n")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_every_kind_of_adapter_is_examined(tmp_path: Path) -> None:
    """A-CFG-13, A-CFG-14: heads and embeddings as factors and as whole matrices, tied bases too."""
    kinds: dict[str, dict[str, Any]] = {
        "head": {"target_modules": ["lm_head"], "r": 4},
        "embedding": {"target_modules": ["embed_tokens"], "r": 4},
        "saved": {"modules_to_save": ["lm_head"]},
        "dora": {"use_dora": True},
        "bias": {"bias": "all"},
    }
    for tied in (False, True):
        root = tmp_path / str(tied)
        base = tiny_base(root / "base", attention_bias=True, tie_word_embeddings=tied)
        lines = [f"base: {{model: '{base}', name: tiny}}", "adapters:"]
        for name, how in kinds.items():
            if tied and name != "head":
                continue
            source = peft_adapter(base, root / name, b_scale=2.0, **how)
            lines.append(f"  - {{name: {name}, source: '{source}'}}")
        fleet = root / "fleet.yaml"
        fleet.write_text("\n".join(lines) + "\n")
        for name, adapter in by_name(verified(fleet)).items():
            assert adapter["verdict"] == "exact", (tied, name, adapter["reason"])
            assert adapter["bytes"] > 0 and adapter["idle_modules"] == [], name

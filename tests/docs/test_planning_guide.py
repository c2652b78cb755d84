"""Every figure of docs/plan.md is what the command beside it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app

GUIDE = " ".join((Path(__file__).parents[2] / "docs" / "plan.md").read_text().split())
SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 128256, 8192),
    "70b": (80, 8192, 28672, 64, 8, 128256, 8192),
    "7b": (32, 4096, 11008, 32, 32, 32000, 4096),
}
FIELDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "vocab_size", "max_position_embeddings")  # fmt: skip
Plan = Callable[..., Any]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """`mlora plan NAME.yaml ...` as JSON, for bases that are a config.json alone."""
    folder = tmp_path_factory.mktemp("bases")
    for name, shape in SHAPES.items():
        (folder / name).mkdir()
        config = dict(zip(FIELDS, shape, strict=True))
        config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / f"{name}.yaml").write_text(f"base: {{model: ./{name}, name: llama}}\n")

    def run(name: str, *arguments: str) -> Any:
        fleet = str(folder / f"{name}.yaml")
        result = CliRunner().invoke(app, ["plan", fleet, "--json", *arguments])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def says(*texts: str) -> None:
    """The guide has these words; a failure shows what it should say."""
    for text in texts:
        assert text in GUIDE, f"docs/plan.md should say: {text}"


def adapter(plan: Plan, base: str, targets: str, *more: str) -> Any:
    """The cost of one adapter of rank 16."""
    found = plan(base, *more, "--assume", f"rank=16,targets={targets}")
    return found["adapters"][0]["cost"]


def fit(found: Any, column: str, rank: int, targets: str) -> Any:
    """A cell of the table by rank."""
    (row,) = [r for r in found["per_rank"] if (r["rank"], r["targets"]) == (rank, targets)]
    return row[column]


B200 = ("--gpu", "b200", "--gpu-memory", "300GiB")


def test_adapters_of_an_8b(plan: Plan) -> None:
    attention, every = (adapter(plan, "8b", t, "--gpu", "h200") for t in ("attention", "all"))
    ratio = every["weight_bytes"] / attention["weight_bytes"]
    says(
        f"{attention['weight_bytes']:,} bytes (26 MiB), {attention['num_pages']} pages",
        f"{every['weight_bytes']:,} bytes (80 MiB), {every['num_pages']} pages: {ratio:.2f} times",
    )
    two = adapter(plan, "8b", "q_proj+v_proj", "--gpu", "h200")["weight_bytes"]
    says(f"{attention['weight_bytes'] / 1e6:.1f} MB; even q and v alone are {two / 1e6:.1f} MB")


def test_an_rtx_4090_with_a_4_bit_8b(plan: Plan) -> None:
    awq = ("--gpu", "rtx-4090", "--set", "base.quantization=awq")
    found = plan("8b", *awq, "--assume", "rank=16,targets=all,count=200")
    attention, every = (fit(found, "fit_hot", 16, targets) for targets in ("attention", "all"))
    (row,) = [row for row in found["bounds"] if row["batch"] == 64]
    says(
        f"{attention} of attention rank 16, or {every} of all-linear",
        f"{row['base_ms']:.1f} ms without adapters, {row['adapters_ms']:.1f} ms with 64 distinct",
        f"{found['break_even']} (all-linear, rank 16)",
        f"{fit(found, 'load_ms', 16, 'attention'):.2f} ms (26 MiB over PCIe 4)",
    )


def test_the_mlp_and_other_bases(plan: Plan) -> None:
    ratios, sizes = {}, {}
    for base in SHAPES:
        costs = [adapter(plan, base, t, *B200)["weight_bytes"] for t in ("attention", "all")]
        sizes[base], ratios[base] = costs, costs[1] / costs[0]
    says(
        f"{ratios['8b']:.2f} times on Llama-3-8B, {ratios['7b']:.2f} on Llama-2-7B,"
        f" {ratios['70b']:.2f} on Llama-3-70B",
        f"{sizes['70b'][0] / 1e6:.0f} MB on attention, {sizes['70b'][1] / 1e6:.0f} MB on all seven",
        f"{sizes['70b'][0]:,} and {sizes['70b'][1]:,} bytes",
    )
    lora = 2 * 16 * (128256 + 4096) * 2
    says(f"{lora / 1e6:.1f} MB more at rank 16", f"{2 * 128256 * 4096 * 2 / 1e9:.1f} GB")


def test_host_memory_and_the_bus(plan: Plan) -> None:
    eight = plan("8b", "--gpu", "h200", "--set", "memory.host_adapters=8GB")
    fp8 = ("--gpu", "b200", "--set", "base.quantization=fp8")
    large = plan("70b", *fp8, "--set", "memory.host_adapters=8GB")
    says(
        f"{fit(eight, 'fit_warm', 16, 'attention')} for attention rank 16 on an 8B,"
        f" {fit(eight, 'fit_warm', 16, 'all')} all-linear,"
        f" {fit(large, 'fit_warm', 16, 'all')} for a 70B all-linear"
    )
    bus = plan("7b", "--gpu", "a100")
    says(f"{fit(bus, 'load_ms', 16, 'attention'):.2f} ms at the 25 GB/s that copies reach")
    half_tb = plan("70b", *fp8, "--set", "memory.host_adapters=512GiB")
    seven = adapter(plan, "7b", "attention", *B200)
    share = seven["parameters"] / 6_738_415_616
    padding = fit(eight, "cost", 64, "all")["weight_bytes"]
    padding /= fit(eight, "cost", 8, "all")["weight_bytes"]
    says(
        f"{seven['parameters']:,} parameters ({share:.3%})".replace("%", " %"),
        f"{seven['weight_bytes'] / 1e6:.1f} MB",
        f"{padding:.1f}; {fit(half_tb, 'fit_warm', 16, 'all'):,}",
    )


def test_quantised_bases(plan: Plan) -> None:
    size = {
        (base, method): plan(base, *B200, "--set", f"base.quantization={method}")["memory"]
        for base in ("8b", "70b")
        for method in ("fp8", "awq")
    }
    gb = {key: memory["weights"] / 1e9 for key, memory in size.items()}
    says(
        f"{gb['8b', 'fp8']:.2f} and {gb['8b', 'awq']:.2f} GB, {gb['70b', 'fp8']:.1f} and"
        f" {gb['70b', 'awq']:.1f} GB, padding included"
    )


def test_a_70b_on_80_gb_and_the_price_of_rank(plan: Plan) -> None:
    found = plan(
        "70b", "--gpu", "h100", "--set", "base.quantization=fp8", "--set",
        "base.max_model_len=4096", "--set", "limits.max_num_seqs=32", "--set",
        "limits.max_num_batched_tokens=2048", "--assume", "rank=16,targets=all,count=25",
    )  # fmt: skip
    says(
        f"{found['hot_together']} of rank 16 on all seven projections at once, and then"
        f" {found['kv_tokens']:,} tokens of KV are left"
    )
    steps = {}
    for rank in (8, 64):
        awq = ("--gpu", "h200", "--set", "base.quantization=awq")
        bounds = plan("8b", *awq, "--assume", f"rank={rank},targets=all,count=64")["bounds"]
        (steps[rank],) = [row["adapters_ms"] for row in bounds if row["batch"] == 64]
    says(f"{steps[8]:.1f} ms a step at rank 8 and {steps[64]:.1f} ms at rank 64 at least")

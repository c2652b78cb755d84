"""KV in FP8 as it is planned: figures for Llama-3-8B, smaller pages for adapters of BF16."""

from pathlib import Path

import pytest

from multilora_cli.fleet.load import load_fleet
from multilora_cli.fleet.schema import Fleet
from multilora_cli.sizing import report
from multilora_cli.sizing.bound import decode_bound
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.efficiency import Measured
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.hardware import find_gpu
from multilora_cli.sizing.pages import TARGETS, adapter_cost, kv_page_bytes, uniform_ranks
from multilora_cli.sizing.quantization import AWQ
from multilora_cli.sizing.report import PlanRequest, plan_fleet
from tests.sizing.test_budget import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B


@pytest.mark.parametrize(
    ("geometry", "page"), [(LLAMA3_8B, 2**20), (LLAMA3_70B, 2_621_440), (LLAMA2_7B, 2**22)]
)
def test_pages_are_half_as_large(geometry: ModelGeometry, page: int) -> None:
    assert kv_page_bytes(geometry, 1) == page == kv_page_bytes(geometry, 2) // 2


@pytest.mark.parametrize(
    ("geometry", "targets", "rank", "pages"),
    [
        (LLAMA3_8B, "attention", 16, 26),
        (LLAMA3_8B, "all", 16, 80),
        (LLAMA3_8B, "all", 64, 320),
        (LLAMA3_8B, "attention", 8, 13),
        (LLAMA3_70B, "attention", 16, 50),
        (LLAMA2_7B, "attention", 16, 8),
    ],
)
def test_adapters_keep_their_bytes(
    geometry: ModelGeometry, targets: str, rank: int, pages: int
) -> None:
    """Twice as many pages of half the size: blocks are cut smaller and pack as well."""
    ranks = uniform_ranks(geometry, rank, TARGETS[targets])
    cost = adapter_cost(geometry, ranks, kv_page_bytes(geometry, 1), 2)
    assert cost.num_pages in (pages, pages + 1) and cost.waste <= 0.03
    wide = adapter_cost(geometry, ranks, kv_page_bytes(geometry, 2), 2)
    assert cost.weight_bytes == wide.weight_bytes
    assert cost.pool_bytes <= wide.pool_bytes


def test_the_bound_of_a_decode_step() -> None:
    """Llama-3-8B in 4 bits, 64 rows of 1,024 tokens on an H200: 3.09 ms become 2.09."""
    base, gpu = base_bytes(LLAMA3_8B, 2, AWQ), find_gpu("h200")
    for itemsize, milliseconds in ((2, 3.09), (1, 2.09)):
        kv = LLAMA3_8B.kv_bytes_per_token(itemsize)
        found = decode_bound(base, kv, [1024] * 64, [], gpu).seconds
        assert found * 1e3 == pytest.approx(milliseconds, abs=0.05)


def test_a_plan_holds_twice_the_tokens(tmp_path: Path) -> None:
    """Of the same pool, to within its tables, which count blocks of smaller pages."""
    path = tmp_path / "fleet.yaml"
    path.write_text("base: {model: ./llama}\nadapters: []\n")
    plans = {}
    for kv in ("auto", "fp8"):
        fleet = load_fleet(path).fleet
        base = fleet.base.model_copy(update={"kv_cache_dtype": kv})
        request = PlanRequest(
            fleet.model_copy(update={"base": base}), LLAMA3_8B, AWQ, 2, 24 * 2**30,
            find_gpu("rtx-4090"),
        )  # fmt: skip
        plans[kv] = plan_fleet(request)
    tokens = {kv: plan.kv_tokens for kv, plan in plans.items()}
    assert 1.98 < tokens["fp8"] / tokens["auto"] <= 2.0
    assert plans["fp8"].memory.page_bytes == 2**20
    assert plans["fp8"].bounds[-1].base_ms < plans["auto"].bounds[-1].base_ms


def test_nothing_is_expected_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of the bound are those of a KV cache in the compute dtype."""
    cell = Measured("NVIDIA H200", 90, "awq", 64, False, 3.0, 0.5, "0123456789abcdef")
    monkeypatch.setattr(report, "measured", lambda: (cell,))
    told = {}
    for kv in ("auto", "fp8"):
        fleet = Fleet.model_validate({"base": {"model": "./llama", "kv_cache_dtype": kv}})
        request = PlanRequest(fleet, LLAMA3_8B, AWQ, 2, 80 * 2**30, find_gpu("h200"))
        told[kv] = {row.batch: row for row in plan_fleet(request).bounds}
    assert told["auto"][64].expected_tokens_s == pytest.approx(told["auto"][64].tokens_s / 2)
    assert {row.expected_tokens_s for row in told["fp8"].values()} == {None}
    assert {row.expected_from for row in told["fp8"].values()} == {"no data with KV in FP8"}

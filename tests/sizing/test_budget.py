"""Exact bytes: figures computed from published geometries."""

import pytest

from multilora_cli.errors import BadInput, Refused
from multilora_cli.sizing.budget import (
    BASE_KIND,
    MAX_CHUNKS,
    NODE_BYTES,
    CapturedSteps,
    base_bytes,
    cpu_workspace_bytes,
    driver_graph_bytes,
    fixed_graph_bytes,
    graph_rows,
    plan_pool,
    prompt_steps,
    step_kind,
    step_kinds,
    table_bytes,
)
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config
from multilora_cli.sizing.pages import (
    TARGETS,
    adapter_cost,
    kv_page_bytes,
    pages_for_tokens,
    uniform_ranks,
)
from multilora_kernels.layout import GROUPS, Extras


def llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int):
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": 8192, "dtype": "bfloat16",
    }  # fmt: skip
    return geometry_from_config(config, "config.json")


LLAMA3_8B = llama(32, 4096, 14336, 32, 8, 128256)
LLAMA3_70B = llama(80, 8192, 28672, 64, 8, 128256)
LLAMA2_7B = llama(32, 4096, 11008, 32, 32, 32000)
LLAMA2_13B = llama(40, 5120, 13824, 40, 40, 32000)


@pytest.mark.parametrize(
    ("geometry", "linears", "total"),
    [
        (LLAMA3_8B, 6_979_321_856, 8_030_261_248),
        (LLAMA3_70B, 68_451_041_280, 70_553_706_496),
        (LLAMA2_7B, 6_476_005_376, 6_738_415_616),
        (LLAMA2_13B, 12_687_769_600, 13_015_864_320),
    ],
)
def test_parameters_of_published_models(geometry: ModelGeometry, linears: int, total: int) -> None:
    size = base_bytes(geometry, itemsize=1)
    assert (size.linears, size.total) == (linears, total)
    assert base_bytes(geometry, itemsize=2).total == 2 * total


@pytest.mark.parametrize(
    ("geometry", "per_token"),
    [(LLAMA3_8B, 131_072), (LLAMA3_70B, 327_680), (LLAMA2_7B, 524_288), (LLAMA2_13B, 819_200)],
)
def test_kv_bytes(geometry: ModelGeometry, per_token: int) -> None:
    assert geometry.kv_bytes_per_token(2) == per_token
    assert kv_page_bytes(geometry, 2) == 16 * per_token


@pytest.mark.parametrize(
    ("geometry", "targets", "rank", "expected", "pages"),
    [
        (LLAMA3_8B, "attention", 16, 27_262_976, 13),
        (LLAMA3_8B, "all", 16, 83_886_080, 40),
        (LLAMA3_8B, "all", 64, 335_544_320, 160),
        (LLAMA3_70B, "attention", 16, 131_072_000, 25),
        (LLAMA3_70B, "all", 16, 414_187_520, 79),
        (LLAMA2_7B, "attention", 16, 33_554_432, 4),
    ],
)
def test_adapter_bytes_and_pages(
    geometry: ModelGeometry, targets: str, rank: int, expected: int, pages: int
) -> None:
    cost = adapter_cost(
        geometry, uniform_ranks(geometry, rank, TARGETS[targets]), kv_page_bytes(geometry, 2), 2
    )
    assert cost.weight_bytes == expected
    assert cost.num_pages in (pages, pages + 1)  # one page more where blocks do not fill the last
    assert cost.waste <= 0.03
    if geometry is LLAMA3_8B:
        assert cost.num_pages == pages  # Llama-3-8B divides exactly: nothing is wasted


def test_half_the_layers_cost_half() -> None:
    """A-CFG-27: layers without the adapter cost nothing."""
    page = kv_page_bytes(LLAMA3_8B, 2)
    ranks = uniform_ranks(LLAMA3_8B, 16, TARGETS["all"])
    half = {key: rank for key, rank in ranks.items() if key[0] < 16}
    assert adapter_cost(LLAMA3_8B, half, page, 2).num_pages == 20


def test_one_large_rank_costs_only_itself() -> None:
    """A-PERF-03: a fleet of rank 8 with one of rank 64 is not padded to 64."""
    page = kv_page_bytes(LLAMA3_8B, 2)

    def pages(rank: int) -> int:
        ranks = uniform_ranks(LLAMA3_8B, rank, TARGETS["all"])
        return adapter_cost(LLAMA3_8B, ranks, page, 2).num_pages

    assert pages(8) == 20 and pages(64) == 160
    assert 99 * pages(8) + pages(64) == 2140


def test_unknown_module_is_refused() -> None:
    with pytest.raises(BadInput, match="gate_up_proj"):
        uniform_ranks(LLAMA3_8B, 8, ["gate_up_proj"])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (8192, 512)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert pages_for_tokens(tokens) == pages


def test_pool_is_what_the_rest_leaves() -> None:
    weights = base_bytes(LLAMA3_8B, 2).total
    workspace = cpu_workspace_bytes(LLAMA3_8B, 2, 8192, 256, 512)
    tables = table_bytes(LLAMA3_8B, 65, 64 * 448)
    parts = {"weights": weights, "workspace": workspace, "tables": tables}
    plan = plan_pool(LLAMA3_8B, 80 * 2**30, 2, parts)
    assert plan.page_bytes == 2 * 2**20
    assert plan.num_pages == plan.pool // plan.page_bytes
    spare = 80 * 2**30 - sum(plan.parts().values())
    assert 0 <= spare < plan.page_bytes


def test_a_base_that_does_not_fit_says_by_how_much() -> None:
    """A-PERF-04: both numbers are named."""
    weights = base_bytes(LLAMA3_8B, 2).total
    with pytest.raises(Refused, match=r"15 GiB needed.*14 GiB available"):
        plan_pool(LLAMA3_8B, 14 * 2**30, 2, {"weights": weights, "workspace": 0, "tables": 0})


@pytest.mark.parametrize(
    ("max_seqs", "last", "count"),
    [(1, 1, 1), (5, 8, 4), (64, 64, 9), (256, 256, 13), (4096, 512, 15)],
)
def test_captured_steps_cover_what_may_run(max_seqs: int, last: int, count: int) -> None:
    rows = graph_rows(max_seqs)
    assert rows[-1] == last and len(rows) == count and list(rows) == sorted(set(rows))


def test_a_step_runs_as_the_kind_with_the_fewest_launches_that_has_its_groups() -> None:
    _, attention, everything = kinds = step_kinds(64)
    for groups in ((), ("qkv",), ("o", "qkv")):
        assert step_kind(kinds, groups) == attention
    for groups in (("gate_up",), ("qkv", "down"), tuple(GROUPS)):
        assert step_kind(kinds, groups) == everything


def test_graphs_cost_by_their_number_and_hold_tensors_for_the_largest() -> None:
    def steps(*rows: int, max_rank: int = 64, prompts: bool = False) -> CapturedSteps:
        captured = prompt_steps(max(rows)) if prompts else ()
        return CapturedSteps(rows, captured, step_kinds(max_rank))

    kinds = [step_kinds(rank) for rank in (1, 16, 17, 512)]
    assert [kind.rank for found in kinds for kind in found[1:]] == [16] * 4 + [64] * 4
    assert {found[0] for found in kinds} == {BASE_KIND}
    one, two = (driver_graph_bytes(32, steps(*rows)) for rows in ((64,), (32, 64)))
    assert two == 2 * one
    # By their nodes, as an H200 counted them: 343 to 375 without adapters, 599 to 631 with them on
    # all projections.
    assert one == pytest.approx((347 + 475 + 603) * NODE_BYTES["library"], rel=0.01)
    extras = driver_graph_bytes(32, steps(64), extras=True)
    assert extras == (475 + 603 + 2 * 4 * 32) * NODE_BYTES["library"]
    fixed = fixed_graph_bytes(LLAMA3_8B, steps(32, 64), 8192)
    assert fixed == 64 * (2 * 512 + LLAMA3_8B.vocab_size) * 4
    with_prompts = fixed_graph_bytes(LLAMA3_8B, steps(32, 64, prompts=True), 8192)
    assert with_prompts == fixed * (64 + 64 + MAX_CHUNKS) // 64
    assert steps(32, 64).in_order() == [(64, 64)] * 3 + [(32, 32)] * 3
    nothing = CapturedSteps((), (), (BASE_KIND,))
    assert driver_graph_bytes(32, nothing) == fixed_graph_bytes(LLAMA3_8B, nothing, 8192) == 0


def test_whole_matrices_vectors_and_factors_of_the_edges_are_counted() -> None:
    """A saved head of Llama-3-8B: 1,050,673,152 bytes; DoRA: float32 vectors."""
    page = kv_page_bytes(LLAMA3_8B, 2)
    ranks = uniform_ranks(LLAMA3_8B, 16, TARGETS["attention"])
    plain = adapter_cost(LLAMA3_8B, ranks, page, 2)
    saved = Extras(matrices=frozenset({("lm_head.weight", 128256, 4096)}))
    head = adapter_cost(LLAMA3_8B, ranks, page, 2, saved)
    assert head.weight_bytes - plain.weight_bytes == 128256 * 4096 * 2
    assert head.num_pages - plain.num_pages == 501 and head.step_bytes == head.weight_bytes
    looked_up = Extras(matrices=frozenset({("embed_tokens.weight", 128256, 4096)}))
    embedding = adapter_cost(LLAMA3_8B, ranks, page, 2, looked_up)
    assert embedding.step_bytes == plain.step_bytes == plain.weight_bytes
    scales = Extras(frozenset((layer, name, "scale") for layer, name in ranks))
    dora = adapter_cost(LLAMA3_8B, ranks, page, 2, scales)
    assert dora.weight_bytes - plain.weight_bytes == 32 * (4096 + 1024 + 1024 + 4096) * 4
    assert dora.num_pages - plain.num_pages == 1

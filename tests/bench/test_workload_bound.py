"""Bounds of whole loads against the table computed for Punica's text generation."""

import pytest

from multilora_cli.bench.bound import Costs, distinct_bytes, workload_bound
from multilora_cli.bench.workload import BenchRequest, punica_trace
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import geometry_from_config
from multilora_cli.sizing.hardware import find_gpu
from multilora_cli.sizing.pages import TARGETS, adapter_cost, kv_page_bytes, uniform_ranks

LLAMA3_8B = geometry_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    },
    "config.json",
)  # fmt: skip


def costs() -> Costs:
    ranks = uniform_ranks(LLAMA3_8B, 16, TARGETS["all"])
    cost = adapter_cost(LLAMA3_8B, ranks, kv_page_bytes(LLAMA3_8B, 2), 2)
    return Costs(
        gpu=find_gpu("h200"),
        geometry=LLAMA3_8B,
        base=base_bytes(LLAMA3_8B, 2),
        kv_itemsize=2,
        max_num_seqs=256,
        adapter_bytes=dict.fromkeys(range(1024), cost.weight_bytes),
    )


@pytest.mark.parametrize(
    ("popularity", "tokens_per_s"),
    [("distinct", 6692), ("uniform", 7017), ("skewed", 7407), ("identical", 7660)],
)
def test_punicas_set_on_an_h200(popularity: str, tokens_per_s: float) -> None:
    """The published column is decode alone; prefill of these prompts is 1 % of it."""
    trace = punica_trace(popularity)
    bound = workload_bound(trace, 32, costs())
    tokens = sum(request.output_tokens for request in trace)
    assert tokens / bound.decode_s == pytest.approx(tokens_per_s, rel=0.02)
    assert bound.batch == 32 and 0 < bound.prefill_s < 0.02 * bound.decode_s
    assert bound.output_tokens_per_s == pytest.approx(tokens / bound.seconds)


def test_distinct_adapters_of_a_draw_without_replacement() -> None:
    every = [BenchRequest(index, 1, 1) for index in range(64)]
    assert distinct_bytes(every, 32, dict.fromkeys(range(64), 10)) == pytest.approx(320)
    one = [BenchRequest(0, 1, 1)] * 64
    assert distinct_bytes(one, 32, {0: 10}) == pytest.approx(10)
    base = [BenchRequest(None, 1, 1)] * 64
    assert distinct_bytes(base, 32, {0: 10}) == 0
    pairs = [BenchRequest(index // 2, 1, 1) for index in range(4)]
    assert distinct_bytes(pairs, 2, {0: 6, 1: 6}) == pytest.approx(6 * 2 * (1 - 2 / 4 * 1 / 3))


def test_the_batch_is_what_is_at_once_and_what_the_engine_takes() -> None:
    load = [BenchRequest(None, 8, 8)] * 400
    assert workload_bound(load, None, costs()).batch == 256
    assert workload_bound(load, 16, costs()).batch == 16
    assert workload_bound(load[:4], 16, costs()).batch == 4

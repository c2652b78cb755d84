"""How little of an adapter's pages is empty, on the geometries that people serve."""

from typing import Any

import pytest
import torch

from multilora_cli.demo import demo_base_path
from multilora_cli.sizing.budget import max_blocks
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config, read_geometry
from multilora_cli.sizing.pages import TARGETS, adapter_cost, kv_page_bytes, uniform_ranks
from multilora_kernels.layout import Extras, plan_image
from multilora_kernels.table import AdapterTable


def geometry(
    architecture: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int,
    **more: Any,
) -> ModelGeometry:  # fmt: skip
    config = {
        "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": 8192, "dtype": "bfloat16", **more,
    }  # fmt: skip
    return geometry_from_config(config, "config.json")


LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"
GEOMETRIES = {
    "Llama-3-8B": geometry(LLAMA, 32, 4096, 14336, 32, 8, 128256),
    "Llama-3-70B": geometry(LLAMA, 80, 8192, 28672, 64, 8, 128256),
    "Llama-2-7B": geometry(LLAMA, 32, 4096, 11008, 32, 32, 32000),
    "Llama-2-13B": geometry(LLAMA, 40, 5120, 13824, 40, 40, 32000),
    "Mistral-7B": geometry("MistralForCausalLM", 32, 4096, 14336, 32, 8, 32000),
    "Qwen2.5-7B": geometry(QWEN2, 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-0.5B": geometry(QWEN2, 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen3-8B": geometry("Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "SmolLM2-135M": geometry(LLAMA, 30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "demo": read_geometry(demo_base_path()),
}


def waste(model: ModelGeometry, rank: int, targets: str, kv_itemsize: int) -> tuple[float, int]:
    """Share of the pages that holds nothing, and how many pages there are."""
    page = kv_page_bytes(model, kv_itemsize)
    cost = adapter_cost(model, uniform_ranks(model, rank, TARGETS[targets]), page, 2)
    return cost.waste, cost.num_pages


@pytest.mark.parametrize("kv_itemsize", [2, 1], ids=["BF16 KV", "FP8 KV"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_at_most_three_percent_beside_the_last_page(
    name: str, targets: str, kv_itemsize: int
) -> None:
    """Whole pages are handed out, so a small adapter cannot help leaving part of its last one."""
    for rank in (16, 32, 64, 128):
        share, pages = waste(GEOMETRIES[name], rank, targets, kv_itemsize)
        assert share <= max(0.03, 1 / pages), (name, rank, share, pages)


@pytest.mark.parametrize("kv_itemsize", [2, 1], ids=["BF16 KV", "FP8 KV"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_table_holds_what_the_pages_hold(name: str, targets: str, kv_itemsize: int) -> None:
    """A pool full of adapters of the lowest ranks, with DoRA, meets no full table first."""
    model = GEOMETRIES[name]
    page = kv_page_bytes(model, kv_itemsize)
    ranks = uniform_ranks(model, 4, TARGETS[targets])
    vectors = Extras(frozenset((layer, module, "scale") for layer, module in ranks))
    plan = plan_image(ranks, model.module_shapes, page, 2, vectors)
    count = 12
    table = AdapterTable(
        count + 1,
        model.num_layers,
        model.module_shapes,
        max_blocks(model, 2, count * plan.num_pages * page, page),
        torch.device("cpu"),
    )
    for slot in range(1, count + 1):
        assert table.can_hold(plan), slot
        table.set(slot, plan, range((slot - 1) * plan.num_pages, slot * plan.num_pages))


@pytest.mark.parametrize("kv_itemsize", [2, 1], ids=["BF16 KV", "FP8 KV"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_at_most_three_percent_of_a_fleet(name: str, kv_itemsize: int) -> None:
    """Ranks 16 to 128 on all seven projections and on attention, as a fleet would mix them."""
    wasted = taken = 0.0
    for targets in TARGETS:
        for rank in (16, 32, 64, 128):
            share, pages = waste(GEOMETRIES[name], rank, targets, kv_itemsize)
            wasted, taken = wasted + share * pages, taken + pages
    assert wasted / taken <= 0.03, (name, wasted / taken)

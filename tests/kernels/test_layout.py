"""The byte layout of adapter images: exact sizes, no overlap, little waste."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_kernels.layout import (
    GROUPS,
    MODULES,
    ImagePlan,
    chunk_length,
    page_bytes,
    plan_image,
)
from multilora_kernels.testing import LLAMA3_8B

ATTENTION = MODULES[:4]


def geometry(hidden: int, kv: int, ffn: int, q: int | None = None) -> dict[str, tuple[int, int]]:
    q = q or hidden
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }


# hidden, kv heads * head_dim, ffn, layers, kv heads, head dim (q width where it differs)
REAL = {
    "llama-3-8b": (LLAMA3_8B, 32, 8, 128),
    "llama-3-70b": (geometry(8192, 1024, 28672), 80, 8, 128),
    "llama-2-7b": (geometry(4096, 4096, 11008), 32, 32, 128),
    "llama-2-13b": (geometry(5120, 5120, 13824), 40, 40, 128),
    "llama-3.2-1b": (geometry(2048, 512, 8192), 16, 8, 64),
    "llama-3.2-3b": (geometry(3072, 1024, 8192), 28, 8, 128),
    "mistral-7b": (geometry(4096, 1024, 14336), 32, 8, 128),
    "qwen2.5-7b": (geometry(3584, 512, 18944), 28, 4, 128),
    "qwen2.5-14b": (geometry(5120, 1024, 13824), 48, 8, 128),
    "qwen3-8b": (geometry(4096, 1024, 12288), 36, 8, 128),
}


def everywhere(rank: int, modules: tuple[str, ...], layers: int) -> dict[tuple[int, str], int]:
    return {(layer, module): rank for layer in range(layers) for module in modules}


def check_plan(plan: ImagePlan, shapes: dict[str, tuple[int, int]]) -> None:
    """Every weight exactly once, every block inside its page, none over another."""
    taken: dict[int, list[tuple[int, int]]] = {}
    cells: dict[tuple[int, str, str], int] = {}
    for block in plan.blocks:
        size = block.rank_width * block.length * plan.itemsize
        assert block.offset % 128 == 0 and block.offset + size <= plan.page_bytes
        assert 0 <= block.page < plan.num_pages
        taken.setdefault(block.page, []).append((block.offset, block.offset + size))
        key = (block.layer, block.module, block.matrix)
        cells[key] = cells.get(key, 0) + block.rank_width * block.length
    for spans in taken.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for (layer, module), rank in plan.ranks.items():
        padded = -(-rank // 8) * 8
        for matrix, length in zip("ab", shapes[module], strict=True):
            assert cells[layer, module, matrix] == padded * length


def test_groups_cover_the_modules_once() -> None:
    assert sorted(m for group in GROUPS.values() for m in group) == sorted(MODULES)


def test_llama3_8b_rank_16_fills_its_pages_exactly() -> None:
    size = page_bytes(32, 8, 128, 2)
    assert size == 2 * 2**20
    attention = plan_image(everywhere(16, ATTENTION, 32), LLAMA3_8B, size, 2)
    full = plan_image(everywhere(16, MODULES, 32), LLAMA3_8B, size, 2)
    assert (attention.num_pages, attention.wasted_bytes) == (13, 0)
    assert (full.num_pages, full.wasted_bytes) == (40, 0)
    check_plan(full, dict(LLAMA3_8B))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("rank", [16, 24, 64])
def test_waste_on_real_geometries_is_at_most_three_percent(name: str, rank: int) -> None:
    shapes, layers, kv_heads, head_dim = REAL[name]
    size = page_bytes(layers, kv_heads, head_dim, 2)
    plan = plan_image(everywhere(rank, MODULES, layers), shapes, size, 2)
    # The last page is only as full as the adapter's size happens to make it.
    ideal = -(-plan.used_bytes // size)
    assert plan.num_pages - ideal <= 0.03 * ideal
    check_plan(plan, dict(shapes))


@given(
    ranks=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(MODULES)), st.integers(0, 512), max_size=5
    ),
    hidden=st.integers(3, 20).map(lambda n: 8 * n),
    kv_heads=st.sampled_from([1, 2]),
    itemsize=st.sampled_from([2, 4]),
)
def test_any_plan_places_every_weight_once(
    ranks: dict[tuple[int, str], int], hidden: int, kv_heads: int, itemsize: int
) -> None:
    shapes = geometry(hidden, 16 * kv_heads, 2 * hidden + 1)
    plan = plan_image(ranks, shapes, page_bytes(2, kv_heads, 16, itemsize), itemsize)
    check_plan(plan, shapes)
    assert plan.ranks == {key: rank for key, rank in ranks.items() if rank}


def test_an_adapter_without_deltas_takes_no_page() -> None:
    plan = plan_image({(0, "q_proj"): 0}, LLAMA3_8B, 2**21, 2)
    assert (plan.num_pages, plan.blocks, plan.used_bytes) == (0, (), 0)


def test_plans_are_refused_where_no_kernel_could_read_them() -> None:
    with pytest.raises(ValueError, match="rank 513"):
        plan_image({(0, "q_proj"): 513}, LLAMA3_8B, 2**21, 2)
    with pytest.raises(ValueError, match="lm_head"):
        plan_image({(0, "lm_head"): 8}, LLAMA3_8B, 2**21, 2)
    with pytest.raises(ValueError, match="a page of 512 bytes"):
        chunk_length(512, 4)

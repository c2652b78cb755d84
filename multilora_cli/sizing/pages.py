"""What KV cache and adapters cost in pages of the one pool."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from multilora_cli.errors import BadInput
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import (
    MODULES,
    NO_EXTRAS,
    TOKENS_PER_PAGE,
    VECTOR_ITEMSIZE,
    Extras,
    page_bytes,
    plan_image,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {"attention": ATTENTION, "all": MODULES}

Ranks = Mapping[tuple[int, str], int]


@dataclass(frozen=True)
class AdapterCost:
    """One adapter's weights, and the whole pages they take."""

    parameters: int  # the numbers that are served, vectors included
    weight_bytes: int  # true ranks, nothing padded
    step_bytes: int  # of these, what a decode step reads: of the embedding only single rows
    num_pages: int
    pool_bytes: int  # num_pages whole pages
    num_blocks: int  # entries of the adapter table

    @property
    def waste(self) -> float:
        """Share of the pages that holds no weights."""
        return 1.0 - self.weight_bytes / self.pool_bytes if self.pool_bytes else 0.0


def kv_page_bytes(geometry: ModelGeometry, kv_itemsize: int) -> int:
    """Bytes of one pool page: K and V of 16 tokens over all layers."""
    return page_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, kv_itemsize)


def pages_for_tokens(num_tokens: int) -> int:
    """Pages that hold the KV of one sequence of `num_tokens`."""
    return -(-num_tokens // TOKENS_PER_PAGE)


def uniform_ranks(geometry: ModelGeometry, rank: int, modules: Iterable[str]) -> Ranks:
    """The ranks of an adapter with one rank on `modules` of every layer."""
    names = tuple(modules)
    for name in names:
        if name not in MODULES:
            raise BadInput(f"target module {name!r}: expected one of {', '.join(MODULES)}")
    return {(layer, name): rank for layer in range(geometry.num_layers) for name in names}


def adapter_cost(
    geometry: ModelGeometry,
    ranks: Ranks,
    page_bytes: int,
    itemsize: int,
    extras: Extras = NO_EXTRAS,
) -> AdapterCost:
    """Exact cost of an adapter whose modules have `ranks`; `itemsize` of the compute dtype."""
    shapes = geometry.module_shapes
    key = tuple(sorted((layer, name, rank) for (layer, name), rank in ranks.items() if rank))
    return _cost(key, tuple(shapes.items()), page_bytes, itemsize, extras)


# Fleets repeat a few rank and module sets over thousands of adapters, and packing one of 5,000
# blocks takes milliseconds.
@lru_cache(maxsize=512)
def _cost(
    ranks: tuple[tuple[int, str, int], ...],
    shapes: tuple[tuple[str, tuple[int, int]], ...],
    page_bytes: int,
    itemsize: int,
    extras: Extras,
) -> AdapterCost:
    sizes = dict(shapes)
    by_module = {(layer, name): rank for layer, name, rank in ranks}
    plan = plan_image(by_module, sizes, page_bytes, itemsize, extras)
    factors = sum(rank * sum(sizes[name]) for _, name, rank in ranks)
    matrices = sum(rows * length for _, rows, length in extras.matrices)
    looked_up = ("embed_tokens.a", "embed_tokens.weight")
    read = sum(rows * length for name, rows, length in extras.matrices if name not in looked_up)
    vectors = sum(sizes[name][1] for _, name, _ in extras.vectors)
    return AdapterCost(
        parameters=factors + matrices + vectors,
        weight_bytes=(factors + matrices) * itemsize + vectors * VECTOR_ITEMSIZE,
        step_bytes=(factors + read) * itemsize + vectors * VECTOR_ITEMSIZE,
        num_pages=plan.num_pages,
        pool_bytes=plan.num_pages * page_bytes,
        num_blocks=len(plan.blocks) + len(plan.vectors) + len(plan.matrices),
    )

"""store_kv against a plain loop, on a CPU and under the interpreter."""

import pytest
import torch

from multilora_kernels.store_kv import store_kv

LAYERS, LAYER, PAGES = 3, 1, 5


def filled(heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """(k, v, pool, slot_mapping): six tokens, one of them skipped, k and v slices of one qkv."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(PAGES * 16, generator=generator)[:6]
    slots[2] = -1
    packed = torch.randn(6, 3, heads, head_dim, generator=generator).to(dtype)
    elements = LAYERS * 2 * heads * 16 * head_dim
    pool = torch.randint(0, 256, (PAGES, elements * packed.element_size()), generator=generator)
    return packed[:, 1], packed[:, 2], pool.to(torch.uint8), slots


def check(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    k, v, pool, slots = filled(heads, head_dim, dtype, seed=heads * head_dim)
    expected = pool.clone()
    view = expected.view(dtype).view(PAGES, LAYERS, 2, heads, 16, head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            view[slot // 16, LAYER, 0, :, slot % 16] = k[token]
            view[slot // 16, LAYER, 1, :, slot % 16] = v[token]
    store_kv(k, v, pool, LAYER, LAYERS, slots)
    assert torch.equal(pool, expected)  # bytes: nothing outside the tokens changed


SHAPES = [(1, 16), (3, 80), (2, 64), (8, 128)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_kv_on_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_kv_interpreted(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype)


def test_store_kv_no_tokens() -> None:
    """An empty step writes nothing."""
    k, v, pool, slots = filled(2, 16, torch.float32, seed=1)
    before = pool.clone()
    store_kv(k[:0], v[:0], pool, LAYER, LAYERS, slots[:0])
    assert torch.equal(pool, before)

"""Where rope_store_kv puts keys and values, against a plain loop."""

import pytest
import torch

from multilora_kernels.kv_pages import KvLayer
from multilora_kernels.rope_store_kv import rope_store_kv

LAYERS, LAYER, PAGES, TOKENS = 3, 1, 5, 6


def check(heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Not turned at all, so bytes are compared; the third of six tokens is skipped."""
    generator = torch.Generator().manual_seed(heads * head_dim)
    slots = torch.randperm(PAGES * 16, generator=generator)[:TOKENS]
    slots[2] = -1
    packed = torch.randn(TOKENS, 3 * heads, head_dim, generator=generator).to(dtype)
    elements = LAYERS * 2 * heads * 16 * head_dim
    pool = torch.randint(0, 256, (PAGES, elements * dtype.itemsize), generator=generator)
    expected, pool = pool.to(torch.uint8), pool.to(torch.uint8).to(device)
    view = expected.view(dtype).view(PAGES, LAYERS, 2, heads, 16, head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            view[slot // 16, LAYER, 0, :, slot % 16] = packed[token, heads : 2 * heads]
            view[slot // 16, LAYER, 1, :, slot % 16] = packed[token, 2 * heads :]
    ones = torch.ones(TOKENS, 1, head_dim // 2, device=device)
    kv = KvLayer(pool, LAYER, heads, head_dim, dtype)
    out = rope_store_kv(packed.to(device), (ones, 0 * ones), kv, slots.to(device))
    assert torch.equal(out.cpu(), packed[:, :heads])
    assert torch.equal(pool.cpu(), expected)  # bytes: nothing outside the tokens changed


SHAPES = [(1, 16), (3, 80), (2, 64), (8, 128)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_on_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_interpreted(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (16, 256)], ids=str)
def test_places_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype, "cuda")


def test_no_tokens() -> None:
    """An empty step writes nothing."""
    pool = torch.full((PAGES, 2 * 2 * 16 * 16 * 4), 7, dtype=torch.uint8)
    ones = torch.ones(0, 1, 8)
    kv = KvLayer(pool, 0, 2, 16, torch.float32)
    out = rope_store_kv(torch.empty(0, 6, 16), (ones, ones), kv, torch.empty(0, dtype=torch.int64))
    assert out.shape == (0, 2, 16)
    assert bool((pool == 7).all())

"""Write the keys and values of this step's tokens into pages of the pool.

    page(slot_mapping[t] // 16)[layer, 0, :, slot_mapping[t] % 16] = k[t]      (V: index 1)

k, v          [T, Hkv, D]             bf16, fp16 or fp32; a token's heads contiguous
pool          [num_pages, page_bytes] uint8, written in place; a page viewed in the KV dtype, which
              is k's or FP8 (see kv_pages), is [num_layers, 2 (K, V), Hkv, 16 (tokens), D]
slot_mapping  [T] int64               page * 16 + offset in the page; -1 skips the token
"""

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.kv_pages import FP8, kv_elements, kv_pages, narrow_kv, to_kv
from multilora_kernels.launch import next_power_of_2, on_host
from multilora_kernels.layout import TOKENS_PER_PAGE


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    pages_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_vt,
    page_elements,
    layer_start,
    num_elements: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    mask = element < num_elements
    inside = (element // HEAD_DIM) * (TOKENS * HEAD_DIM) + element % HEAD_DIM
    target = pages_ptr + (slot // TOKENS) * page_elements + layer_start
    target += (slot % TOKENS) * HEAD_DIM + inside
    KV: tl.constexpr = pages_ptr.dtype.element_ty
    k = tl.load(k_ptr + token * stride_kt + element, mask=mask)
    tl.store(target, narrow_kv(k, KV), mask=mask)
    target += num_elements * TOKENS
    v = tl.load(v_ptr + token * stride_vt + element, mask=mask)
    tl.store(target, narrow_kv(v, KV), mask=mask)


def launch_choice(num_elements: int) -> dict[str, Any]:
    """Tile and warps for a token of `num_elements` (Hkv * D): about 8 elements a thread."""
    block = next_power_of_2(num_elements)
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_layers: int,
    slot_mapping: torch.Tensor,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Store k and v [T, Hkv, D] of `layer` at `slot_mapping` [T]; the pool changes in place.

    `kv_dtype` is how the pool holds them: float8_e4m3fn, or None for k's dtype.
    """
    kv_dtype = kv_dtype or k.dtype
    assert k.shape == v.shape and k.ndim == 3 and k.dtype == v.dtype
    tokens, heads, head_dim = k.shape
    for tensor in (k, v):
        assert tensor.stride(2) == 1 and tensor.stride(1) == head_dim
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    assert pool.dtype == torch.uint8 and pool.is_contiguous() and 0 <= layer < num_layers
    layer_elements = 2 * heads * TOKENS_PER_PAGE * head_dim
    assert kv_dtype in (k.dtype, FP8)
    assert pool.shape[1] == num_layers * layer_elements * kv_dtype.itemsize
    if tokens == 0:
        return
    if on_host(k.device):
        return store_kv_ref(k, v, pool, layer, num_layers, slot_mapping, kv_dtype)
    store_kv_kernel[(tokens,)](
        k,
        v,
        kv_elements(pool, kv_dtype),
        slot_mapping,
        k.stride(0),
        v.stride(0),
        num_layers * layer_elements,
        layer * layer_elements,
        num_elements=heads * head_dim,
        HEAD_DIM=head_dim,
        TOKENS=TOKENS_PER_PAGE,
        **launch_choice(heads * head_dim),
    )


def store_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_layers: int,
    slot_mapping: torch.Tensor,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """The same in torch, also the path on a CPU."""
    kv_dtype = kv_dtype or k.dtype
    pages = kv_pages(pool, kv_dtype, *k.shape[1:])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, offset = slots // TOKENS_PER_PAGE, slots % TOKENS_PER_PAGE
    pages[page, layer, 0, :, offset] = to_kv(k[kept], kv_dtype)
    pages[page, layer, 1, :, offset] = to_kv(v[kept], kv_dtype)

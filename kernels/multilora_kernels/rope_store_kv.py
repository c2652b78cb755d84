"""Queries and keys of a packed projection normed and turned, keys and values stored in their pages.

    q, k, v = the heads of packed[t];  q, k = rms_norm(q), rms_norm(k)  where the model has these
    y[i] = x[i] cos[t, i] - x[i + D/2] sin[t, i]
    y[i + D/2] = x[i + D/2] cos[t, i] + x[i] sin[t, i]
    out[t] = y of q;  page(slot_mapping[t] // 16)[:, :, slot_mapping[t] % 16] = y of k, v

packed        [T, Hq + 2 Hkv, D]      bf16, fp16 or fp32; q, k, v heads in this order
cos, sin      [T, 1, D / 2]           fp32, contiguous
kv            kv_pages.KvLayer         pages, in packed's dtype or FP8; written in place
slot_mapping  [T] int64               page * 16 + offset in the page; -1 skips the token's K and V
out           [T, Hq, D]              packed's dtype

One launch instead of two norms, two rotations and a store. Arithmetic is fp32, rounded to packed's
dtype where the separate ops round.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from multilora_kernels.kv_pages import KvLayer, narrow_kv, to_kv
from multilora_kernels.launch import cdiv, chip_for, next_power_of_2, on_host
from multilora_kernels.layout import TOKENS_PER_PAGE
from multilora_kernels.rms_norm import rms_norm_ref


@dataclass(frozen=True)
class HeadNorm:
    """Weights [D] of the norms over every query head and every key head (Qwen3)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@triton.jit
def rope_tables_kernel(
    cos_ptr, sin_ptr, positions_ptr, frequencies_ptr, scale, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    frequency = tl.load(frequencies_ptr + i, mask=i < HALF, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    tl.store(cos_ptr + token * HALF + i, tl.cos(angle) * scale, mask=i < HALF)
    tl.store(sin_ptr + token * HALF + i, tl.sin(angle) * scale, mask=i < HALF)


@triton.jit
def rope_store_kv_kernel(
    out_ptr,
    packed_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    pages_ptr,
    slot_mapping_ptr,
    stride_pt,
    page_elements,
    layer_start,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_D)
    used = (i < HALF)[None, :]
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & used
    source = packed_ptr + token * stride_pt + head[:, None] * HEAD_DIM + i[None, :]
    raw_low = tl.load(source, mask=mask, other=0.0)
    raw_high = tl.load(source + HALF, mask=mask, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    is_q = (head < NUM_HEADS)[:, None]
    if NORMED:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = (low * inverse).to(out_ptr.dtype.element_ty).to(tl.float32)
        high = (high * inverse).to(out_ptr.dtype.element_ty).to(tl.float32)
        q_low = tl.load(q_weight_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_low = tl.load(k_weight_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        low *= tl.where(is_q, q_low[None, :], k_low[None, :])
        high *= tl.where(is_q, q_high[None, :], k_high[None, :])
        low = low.to(out_ptr.dtype.element_ty).to(tl.float32)
        high = high.to(out_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    turned_low = (low * cos - high * sin).to(out_ptr.dtype.element_ty)
    turned_high = (high * cos + low * sin).to(out_ptr.dtype.element_ty)
    turned_low = tl.where(is_v, raw_low, turned_low)
    turned_high = tl.where(is_v, raw_high, turned_high)
    target = out_ptr + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + i[None, :]
    tl.store(target, turned_low, mask=is_q & used)
    tl.store(target + HALF, turned_high, mask=is_q & used)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        # K heads and V heads follow each other in a page as they do in the packed row.
        page_ptr = pages_ptr + slot // TOKENS * page_elements + layer_start
        kv_head = (head - NUM_HEADS)[:, None]
        kv_target = page_ptr + (kv_head * TOKENS + slot % TOKENS) * HEAD_DIM + i[None, :]
        KV: tl.constexpr = pages_ptr.dtype.element_ty
        tl.store(kv_target, narrow_kv(turned_low, KV), mask=mask & (kv_head >= 0))
        tl.store(kv_target + HALF, narrow_kv(turned_high, KV), mask=mask & (kv_head >= 0))


def launch_choice(half: int) -> dict[str, int]:
    """Heads and lanes of one program: about 1,024 elements for 4 warps."""
    block_d = next_power_of_2(half)
    return {"BLOCK_D": block_d, "BLOCK_H": max(1, 512 // block_d), "num_warps": 4}


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale times cos and sin of every position times every frequency: fp32 [T, 1, D / 2] each.

    positions int64 [T], frequencies fp32 [D / 2]. Made once a step for all layers: a table of all
    positions would take 64 MiB for 131,072 of them and a dependent load in every layer.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert frequencies.dtype == torch.float32 and frequencies.is_contiguous()
    if on_host(positions.device):
        return rope_tables_ref(positions, frequencies, scale)
    cos = torch.empty(tokens, 1, half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens > 0:
        block = next_power_of_2(half)
        rope_tables_kernel[(tokens,)](
            cos, sin, positions, frequencies, scale, HALF=half, BLOCK=block, num_warps=1
        )
    return cos, sin


def rope_tables_ref(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, also the path on a CPU."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rope_store_kv(
    packed: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KvLayer,
    slot_mapping: torch.Tensor,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Queries [T, Hq, D] of packed [T, Hq + 2 Hkv, D]; K and V go to the pool, in place.

    `tables` are those of the tokens' positions.
    """
    tokens, all_heads, head_dim = packed.shape
    cos, sin = tables
    assert packed.stride(2) == 1 and packed.stride(1) == head_dim and head_dim % 2 == 0
    assert all_heads > 2 * kv.num_kv_heads
    kv.check(packed)
    assert cos.shape == sin.shape == (tokens, 1, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    if on_host(packed.device):
        return rope_store_kv_ref(packed, tables, kv, slot_mapping, norm)
    num_heads = all_heads - 2 * kv.num_kv_heads
    out = torch.empty(tokens, num_heads, head_dim, dtype=packed.dtype, device=packed.device)
    if tokens == 0:
        return out
    choice = launch_choice(head_dim // 2)
    pdl = chip_for(packed.device).has_pdl
    rope_store_kv_kernel[(tokens, cdiv(all_heads, choice["BLOCK_H"]))](
        out,
        packed,
        cos,
        sin,
        packed if norm is None else norm.q_weight,
        packed if norm is None else norm.k_weight,
        kv.elements,
        slot_mapping,
        packed.stride(0),
        kv.page_elements,
        kv.start,
        0.0 if norm is None else norm.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv.num_kv_heads,
        HALF=head_dim // 2,
        TOKENS=TOKENS_PER_PAGE,
        NORMED=norm is not None,
        PDL=pdl,
        launch_pdl=pdl,
        **choice,
    )
    return out


def rope_store_kv_ref(
    packed: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KvLayer,
    slot_mapping: torch.Tensor,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """The same in torch, also the path on a CPU."""
    heads = kv.num_kv_heads
    q, k, v = packed.split((packed.shape[1] - 2 * heads, heads, heads), dim=1)
    if norm is not None:
        q = rms_norm_ref(q, norm.q_weight, norm.eps)
        k = rms_norm_ref(k, norm.k_weight, norm.eps)
    kept = slot_mapping >= 0
    page, offset = slot_mapping[kept] // TOKENS_PER_PAGE, slot_mapping[kept] % TOKENS_PER_PAGE
    kv.pages[page, 0, :, offset] = to_kv(rotate_ref(k, *tables)[kept], kv.dtype)
    kv.pages[page, 1, :, offset] = to_kv(v[kept], kv.dtype)
    return rotate_ref(q, *tables)


def rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] turned by cos and sin [T, 1, D / 2], in fp32; a new tensor of x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

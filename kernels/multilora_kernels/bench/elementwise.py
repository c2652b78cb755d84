"""Cases for the fused elementwise ops at Llama-3-8B's shapes, beside the same in torch ops."""

from collections.abc import Callable

import torch

from multilora_kernels.bench.timing import Built, Case, sets_needed
from multilora_kernels.kv_pages import KvLayer
from multilora_kernels.rms_norm import add_rms_norm, add_rms_norm_ref
from multilora_kernels.rope_store_kv import rope_store_kv
from multilora_kernels.silu_mul import silu_mul, silu_mul_ref

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
TOKENS = (1, 16, 64, 256, 2048)
BF16 = torch.bfloat16


def _add_rms_norm_case(tokens: int) -> Case:
    work = 4.0 * tokens * HIDDEN * 2  # x and residual read, residual and output written

    def build(device: torch.device) -> Built:
        sets = sets_needed(work)
        x = torch.randn(sets, tokens, HIDDEN, dtype=BF16, device=device)
        residual = torch.randn_like(x)
        weight = torch.randn(HIDDEN, dtype=BF16, device=device)

        def bind(op: Callable[..., torch.Tensor]) -> Callable[[int], object]:
            return lambda index: op(x[index], residual[index], weight, 1e-5)

        return Built(sets, {"ours": bind(add_rms_norm), "torch": bind(add_rms_norm_ref)})

    return Case("add_rms_norm", {"T": tokens, "size": HIDDEN}, work, build)


def _silu_mul_case(tokens: int) -> Case:
    work = 3.0 * tokens * INTERMEDIATE * 2

    def build(device: torch.device) -> Built:
        sets = sets_needed(work)
        x = torch.randn(sets, tokens, 2 * INTERMEDIATE, dtype=BF16, device=device)

        def bind(op: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], object]:
            return lambda index: op(x[index])

        return Built(sets, {"ours": bind(silu_mul), "torch": bind(silu_mul_ref)})

    return Case("silu_mul", {"T": tokens, "size": INTERMEDIATE}, work, build)


def _rope_case(tokens: int) -> Case:
    heads, layers = HEADS + 2 * KV_HEADS, 4
    work = 2.0 * tokens * heads * HEAD_DIM * 2

    def build(device: torch.device) -> Built:
        sets = sets_needed(work)
        packed = torch.randn(sets, tokens, heads, HEAD_DIM, dtype=BF16, device=device)
        angles = torch.rand(tokens, 1, HEAD_DIM // 2, device=device)
        tables = (angles.cos(), angles.sin())
        pages = -(-tokens // 16) * 4
        page = torch.zeros(pages, layers * 2 * KV_HEADS * 16 * HEAD_DIM, dtype=BF16, device=device)
        pool = page.view(torch.uint8)
        kv = [KvLayer(pool, layer, KV_HEADS, HEAD_DIM, BF16) for layer in range(layers)]
        slots = torch.randperm(pages * 16, device=device)[:tokens]

        def bind(op: Callable[..., torch.Tensor]) -> Callable[[int], object]:
            return lambda index: op(packed[index], tables, kv[index % layers], slots)

        return Built(sets, {"ours": bind(rope_store_kv)})

    return Case("rope_store_kv", {"T": tokens, "heads": heads, "D": HEAD_DIM}, work, build)


def cases() -> list[Case]:
    """Every op over the token counts of decode steps and one prefill chunk."""
    makers = (_add_rms_norm_case, _silu_mul_case, _rope_case)
    return [maker(tokens) for maker in makers for tokens in TOKENS]

"""Cases for decode and prefill attention, at Llama-3-8B's shapes.

Contexts lie on randomly placed pages that hold many layers, as in serving; the layers are the
input sets. Baselines run on contiguous keys and values, which no paged cache has: they are bounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.bench.timing import Built, Case, Run, sets_needed
from multilora_kernels.bf16_gemv import bf16_gemv
from multilora_kernels.kv_pages import FP8, KvLayer
from multilora_kernels.launch import chip_for
from multilora_kernels.paged_attention import paged_attention
from multilora_kernels.paged_decode import decode_choice, decode_key, paged_decode
from multilora_kernels.paged_prefill import paged_prefill, prefill_key
from multilora_kernels.rope_store_kv import rope_store_kv

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
PAGE_TOKENS = 16
KV_TOKEN_ELEMENTS = 2 * KV_HEADS * HEAD_DIM  # keys and values of one token and layer
BF16 = torch.bfloat16
Q_TOKEN_BYTES = HEADS * HEAD_DIM * 2
POOL_BYTES = 24 * 2**30  # the largest pool a case may build

DECODE = [*product((1, 16, 64, 256), (64, 192, 256, 512, 1024, 4096))]
DECODE_FP8 = [*product((1, 16, 64, 256), (192, 1024, 4096))]
DECODE_LAYER = [*product((1, 16, 64, 256), (192,))]
# (sequences, query tokens each, context each)
PREFILL = [(1, 2048, 2048), (1, 8192, 8192), (8, 1024, 1024), (1, 2048, 8192), (4, 512, 4096)]

# Three stages keep two tiles of keys and values in flight. Launches of up to two programs a
# multiprocessor need them there; where more want a place ("crowded"), four programs with 128
# registers a thread and a tile each in flight do as well, and batches of powers of two fill waves.
_FOUR = {"num_stages": 2, "maxnreg": 128}
_CANDIDATES: list[tuple[int, int, int, dict[str, Any]]] = [
    (64, 3, 256, {"slots": 264}),
    (64, 3, 256, {"slots": 264, "crowded": _FOUR}),
    (64, 3, 256, {"slots": 264, "crowded": {"num_stages": 4}}),
    (64, 3, 128, {"slots": 264, "crowded": _FOUR}),
    (64, 3, 512, {"slots": 264, "crowded": _FOUR}),
    (32, 3, 256, {"slots": 528}),
    (32, 3, 512, {"slots": 528}),
    (32, 4, 256, {"slots": 528}),
    (16, 4, 256, {"slots": 528}),
]
DECODE_CHOICES = [
    {"BLOCK_N": block_n, "num_stages": stages, "min_split": min_split, "MAX_SPLITS": 32, **more}
    for block_n, stages, min_split, more in _CANDIDATES
]
PREFILL_CHOICES = [
    dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), choice, strict=True))
    for choice in [
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 32, 4, 3),
        (128, 32, 4, 5),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 32, 4, 5),
    ]
]


@dataclass(frozen=True)
class Inputs:
    """One batch over a pool whose every layer is an input set."""

    q: torch.Tensor  # [T, Hq, D]
    pool: torch.Tensor
    batch: AttentionBatch
    num_layers: int
    kv_dtype: torch.dtype

    def kv(self, index: int) -> KvLayer:
        """Keys and values of input set `index`."""
        return KvLayer(self.pool, index % self.num_layers, KV_HEADS, HEAD_DIM, self.kv_dtype)


def _kv_bytes(kv_dtype: torch.dtype) -> int:
    """Of one token and layer."""
    return KV_TOKEN_ELEMENTS * kv_dtype.itemsize


def _inputs(
    sequences: int, query_len: int, context: int, device: torch.device, kv_dtype: torch.dtype
) -> Inputs:
    torch.manual_seed(0)
    pages_each = -(-context // PAGE_TOKENS)
    num_pages = sequences * pages_each
    layer_bytes = num_pages * PAGE_TOKENS * _kv_bytes(kv_dtype)
    # 32 layers, as the model has, unless the pool would not fit.
    num_layers = max(2, min(32, POOL_BYTES // layer_bytes))
    page_elements = num_layers * PAGE_TOKENS * KV_TOKEN_ELEMENTS
    if kv_dtype == FP8:
        pool = torch.randint(256, (num_pages, page_elements), dtype=torch.uint8, device=device)
        pool &= 0xBF  # codes of magnitudes below 2, NaN none of them
    else:
        pool = torch.empty(num_pages, page_elements, dtype=kv_dtype, device=device).normal_()
    table = torch.randperm(num_pages, device=device).to(torch.int32).view(sequences, pages_each)
    starts = torch.arange(sequences + 1, device=device, dtype=torch.int32) * query_len
    batch = AttentionBatch(
        starts,
        torch.full((sequences,), context, dtype=torch.int32, device=device),
        table,
        sequences if query_len == 1 else 0,
        query_len,
        context,
    )
    q = torch.randn(sequences * query_len, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    return Inputs(q, pool.view(torch.uint8), batch, num_layers, kv_dtype)


def _contiguous(sequences: int, context: int, sets: int, device: torch.device) -> torch.Tensor:
    shape = (sets, 2, sequences, KV_HEADS, context, HEAD_DIM)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _ours(inputs: Inputs) -> Run:
    def run(index: int) -> object:
        return paged_attention(inputs.q, inputs.kv(index), inputs.batch, SCALE)

    return run


def _with_choice(inputs: Inputs, op: Callable[..., None]) -> Callable[[Mapping[str, Any]], Run]:
    out = torch.empty_like(inputs.q)

    def bind(choice: Mapping[str, Any]) -> Run:
        def run(index: int) -> object:
            op(inputs.q, inputs.kv(index), inputs.batch, SCALE, None, out, dict(choice))
            return out

        return run

    return bind


def _sdpa(inputs: Inputs, kv: torch.Tensor, backend: SDPBackend | None) -> Run:
    sequences = inputs.batch.num_sequences
    q = inputs.q.view(sequences, -1, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    causal = q.shape[2] > 1

    def run(index: int) -> object:
        keys, values = kv[index % kv.shape[0]]
        if backend is None:
            return F.scaled_dot_product_attention(
                q, keys, values, is_causal=causal, scale=SCALE, enable_gqa=True
            )
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, keys, values, is_causal=causal, scale=SCALE, enable_gqa=True
            )

    return run


def _shape(kv_dtype: torch.dtype, **shape: int) -> dict[str, int | str]:
    """A case's label; only FP8 pages are named."""
    return {**shape, **({"KV": "fp8"} if kv_dtype == FP8 else {})}


def _decode_case(sequences: int, context: int, kv_dtype: torch.dtype) -> Case:
    work = sequences * (context * _kv_bytes(kv_dtype) + 2 * Q_TOKEN_BYTES)

    def build(device: torch.device) -> Built:
        inputs = _inputs(sequences, 1, context, device, kv_dtype)
        sets = min(sets_needed(work), 64)
        variants = {"ours": _ours(inputs)}
        if kv_dtype == BF16:
            kv = _contiguous(sequences, context, min(sets, 32), device)
            variants["sdpa contiguous"] = _sdpa(inputs, kv, None)
        return Built(sets, variants, _with_choice(inputs, paged_decode))

    return Case(
        "paged_decode",
        _shape(kv_dtype, B=sequences, S=context, Hq=HEADS, Hkv=KV_HEADS, D=HEAD_DIM),
        work,
        build,
        flops=4.0 * sequences * context * HEADS * HEAD_DIM,
        tune_key=decode_key(HEAD_DIM, HEADS // KV_HEADS, kv_dtype.itemsize),
        choices=DECODE_CHOICES,
        compile=_compile_decode(kv_dtype),
    )


def _compile_decode(kv_dtype: torch.dtype) -> Callable[[torch.device, Mapping[str, Any]], None]:
    def compile_one(device: torch.device, choice: Mapping[str, Any]) -> None:
        inputs = _inputs(1, 1, PAGE_TOKENS, device, kv_dtype)
        out = torch.empty_like(inputs.q)
        key = (HEAD_DIM, HEADS // KV_HEADS, kv_dtype.itemsize)
        full = dict(choice) or decode_choice(chip_for(device), *key)
        few = {name: value for name, value in full.items() if name != "crowded"}
        for launched in (few, {**few, **full.get("crowded", {})}):
            paged_decode(inputs.q, inputs.kv(0), inputs.batch, SCALE, None, out, launched)

    return compile_one


def _decode_layer_case(sequences: int, context: int) -> Case:
    """Rotation, decode, and the multiply behind it, as a layer runs them: early launches overlap.

    "without attention" leaves it out, the multiply then takes the queries.
    """
    hidden = HEADS * HEAD_DIM
    work = sequences * context * _kv_bytes(BF16) + 2 * hidden * hidden

    def build(device: torch.device) -> Built:
        inputs = _inputs(sequences, 1, context, device, BF16)
        sets = max(8, min(sets_needed(work), 64))
        weights = torch.randn(8, hidden, hidden, device=device, dtype=BF16) / 64
        packed = torch.randn(sequences, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(BF16)
        last = inputs.batch.page_table[:, (context - 1) // PAGE_TOKENS].long() * PAGE_TOKENS
        slots = last + (context - 1) % PAGE_TOKENS
        angles = torch.zeros(sequences, 1, HEAD_DIM // 2, device=device)
        tables = (angles + 1, angles)

        def bind(attend: Callable[[torch.Tensor, KvLayer], torch.Tensor]) -> Run:
            def run(index: int) -> object:
                kv = inputs.kv(index)
                q = rope_store_kv(packed, tables, kv, slots)
                return bf16_gemv(attend(q, kv).view(sequences, hidden), weights[index % 8])

            return run

        def ours(q: torch.Tensor, kv: KvLayer) -> torch.Tensor:
            return paged_attention(q, kv, inputs.batch, SCALE)

        def with_choice(choice: Mapping[str, Any]) -> Run:
            def attend(q: torch.Tensor, kv: KvLayer) -> torch.Tensor:
                out = torch.empty_like(q)
                paged_decode(q, kv, inputs.batch, SCALE, None, out, dict(choice))
                return out

            return bind(attend)

        variants = {"ours": bind(ours), "without attention": bind(lambda q, kv: q)}
        return Built(sets, variants, with_choice)

    return Case(
        "decode_layer",
        _shape(BF16, B=sequences, S=context, Hq=HEADS, Hkv=KV_HEADS, D=HEAD_DIM),
        work,
        build,
        tune_key=decode_key(HEAD_DIM, HEADS // KV_HEADS, 2),
        choices=DECODE_CHOICES,  # compiled with those of decode alone
    )


def _prefill_case(sequences: int, query_len: int, context: int, kv_dtype: torch.dtype) -> Case:
    def build(device: torch.device) -> Built:
        inputs = _inputs(sequences, query_len, context, device, kv_dtype)
        variants = {"ours": _ours(inputs)}
        # SDPA's causal mask is aligned to the first key.
        if query_len == context and kv_dtype == BF16:
            kv = _contiguous(sequences, context, 2, device)
            variants["sdpa cudnn contiguous"] = _sdpa(inputs, kv, SDPBackend.CUDNN_ATTENTION)
            variants["sdpa flash contiguous"] = _sdpa(inputs, kv, SDPBackend.FLASH_ATTENTION)
        return Built(2, variants, _with_choice(inputs, paged_prefill))

    seen = query_len * context - query_len * query_len / 2  # query-key pairs under the mask
    return Case(
        "paged_prefill",
        _shape(kv_dtype, B=sequences, Tq=query_len, S=context, Hq=HEADS, Hkv=KV_HEADS),
        sequences * (context * _kv_bytes(kv_dtype) + 2 * query_len * Q_TOKEN_BYTES),
        build,
        flops=4.0 * sequences * seen * HEADS * HEAD_DIM,
        tune_key=prefill_key(HEAD_DIM, HEADS // KV_HEADS, kv_dtype.itemsize),
        choices=PREFILL_CHOICES,
    )


def cases() -> list[Case]:
    """Decode over batch and context, prefill with and without a cached prefix."""
    return [
        *(_decode_case(*shape, BF16) for shape in DECODE),
        *(_decode_layer_case(*shape) for shape in DECODE_LAYER),
        *(_prefill_case(*shape, BF16) for shape in PREFILL),
        *(_decode_case(*shape, FP8) for shape in DECODE_FP8),
        *(_prefill_case(*shape, FP8) for shape in PREFILL),
    ]

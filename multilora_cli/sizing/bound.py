"""Lower bounds of time: bytes over the read rate, multiplications over the matrix rate.

A decode step reads the linears and the head once, every row's KV, and each distinct adapter once:
t >= (weights + sum of contexts x KV + sum of distinct adapters) / bandwidth. Prefill multiplies
2 x parameters x tokens, plus attention's triangle. Nothing reaches these; engines are compared by
the share of them that they reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from multilora_cli.sizing.budget import BaseBytes
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.hardware import Gpu

# Dense matrix multiplies of prefill shapes reach about this share of the datasheet rate (777 of
# 989 TFLOP/s for 4096^3 in BF16 on an H200 is 0.79; whole layers reach less).
PREFILL_SHARE = 0.6


@dataclass(frozen=True)
class DecodeBound:
    """One decode step's least time, by what is read. Bytes, and seconds in total."""

    weight_bytes: int
    kv_bytes: int
    adapter_bytes: int
    seconds: float


def read_bytes(base: BaseBytes) -> int:
    """Weight bytes one decode step reads: linears and head; the embedding is a gather of rows."""
    return base.linears + (base.head or base.embedding)


def decode_bound(
    base: BaseBytes, kv_per_token: int, contexts: Sequence[int], adapters: Sequence[int], gpu: Gpu
) -> DecodeBound:
    """A step over rows of `contexts` tokens and distinct adapters of `adapters` bytes."""
    weights, kv, lora = read_bytes(base), sum(contexts) * kv_per_token, sum(adapters)
    return DecodeBound(weights, kv, lora, (weights + kv + lora) / gpu.read_bytes_s)


def break_even(base: BaseBytes, adapter_bytes: int) -> int:
    """Distinct adapters in one step whose bytes equal the base's own."""
    return round(read_bytes(base) / adapter_bytes) if adapter_bytes else 0


def prefill_seconds(geometry: ModelGeometry, num_tokens: int, gpu: Gpu, *, fp8: bool) -> float:
    """Least time to prefill one prompt at the share of the matrix rate that layers reach."""
    linears = sum(d_in * d_out for d_in, d_out in geometry.module_shapes.values())
    flops = 2.0 * geometry.num_layers * linears * num_tokens
    flops += 2.0 * geometry.num_layers * geometry.q_size * num_tokens**2
    flops += 2.0 * geometry.vocab_size * geometry.hidden_size
    rate = gpu.fp8_tflops if fp8 and gpu.fp8_tflops else gpu.bf16_tflops
    return flops / (rate * 1e12 * PREFILL_SHARE)


def load_seconds(adapter_bytes: int, gpu: Gpu) -> float:
    """Least time from pinned host memory to the device."""
    return adapter_bytes / gpu.pcie_bytes_s

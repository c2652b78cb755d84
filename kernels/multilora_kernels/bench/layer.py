"""A decoder layer of Llama-3-8B without attention and rotation, as a step runs it.

Multiplies alone, one after another, hide what early launch and prefetching do between the small
kernels of a layer: here every multiply follows the kernel that makes its rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import linear

from multilora_kernels.awq_gemm import awq_gemm
from multilora_kernels.bench.gemm import SHAPES, Multiply, random_awq
from multilora_kernels.bench.timing import Built, Case, Run
from multilora_kernels.bf16_gemv import bf16_gemv
from multilora_kernels.fp8_gemm import fp8_gemm, quantise_weight
from multilora_kernels.fp8_quant import PER_ROW, quantise_rows
from multilora_kernels.rows import Rows, gated_rows, normed_rows

ROWS = (1, 2, 8, 16, 32, 64, 128, 256)
HIDDEN = 4096
# Bytes of a weight: bf16; e4m3; 4 bits and a scale and zero of 4 bytes for every 128.
_BYTES = {"bf16": 2.0, "fp8": 1.0, "awq": 0.5 + 4 / 128}
_LAYERS = 4

Weights = Mapping[str, Any]
Multiplication = Callable[[Rows, Any], torch.Tensor]


def _weights(base: str, device: torch.device) -> Weights:
    if base == "awq":
        return {name: random_awq(n, k, device) for name, (n, k) in SHAPES.items()}
    dense = {name: Multiply(name, 1, n, k).w(device, 1)[0] for name, (n, k) in SHAPES.items()}
    if base == "bf16":
        return dense
    return {name: quantise_weight(w) for name, w in dense.items()}


def _fp8(rows: Rows, weight: Any) -> torch.Tensor:
    xq, scale = rows.fp8 or quantise_rows(rows.x)
    return fp8_gemm(xq, scale, weight)


_OURS: Mapping[str, Multiplication] = {
    "bf16": lambda rows, w: bf16_gemv(rows.x, w),
    "fp8": _fp8,
    "awq": lambda rows, w: awq_gemm(rows.x, w),
}


def _layer_case(base: str, m: int) -> Case:
    weight_bytes = sum(n * k for n, k in SHAPES.values()) * _BYTES[base]

    def build(device: torch.device) -> Built:
        layers = [_weights(base, device) for _ in range(_LAYERS)]
        norm = torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)
        x = [torch.randn(m, HIDDEN, device=device, dtype=torch.bfloat16) for _ in layers]
        residual = [torch.randn_like(each) for each in x]
        scaling = PER_ROW if base == "fp8" else None

        def bind(multiply: Multiplication) -> Run:
            def run(i: int) -> torch.Tensor:
                w = layers[i]
                rows = normed_rows(x[i].clone(), residual[i], norm, 1e-5, scaling)
                # The queries stand in for what attention makes of them.
                y = multiply(Rows(multiply(rows, w["qkv"])[:, :HIDDEN]), w["o"])
                gate_up = multiply(normed_rows(y, residual[i], norm, 1e-5, scaling), w["gate_up"])
                return multiply(gated_rows(gate_up, scaling), w["down"])

            return run

        variants = {"ours": bind(_OURS[base])}
        if base == "bf16":
            variants["cuBLAS bf16"] = bind(lambda rows, w: linear(rows.x, w))
        return Built(_LAYERS, variants)

    return Case("layer", {"base": base, "M": m}, weight_bytes, build)


def cases() -> list[Case]:
    """Every base at the rows of decode steps."""
    return [_layer_case(base, m) for base in _BYTES for m in ROWS]

"""Base multiplies at Llama-3-8B's four shapes: 4-bit, FP8 and 16-bit weights.

Beside ours, in the same run: cuBLAS in bf16, torch's own 4-bit kernel (tinygemm), dequantising
the whole weight before cuBLAS, and `torch._scaled_mm` per tensor and by rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from multilora_kernels import awq_gemm as awq
from multilora_kernels import awq_hopper, bf16_rows, hopper_choice
from multilora_kernels import fp8_gemm as fp8
from multilora_kernels import fp8_weight_only as wide
from multilora_kernels.awq_gemm import AwqWeight
from multilora_kernels.bench.timing import Built, Case, Run, sets_needed
from multilora_kernels.bf16_gemv import GemvLaunch, bf16_gemv, run_gemv
from multilora_kernels.fp8_quant import (
    RowScaling,
    quantise_rows,
    rms_norm_quantise,
    silu_mul_quantise,
)
from multilora_kernels.launch import Chip, chip_of, next_power_of_2
from multilora_kernels.slices import slice_rows
from multilora_kernels.split_k import BLOCK_K, Tile, bucket_of

SHAPES: Mapping[str, tuple[int, int]] = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
GROUP = 128
# tinygemm grows with M (0.1 ms at 64): not run where nobody would use it.
_TINYGEMM_ROWS = 16

_TILES: Sequence[Mapping[str, Any]] = tuple(
    {"block_n": block_n, "num_warps": warps, "num_stages": stages, "pdl": pdl}
    for block_n, warps in ((64, 2), (64, 4), (128, 2), (128, 4), (128, 8))
    for stages in (3, 4, 6)
    for pdl in (False, True)
)
_GEMV: Sequence[Mapping[str, Any]] = tuple(
    {"block_n": block_n, "block_k": block_k, "unroll": unroll, "num_warps": warps}
    for block_n in (1, 2, 4)
    for block_k in (512, 1024, 2048)
    for unroll in (2, 4)
    for warps in (2, 4, 8)
)
# (block_n, stages): what fits an H200 without spilling in its loops.
_HOPPER = ((128, 5), (256, 4), (448, 4))
_ROWS: Sequence[Mapping[str, Any]] = tuple(
    {"block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "split_k": split}
    for n, k, warps, stages in ((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 8, 4), (128, 128, 8, 3))
    for split in (1, 2, 4)
)


@dataclass(frozen=True)
class Multiply:
    """x [m, k] times weights [n, k], under the name the model knows it by."""

    name: str
    m: int
    n: int
    k: int

    def bytes(self, weight_bytes: float) -> float:
        """Weights, x and y, each once."""
        return weight_bytes + 2.0 * self.m * (self.k + self.n)

    def tune_key(self, smallest: int = 8) -> str:
        """The tile's key in the tuned table."""
        return f"n{self.n}-k{self.k}-m{bucket_of(self.m, smallest)}"

    def x(self, device: torch.device, count: int) -> list[torch.Tensor]:
        """`count` random inputs."""
        shape = (self.m, self.k)
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]

    def w(self, device: torch.device, count: int) -> list[torch.Tensor]:
        """`count` random 16-bit weights."""
        shape = (self.n, self.k)
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) / 64 for _ in range(count)]


def _chip(device: torch.device) -> Chip:
    return chip_of(device.index or 0)


def random_awq(n: int, k: int, device: torch.device) -> AwqWeight:
    """A random packed 4-bit weight of group 128, made on the device."""
    words = torch.randint(-(2**15), 2**15, (k // 128, n, 32), dtype=torch.int16, device=device)
    scale = (torch.rand((k // 128, 1, n), device=device) * 0.01 + 0.005).half()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.int32, device=device)
    meta = (scale.view(torch.int16).int() << 16) | zero
    counters = torch.zeros(n // 64, dtype=torch.int32, device=device)
    return AwqWeight(words, meta, counters, n, k, torch.float16)


def _chosen(tile: object, choice: Mapping[str, Any], device: torch.device) -> Tile:
    """`tile` under a choice of --tune, early launch only where the card has it."""
    assert isinstance(tile, Tile)
    chosen = replace(tile, **choice)
    return replace(chosen, pdl=chosen.pdl and _chip(device).has_pdl)


def _tinygemm(
    multiply: Multiply, x: Sequence[torch.Tensor], device: torch.device, count: int
) -> Run:
    n, k = multiply.n, multiply.k
    pack = torch.ops.aten._convert_weight_to_int4pack
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    packed = [pack(codes, 8) for _ in range(count)]
    meta = torch.rand((k // GROUP, n, 2), device=device, dtype=torch.bfloat16)
    return lambda i: torch.ops.aten._weight_int4pack_mm(x[i], packed[i], GROUP, meta)


def _awq_case(multiply: Multiply) -> Case:
    n, k, m = multiply.n, multiply.k, multiply.m
    weight_bytes = n * k / 2 + n * k / GROUP * 4

    def build(device: torch.device) -> Built:
        count = sets_needed(weight_bytes)
        weights = [random_awq(n, k, device) for _ in range(count)]
        x, w = multiply.x(device, count), multiply.w(device, count)
        variants: dict[str, Run] = {
            "ours": lambda i: awq.awq_gemm(x[i], weights[i]),
            "cuBLAS bf16": lambda i: linear(x[i], w[i]),
            "dequantise all + cuBLAS": lambda i: linear(x[i], weights[i].dequantise()),
        }
        if m <= _TINYGEMM_ROWS:
            variants["tinygemm"] = _tinygemm(multiply, x, device, count)

        def with_choice(choice: Mapping[str, Any]) -> Run:
            tile = awq.choose_launch(m, n, k, _chip(device)).tile
            chosen = _chosen(tile, choice, device)
            return lambda i: awq.run_fused(x[i], weights[i], chosen)

        return Built(count, variants, with_choice)

    return Case(
        op=awq.OP,
        shape={"proj": multiply.name, "M": m, "N": n, "K": k},
        bytes=multiply.bytes(weight_bytes),
        build=build,
        flops=2.0 * m * n * k,
        tune_key=multiply.tune_key(),
        choices=_TILES if m in (4, 16, 32, 64) else (),
    )


def _hopper_choices(multiply: Multiply) -> list[dict[str, int]]:
    """Tiles of `awq_hopper`, with splits of K that give every multiprocessor work."""
    found = []
    for block_n, stages in _HOPPER:
        launch = hopper_choice.HopperLaunch(block_n=block_n, num_stages=stages)
        rows, outputs, _ = launch.grid(multiply.m, multiply.n)
        for split in range(1, 9):
            if split > 1 and (block_n == 448 or rows * outputs * split > 160):
                continue
            if split == 1 or multiply.k // BLOCK_K // split >= 4:
                found.append({"block_n": block_n, "num_stages": stages, "split_k": split})
    return found


def _hopper_case(multiply: Multiply) -> Case:
    """The search of `awq_hopper`'s tiles; "ours" is what awq_gemm chooses, which may be another."""
    n, k, m = multiply.n, multiply.k, multiply.m
    weight_bytes = n * k / 2 + n * k / GROUP * 4

    def build(device: torch.device) -> Built:
        count = sets_needed(weight_bytes)
        weights = [random_awq(n, k, device) for _ in range(count)]
        x, w = multiply.x(device, count), multiply.w(device, count)
        variants: dict[str, Run] = {
            "ours": lambda i: awq.awq_gemm(x[i], weights[i]),
            "dequantise slices + cuBLAS": lambda i: awq.run_sliced(
                x[i], weights[i], slice_rows(n, k)
            ),
            "cuBLAS bf16": lambda i: linear(x[i], w[i]),
        }

        def with_choice(choice: Mapping[str, Any]) -> Run:
            chosen = hopper_choice.HopperLaunch(**choice)
            return lambda i: awq_hopper.run_hopper(x[i], weights[i], chosen)

        return Built(count, variants, with_choice)

    return Case(
        op=hopper_choice.OP,
        shape={"proj": multiply.name, "M": m, "N": n, "K": k},
        bytes=multiply.bytes(weight_bytes),
        build=build,
        flops=2.0 * m * n * k,
        tune_key=f"n{n}-k{k}-m{next_power_of_2(m)}",
        choices=_hopper_choices(multiply),
    )


def _per_tensor(x: torch.Tensor, w: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)
    return y


def _fp8_case(multiply: Multiply, blockwise: bool) -> Case:
    n, k, m = multiply.n, multiply.k, multiply.m

    def build(device: torch.device) -> Built:
        count = sets_needed(n * k)
        group = GROUP if blockwise else 0
        weights = [fp8.quantise_weight(w) for w in multiply.w(device, count)]
        if blockwise:
            scale = torch.rand((n // 128, k // 128), device=device) * 0.01
            weights = [fp8.fp8_weight(weight.q, scale) for weight in weights]
        x = multiply.x(device, count)
        rows = [quantise_rows(each, RowScaling(group)) for each in x]
        one = torch.ones(1, device=device)
        variants: dict[str, Run] = {
            "ours": lambda i: fp8.fp8_gemm(*rows[i], weights[i]),
            "ours, x quantised by its own kernel": lambda i: weights[i].matmul(x[i]),
            "_scaled_mm per tensor": lambda i: _per_tensor(rows[i][0], weights[i].q, one),
        }
        if not blockwise:
            variants["_scaled_mm by rows"] = lambda i: fp8.run_rowwise(*rows[i], weights[i])

        def with_choice(choice: Mapping[str, Any]) -> Run:
            tile = fp8.choose_launch(m, n, k, _chip(device), blockwise)
            chosen = _chosen(tile, choice, device)
            return lambda i: fp8.run_split(*rows[i], weights[i], torch.bfloat16, chosen)

        return Built(count, variants, with_choice)

    return Case(
        op=fp8.OP,
        shape={
            "proj": multiply.name,
            "M": m,
            "N": n,
            "K": k,
            "scales": "block" if blockwise else "channel",
        },
        bytes=multiply.bytes(float(n * k)) - m * k,
        build=build,
        flops=2.0 * m * n * k,
        rate="fp8",
        tune_key=multiply.tune_key(16),
        choices=_TILES if m in (16, 32, 64) and not blockwise else (),
    )


def _weight_only_case(multiply: Multiply) -> Case:
    n, k, m = multiply.n, multiply.k, multiply.m

    def build(device: torch.device) -> Built:
        count = sets_needed(n * k)
        x, w = multiply.x(device, count), multiply.w(device, count)
        weights = [wide.pack_weight_only(fp8.quantise_weight(each)) for each in w]
        variants: dict[str, Run] = {
            "ours": lambda i: wide.fp8_weight_only(x[i], weights[i]),
            "cuBLAS bf16": lambda i: linear(x[i], w[i]),
        }

        def with_choice(choice: Mapping[str, Any]) -> Run:
            tile = wide.choose_launch(m, n, k, _chip(device))[0]
            chosen = _chosen(tile, choice, device)
            return lambda i: wide.run_fused(x[i], weights[i], chosen)

        return Built(count, variants, with_choice)

    return Case(
        op=wide.OP,
        shape={"proj": multiply.name, "M": m, "N": n, "K": k},
        bytes=multiply.bytes(float(n * k)),
        build=build,
        flops=2.0 * m * n * k,
        tune_key=multiply.tune_key(),
        choices=_TILES if m in (4, 16, 32, 64) else (),
    )


def _gemv_case(multiply: Multiply) -> Case:
    n, k, m = multiply.n, multiply.k, multiply.m

    def build(device: torch.device) -> Built:
        count = sets_needed(2.0 * n * k)
        x, w = multiply.x(device, count), multiply.w(device, count)
        variants: dict[str, Run] = {
            "ours": lambda i: bf16_gemv(x[i], w[i]),
            "cuBLAS bf16": lambda i: linear(x[i], w[i]),
        }

        def with_choice(choice: Mapping[str, Any]) -> Run:
            chosen = GemvLaunch(**choice, pdl=_chip(device).has_pdl)
            return lambda i: run_gemv(x[i], w[i], chosen)

        return Built(count, variants, with_choice)

    return Case(
        op="bf16_gemv",
        shape={"proj": multiply.name, "M": m, "N": n, "K": k},
        bytes=multiply.bytes(2.0 * n * k),
        build=build,
        flops=2.0 * m * n * k,
        tune_key=f"n{n}-k{k}",
        choices=_GEMV if m == 1 else (),
    )


def _rows_case(multiply: Multiply) -> Case:
    n, k, m = multiply.n, multiply.k, multiply.m
    block_m = bucket_of(m, 16)

    def build(device: torch.device) -> Built:
        count = sets_needed(2.0 * n * k)
        x, w = multiply.x(device, count), multiply.w(device, count)
        variants: dict[str, Run] = {
            "ours": lambda i: bf16_gemv(x[i], w[i]),
            "cuBLAS bf16": lambda i: linear(x[i], w[i]),
        }

        def with_choice(choice: Mapping[str, Any]) -> Run:
            rest = {key: value for key, value in choice.items() if key != "block_k"}
            tile = Tile(block_m=block_m, pdl=_chip(device).has_pdl, **rest)
            chosen = bf16_rows.RowsLaunch(tile, choice["block_k"])
            return lambda i: bf16_rows.run_rows(x[i], w[i], chosen)

        return Built(count, variants, with_choice)

    return Case(
        op=bf16_rows.OP,
        shape={"proj": multiply.name, "M": m, "N": n, "K": k},
        bytes=multiply.bytes(2.0 * n * k),
        build=build,
        flops=2.0 * m * n * k,
        tune_key=f"n{n}-k{k}-m{block_m}",
        choices=_ROWS,
    )


def _norm_case(m: int, k: int) -> Case:
    def build(device: torch.device) -> Built:
        count = sets_needed(m * k * 3.0)
        x = [torch.randn((m, k), device=device, dtype=torch.bfloat16) for _ in range(count)]
        w = torch.ones(k, device=device, dtype=torch.bfloat16)
        variants: dict[str, Run] = {
            "ours": lambda i: rms_norm_quantise(x[i], w, 1e-5),
            "rms_norm alone": lambda i: rms_norm(x[i], (k,), w, 1e-5),
            "rms_norm, quantise_rows": lambda i: quantise_rows(rms_norm(x[i], (k,), w, 1e-5)),
        }
        return Built(count, variants)

    return Case("rms_norm_quantise", {"M": m, "K": k}, m * k * 3.0, build)


def _silu_case(m: int, k: int) -> Case:
    def build(device: torch.device) -> Built:
        count = sets_needed(m * k * 5.0)
        x = [torch.randn((m, 2 * k), device=device, dtype=torch.bfloat16) for _ in range(count)]
        variants: dict[str, Run] = {
            "ours": lambda i: silu_mul_quantise(x[i]),
            "silu, multiply": lambda i: silu(x[i][:, :k]) * x[i][:, k:],
            "silu, multiply, quantise_rows": lambda i: quantise_rows(
                silu(x[i][:, :k]) * x[i][:, k:]
            ),
        }
        return Built(count, variants)

    return Case("silu_mul_quantise", {"M": m, "K": k}, m * k * 5.0, build)


def _grid(rows: Sequence[int], make: Callable[[Multiply], Case]) -> list[Case]:
    # By rows first: a small multiply measured after a large one finds the clocks still low.
    return [make(Multiply(name, m, n, k)) for m in rows for name, (n, k) in SHAPES.items()]


def cases() -> list[Case]:
    """Every base multiply that is timed."""
    return [
        *_grid(ROWS, _awq_case),
        *_grid(ROWS, lambda multiply: _fp8_case(multiply, blockwise=False)),
        *_grid((1, 16, 64, 128, 256, 2048), lambda multiply: _fp8_case(multiply, blockwise=True)),
        *_grid((1, 16, 64, 2048), _weight_only_case),
        *_grid((96, 128, 192, 256, 512, 1024, 2048), _hopper_case),
        *_grid((1, 2, 4), _gemv_case),
        *_grid((2, 8, 16, 32, 64), _rows_case),
        *(_norm_case(m, 4096) for m in (1, 16, 64, 2048)),
        *(_silu_case(m, 14336) for m in (1, 16, 64, 2048)),
    ]

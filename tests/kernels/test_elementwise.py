"""rms_norm, add_rms_norm, silu_mul and rope_store_kv: against plain torch, and interpreted."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from multilora_kernels.kv_pages import KvLayer
from multilora_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_kernel, rms_norm_ref
from multilora_kernels.rope_store_kv import (
    HeadNorm,
    launch_choice,
    rope_store_kv,
    rope_store_kv_kernel,
    rope_store_kv_ref,
    rope_tables,
    rope_tables_kernel,
)
from multilora_kernels.silu_mul import silu_mul, silu_mul_kernel
from tests.kernels.aot import ARCHITECTURES, assert_fits, assert_waits_first

# Two units in the last place, relative; the interpreter rounds bf16 towards zero at every step.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
if os.environ.get("TRITON_INTERPRET") == "1":
    TOLERANCE[torch.bfloat16] *= 2
DTYPES = list(TOLERANCE)
EPS = 1e-5

Arguments = tuple[Any, dict[str, str], dict[str, Any], int]
"""A kernel, its signature, its constants without PDL, and its warps."""

NORM: Arguments = (
    rms_norm_kernel,
    {
        **dict.fromkeys(("out_ptr", "x_ptr", "residual_ptr", "weight_ptr"), "*bf16"),
        **{"stride_xt": "i32:16", "stride_xh": "i32:16", "heads": "i32", "eps": "fp32"},
    },
    {"SIZE": 4096, "BLOCK": 4096, "ADDED": True},
    8,
)
SILU: Arguments = (
    silu_mul_kernel,
    {"out_ptr": "*bf16", "x_ptr": "*bf16", "stride_xt": "i32:16", "size": "i32:16"},
    {"BLOCK": 1024},
    4,
)


def rope_arguments(pages: str) -> Arguments:
    names = ("out_ptr", "packed_ptr", "q_weight_ptr", "k_weight_ptr")
    signature = {**dict.fromkeys(names, "*bf16"), "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    signature |= {"pages_ptr": pages, "slot_mapping_ptr": "*i64", "eps": "fp32"}
    signature |= dict.fromkeys(("stride_pt", "page_elements", "layer_start"), "i32:16")
    choice = launch_choice(64)
    warps = choice.pop("num_warps")
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "TOKENS": 16, "NORMED": True}
    return rope_store_kv_kernel, signature, {**heads, **choice}, warps


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape and out.dtype == expected.dtype
    allowed = TOLERANCE[out.dtype] * (1 + expected.double().abs())
    assert ((out.double() - expected.double()).abs() <= allowed).all()  # NaN fails too


def check_norms(size: int, dtype: torch.dtype, device: str) -> None:
    packed = draw(5, 3, size, dtype=dtype, device=device)
    weight = draw(size, dtype=dtype, device=device, seed=1)
    expected = F.rms_norm(packed.double(), (size,), weight.double(), EPS).to(dtype)
    close(rms_norm(packed[:, 1:], weight, EPS), expected[:, 1:])
    close(rms_norm(packed[:, 0], weight, EPS), expected[:, 0])
    x, residual = packed[:, 0], packed[:, 1].clone()
    total = residual + x
    out = add_rms_norm(x, residual, weight, EPS)
    close(residual, total)
    close(out, rms_norm_ref(total, weight, EPS))
    residual, own = packed[:, 1].clone(), x.clone()
    assert add_rms_norm(own, residual, weight, EPS, out=own) is own
    assert torch.equal(own, out)


def check_silu(size: int, dtype: torch.dtype, device: str) -> None:
    x = draw(3, 2 * size + 8, dtype=dtype, device=device)[:, : 2 * size]
    gate, up = x.double().chunk(2, -1)
    close(silu_mul(x), (F.silu(gate) * up).to(dtype))


def check_rope(heads: tuple[int, int, int], normed: bool, dtype: torch.dtype, device: str) -> None:
    num_heads, kv_heads, dim = heads
    packed = draw(6, num_heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    angles = draw(6, 1, dim // 2, dtype=torch.float32, device=device, seed=2)
    tables = (angles.cos(), angles.sin())
    norm = None
    if normed:
        norm = HeadNorm(*(draw(dim, dtype=dtype, device=device, seed=3 + n) for n in (0, 1)), EPS)
    slots = torch.tensor([5, 40, -1, 16, 63, 0], device=device)
    pool = torch.zeros(4, 3 * 2 * kv_heads * 16 * dim, dtype=dtype, device=device)
    expected_pool = pool.clone()
    kv, expected_kv = (
        KvLayer(where.view(torch.uint8), 1, kv_heads, dim, dtype) for where in (pool, expected_pool)
    )
    out = rope_store_kv(packed, tables, kv, slots, norm)
    expected = rope_store_kv_ref(packed, tables, expected_kv, slots, norm)
    close(out, expected)
    close(pool, expected_pool)
    view = pool.view(4, 3, 2, kv_heads, 16, dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:  # V as it came
            assert torch.equal(view[slot // 16, 1, 1, :, slot % 16], packed[token, -kv_heads:])


def check_tables(half: int, device: str) -> None:
    positions = torch.tensor([0, 1, 8191, 131071, 1048575], device=device)
    frequencies = 5e5 ** -(torch.arange(half, dtype=torch.float64) / half)
    frequencies = frequencies.float().to(device)
    angles = (positions.float()[:, None, None] * frequencies).double()  # rounded to fp32 once
    cos, sin = rope_tables(positions, frequencies, 1.25)
    for out, expected in ((cos, angles.cos() * 1.25), (sin, angles.sin() * 1.25)):
        assert out.shape == (5, 1, half) and out.dtype == torch.float32
        assert float((out.double() - expected).abs().max()) < 5e-7


Check = Callable[[torch.dtype, str], None]
CHECKS: dict[str, Check] = {
    "norm-48": lambda dtype, device: check_norms(48, dtype, device),
    "norm-4096": lambda dtype, device: check_norms(4096, dtype, device),
    "silu-96": lambda dtype, device: check_silu(96, dtype, device),
    "silu-1100": lambda dtype, device: check_silu(1100, dtype, device),
    "rope-128": lambda dtype, device: check_rope((4, 2, 128), False, dtype, device),
    "rope-80": lambda dtype, device: check_rope((3, 1, 80), True, dtype, device),
    "rope-16": lambda dtype, device: check_rope((28, 4, 16), True, dtype, device),
    "tables-64": lambda _, device: check_tables(64, device),
    "tables-40": lambda _, device: check_tables(40, device),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_elementwise_on_cpu(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](dtype, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_elementwise_interpreted(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_elementwise_gpu(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](dtype, "cuda")


def test_rope_turns_a_known_vector() -> None:
    """A quarter turn moves the first half to the second: q = (1, 0) becomes (0, 1)."""
    packed = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [3.0, 4.0]]])
    tables = (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    pool = torch.zeros(1, 2 * 16 * 2)
    slots = torch.tensor([7])
    kv = KvLayer(pool.view(torch.uint8), 0, 1, 2, torch.float32)
    out = rope_store_kv(packed, tables, kv, slots)
    assert out.tolist() == [[[0.0, 1.0]]]
    pages = pool.view(2, 16, 2)
    assert pages[0, 7].tolist() == [0.0, 1.0] and pages[1, 7].tolist() == [3.0, 4.0]
    assert pages.count_nonzero() == 3


def test_no_tokens() -> None:
    weight = torch.ones(8)
    assert rms_norm(torch.empty(0, 8), weight, EPS).shape == (0, 8)
    assert silu_mul(torch.empty(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_elementwise_compiles(sm: int) -> None:
    kernels = [NORM, SILU, rope_arguments("*bf16")]
    kernels.append(rope_arguments("*fp8e4nv" if sm >= 89 else "*u8"))
    for kernel, signature, constants, warps in kernels:
        assert_fits(kernel, signature, {**constants, "PDL": sm >= 90}, sm, warps)
    signature = dict.fromkeys(("cos_ptr", "sin_ptr", "frequencies_ptr"), "*fp32")
    signature |= {"positions_ptr": "*i64", "scale": "fp32"}
    assert_fits(rope_tables_kernel, signature, {"HALF": 64, "BLOCK": 64}, sm, 1)


def test_early_launches_wait_before_they_read() -> None:
    """What the kernel before still writes must not be read, nor a third one be let in."""
    for kernel, signature, constants, warps in (NORM, SILU, rope_arguments("*bf16")):
        assert_waits_first(kernel, signature, constants, warps)

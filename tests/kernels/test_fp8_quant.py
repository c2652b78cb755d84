"""Row-wise FP8 quantisation: alone and fused, beside the two-step reference."""

import pytest
import torch

from multilora_kernels.fp8_quant import (
    E4M3_MAX,
    RowScaling,
    quantise_rows,
    quantise_rows_ref,
    rms_norm_quantise,
    silu_mul_quantise,
)
from multilora_kernels.rms_norm import add_rms_norm_ref, rms_norm_ref
from multilora_kernels.silu_mul import silu_mul_ref

SEED = 7


def random_x(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator) * 10
    return x.to(dtype).to(device)


def dequantised(q: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    if group:
        return q.float() * scale.repeat_interleave(group, dim=1)[:, : q.shape[1]]
    return q.float() * scale[:, None]


def assert_close_codes(q: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Neighbouring codes at most, and no more than `share` of them."""
    ours, theirs = (t.view(torch.uint8).to(torch.int16) for t in (q, expected))
    off = (ours - theirs).abs()
    assert int(off.max()) <= 1 and float((off > 0).float().mean()) <= share


@pytest.mark.parametrize("group", [0, 128])
def test_reference_keeps_three_bits_of_mantissa(group: int) -> None:
    x = random_x(9, 320, torch.bfloat16)
    q, scale = quantise_rows(x, RowScaling(group))
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale.shape == ((9, 3) if group else (9,))
    back = dequantised(q, scale, group)
    error = (back - x.float()).abs()
    # Half a unit of 3 mantissa bits, or half the smallest subnormal.
    spread = scale.repeat_interleave(128, dim=1)[:, :320] if group else scale[:, None]
    assert bool((error <= x.float().abs() / 16 + spread * 2.0**-10).all())
    assert float(q.float().abs().max()) == E4M3_MAX


def test_a_zero_row_and_a_nan_row() -> None:
    x = random_x(3, 128, torch.bfloat16)
    expected_q, expected_scale = quantise_rows(x)
    x[0] = 0.0
    x[1, 5] = float("nan")
    q, scale = quantise_rows(x)
    assert not q[0].float().any() and bool(scale[0].isfinite())
    assert bool(scale[1].isnan()) and bool(q[1].float().isnan().any())
    assert torch.equal(q[2].view(torch.uint8), expected_q[2].view(torch.uint8))
    assert scale[2] == expected_scale[2]


def test_static_scale_and_upper_bound_saturate() -> None:
    x = torch.tensor([[1.0, -1000.0, 3.0]], dtype=torch.bfloat16)
    static = torch.tensor([0.5])
    q, scale = quantise_rows(x, RowScaling(static_scale=static))
    assert scale.data_ptr() == static.data_ptr()
    assert q.float().tolist() == [[2.0, -448.0, 6.0]]
    q, scale = quantise_rows(x, RowScaling(upper_bound=448.0))
    assert scale.tolist() == [1.0] and q.float().tolist() == [[1.0, -448.0, 3.0]]


def test_a_lora_branch_gets_the_unquantised_activation() -> None:
    """A-CFG-30."""
    x, gate_up = random_x(3, 64, torch.bfloat16), random_x(3, 128, torch.bfloat16)
    weight = random_x(1, 64, torch.bfloat16)[0]
    out = torch.empty_like(x)
    rms_norm_quantise(x, weight, 1e-5, out=out)
    assert torch.equal(out, rms_norm_ref(x, weight, 1e-5))
    rms_norm_quantise(x, weight, 1e-5, out=x)
    assert torch.equal(x, out)
    silu_mul_quantise(gate_up, out=out)
    assert torch.equal(out, silu_mul_ref(gate_up))


def test_residual_becomes_the_sum() -> None:
    x, residual = random_x(2, 64, torch.bfloat16), random_x(2, 64, torch.bfloat16) * 0.5
    weight = torch.ones(64, dtype=torch.bfloat16)
    total = (x.float() + residual.float()).bfloat16()
    rms_norm_quantise(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)


@pytest.mark.interpreter
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("k", [96, 128, 320])
def test_kernels_match_reference(k: int, group: int) -> None:
    x = random_x(3, k, torch.float16)
    weight = random_x(1, k, torch.float16)[0]
    residual = random_x(3, k, torch.float16) * 0.25
    expected_residual = residual.clone()
    gate_up = random_x(3, 2 * k, torch.float16)
    normed, product = torch.empty_like(x), torch.empty_like(x)
    pairs = [
        (quantise_rows(x, RowScaling(group)), quantise_rows_ref(x, RowScaling(group))),
        (
            rms_norm_quantise(x, weight, 1e-5, residual, RowScaling(group), out=normed),
            quantise_rows_ref(
                add_rms_norm_ref(x, expected_residual, weight, 1e-5), RowScaling(group)
            ),
        ),
        (
            silu_mul_quantise(gate_up, RowScaling(group), out=product),
            quantise_rows_ref(silu_mul_ref(gate_up), RowScaling(group)),
        ),
    ]
    expected = rms_norm_ref(expected_residual, weight, 1e-5)
    assert torch.allclose(normed, expected, rtol=4e-3, atol=1e-3)
    assert torch.allclose(product, silu_mul_ref(gate_up), rtol=4e-3, atol=1e-3)
    for (q, scale), (expected_q, expected_scale) in pairs:
        assert torch.allclose(scale, expected_scale, rtol=4e-3)
        # The interpreter keeps fp32 between the steps and truncates: neighbouring codes.
        back, wanted = (dequantised(*pair, group) for pair in ((q, scale), (expected_q, scale)))
        step = wanted.abs() / 8 + dequantised(torch.ones_like(q), scale, group) * 2.0**-9
        assert bool(((back - wanted).abs() <= step * 1.01).all())
    assert torch.allclose(residual, expected_residual, rtol=2e-3, atol=1e-3)
    own = x.clone()
    q, _ = rms_norm_quantise(own, weight, 1e-5, residual * 0, RowScaling(group), out=own)
    expected, _ = rms_norm_quantise(x, weight, 1e-5, residual * 0, RowScaling(group))
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    assert torch.allclose(own, rms_norm_ref(x, weight, 1e-5), rtol=4e-3, atol=1e-3)


@pytest.mark.interpreter
def test_kernel_keeps_nan_to_its_row() -> None:
    x = random_x(3, 128, torch.float16)
    clean_q, clean_scale = quantise_rows(x)
    x[1, 7] = float("nan")
    q, scale = quantise_rows(x)
    assert bool(scale[1].isnan())
    keep = [0, 2]
    assert torch.equal(scale[keep], clean_scale[keep])
    assert torch.equal(q[keep].view(torch.uint8), clean_q[keep].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("k", [576, 1000, 4096, 14336])
def test_device_matches_reference(k: int, group: int, dtype: torch.dtype) -> None:
    x = random_x(17, k, dtype, "cuda")
    weight = random_x(1, k, dtype, "cuda")[0]
    residual = random_x(17, k, dtype, "cuda")
    expected_residual = residual.clone()
    gate_up = random_x(17, 2 * k, dtype, "cuda")
    q, scale = quantise_rows(x, RowScaling(group))
    expected_q, expected_scale = quantise_rows_ref(x, RowScaling(group))
    assert torch.allclose(scale, expected_scale, rtol=1e-6)
    assert_close_codes(q, expected_q, 1e-3)
    out = torch.empty_like(x)
    q, scale = rms_norm_quantise(x, weight, 1e-5, residual, RowScaling(group), out=out)
    normed = add_rms_norm_ref(x, expected_residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert torch.allclose(out, normed, rtol=1e-2, atol=1e-3)
    # Quantising what the kernel itself made: the reduction's last bit is no part of this check.
    expected_q, expected_scale = quantise_rows_ref(out, RowScaling(group))
    assert torch.allclose(scale, expected_scale, rtol=1e-2)
    back, wanted = dequantised(q, scale, group), dequantised(expected_q, expected_scale, group)
    assert float((back - wanted).norm() / wanted.norm()) < 2e-2
    q, scale = silu_mul_quantise(gate_up, RowScaling(group), out=out)
    assert torch.allclose(out, silu_mul_ref(gate_up), rtol=1e-2, atol=1e-3)
    expected_q, expected_scale = quantise_rows_ref(out, RowScaling(group))
    back, wanted = dequantised(q, scale, group), dequantised(expected_q, expected_scale, group)
    assert float((back - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.gpu
def test_device_keeps_nan_to_its_row() -> None:
    x = random_x(5, 4096, torch.bfloat16, "cuda")
    clean_q, clean_scale = quantise_rows(x)
    x[3, 77] = float("nan")
    q, scale = quantise_rows(x)
    keep = [0, 1, 2, 4]
    assert bool(scale[3].isnan()) and torch.equal(scale[keep], clean_scale[keep])
    assert torch.equal(q[keep].view(torch.uint8), clean_q[keep].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_device_saturates(dtype: torch.dtype) -> None:
    """A static scale that is too small, a bound below the largest, infinities and NaN."""
    x = random_x(4, 4096, dtype, "cuda")
    x[1, 5], x[2, 6], x[3, 7] = float("inf"), float("-inf"), float("nan")
    for scaling in (RowScaling(0, torch.full((1,), 1e-3, device="cuda")), RowScaling(0, None, 0.5)):
        q, _ = quantise_rows(x, scaling)
        expected, _ = quantise_rows_ref(x, scaling)
        assert int((expected.float().abs() == 448).sum()) > 1000
        assert torch.equal(q[3].float().isnan(), expected[3].float().isnan())
        assert_close_codes(q[:3], expected[:3], 1e-3)

"""K and V in FP8: every code, every rounding case, and which bytes a store writes."""

import pytest
import torch
import triton
import triton.language as tl

from multilora_kernels.kv_pages import FP8, KvLayer, narrow_kv, to_kv, widen_kv
from multilora_kernels.rope_store_kv import rope_store_kv, rope_store_kv_ref

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@triton.jit
def _widen_all(codes_ptr, out_ptr, SIZE: tl.constexpr, COMPUTE: tl.constexpr):
    i = tl.arange(0, SIZE)
    value = widen_kv(tl.load(codes_ptr + i), COMPUTE)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty))


@triton.jit
def _narrow_all(values_ptr, codes_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(codes_ptr + i, narrow_kv(tl.load(values_ptr + i), codes_ptr.dtype.element_ty))


def hard_values() -> torch.Tensor:
    """Every code's value, the midpoints between neighbours and what lies just beside both."""
    exact = CODES.view(FP8).float()
    finite = exact[exact.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    points = torch.cat([finite, middle])
    down = torch.nextafter(points, torch.tensor(-1e9))
    up = torch.nextafter(points, torch.tensor(1e9))
    special = [0.0, -0.0, 1e-30, -1e-42, 456.0, 464.0, 465.0, 1e9, -1e9]
    edges = torch.tensor([*special, float("inf"), float("-inf"), float("nan")])
    values = torch.cat([points, down, up, edges])
    size = 1 << (len(values) - 1).bit_length()
    return torch.cat([values, torch.randn(size - len(values), generator=seeded()) * 8])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def check_codes(device: str, raw: bool) -> None:
    """All 256 codes; `raw`: handed over as uint8."""
    codes = CODES.to(device)
    expected = codes.view(FP8).float()
    for dtype in (tl.float32, tl.bfloat16, tl.float16)[: 1 if device == "cpu" else 3]:
        out = torch.empty(256, device=device)
        _widen_all[(1,)](codes if raw else codes.view(FP8), out, 256, dtype)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def check_rounding(device: str, raw: bool) -> None:
    values = hard_values().to(device)
    codes = torch.zeros(len(values), dtype=torch.uint8, device=device)
    _narrow_all[(1,)](values, codes if raw else codes.view(FP8), len(values))
    found, expected = codes.view(FP8).float(), to_kv(values.cpu(), FP8).float().to(device)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[:-1000], expected.signbit()[:-1000])


def check_store(dtype: torch.dtype, device: str) -> None:
    """The same bytes as in torch; nothing outside the tokens changes."""
    heads, dim, layers, pages = 2, 48, 3, 4
    packed = (torch.randn(6, 4 + 2 * heads, dim, generator=seeded()) * 200).to(dtype).to(device)
    packed[3, 5, 7] = float("nan")
    slots = torch.tensor([5, 40, -1, 16, 63, 0], device=device)
    pool = torch.randint(0, 256, (pages, layers * 2 * heads * 16 * dim), generator=seeded())
    pool = pool.to(torch.uint8).to(device)
    angles = torch.randn(6, 1, dim // 2, generator=seeded()).to(device)
    tables = (angles.cos(), angles.sin())
    turned, other = pool.clone(), pool.clone()
    kv, kv_ref = (KvLayer(where, 1, heads, dim, FP8) for where in (turned, other))
    out = rope_store_kv(packed, tables, kv, slots)
    out_ref = rope_store_kv_ref(packed, tables, kv_ref, slots)
    torch.testing.assert_close(out, out_ref, rtol=1.6e-2, atol=1.6e-2, equal_nan=True)
    shape = (pages, layers, 2, heads, 16, dim)
    stored, wanted = turned.view(FP8).view(shape), other.view(FP8).view(shape)
    assert torch.equal(stored[2, 1, 1, :, 8].float(), to_kv(packed[1, 4 + heads :], FP8).float())
    assert int((turned != pool).any(1).sum()) == 4  # pages 0, 1, 2, 3 hold the five tokens
    assert torch.equal(
        stored[:, 1, 1].float().nan_to_num(-1), wanted[:, 1, 1].float().nan_to_num(-1)
    )
    # The turn may differ in its last bit before it is rounded: by one code after it.
    keys, keys_ref = stored[:, 1, 0].float(), wanted[:, 1, 0].float()
    torch.testing.assert_close(keys, keys_ref, rtol=1 / 8, atol=2**-9, equal_nan=True)
    rest = [index for index in range(layers) if index != 1]
    untouched = pool.view(shape)[:, rest]
    assert torch.equal(turned.view(shape)[:, rest], untouched)


@pytest.mark.interpreter
def test_codes_interpreted() -> None:
    check_codes("cpu", raw=True)


@pytest.mark.interpreter
def test_rounding_interpreted() -> None:
    check_rounding("cpu", raw=True)


def test_store_on_cpu() -> None:
    check_store(torch.float32, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_interpreted(dtype: torch.dtype) -> None:
    check_store(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("raw", [False, True])
def test_codes_and_rounding_gpu(raw: bool) -> None:
    """Native casts and integer arithmetic agree with torch on every case."""
    check_codes("cuda", raw)
    check_rounding("cuda", raw)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_gpu(dtype: torch.dtype) -> None:
    check_store(dtype, "cuda")


def test_torch_rounds_and_saturates() -> None:
    """The reference itself: halves to even, 448 at the end, NaN kept."""
    values = torch.tensor([1.0625, 1.1875, 17.0, 460.0, 1e6, -1e6, float("nan")])
    found = to_kv(values, FP8).float().tolist()
    assert found[:6] == [1.0, 1.25, 16.0, 448.0, 448.0, -448.0] and found[6] != found[6]

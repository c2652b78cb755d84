"""FP8 multiplies against their references: by channel, static, by block, and weight-only."""

import pytest
import torch

from multilora_kernels import fp8_gemm as op
from multilora_kernels import fp8_weight_only as wo
from multilora_kernels.fp8_gemm import (
    Fp8Weight,
    concatenate,
    fp8_gemm,
    fp8_gemm_ref,
    fp8_weight,
    quantise_weight,
)
from multilora_kernels.fp8_weight_only import (
    fp8_weight_only,
    fp8_weight_only_ref,
    pack_weight_only,
    unpack_weight_only,
)
from multilora_kernels.launch import H200, RTX_4090, Chip, force_chip
from multilora_kernels.split_k import Tile, bucket_of

SEED = 13
KINDS = ("channel", "static", "block")


def random_weight(n: int, k: int, kind: str, device: str = "cpu") -> Fp8Weight:
    generator = torch.Generator().manual_seed(SEED)
    w = torch.randn(n, k, generator=generator) * 0.05
    if kind == "channel":
        return quantise_weight(w).to(device)
    q = (w / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "static":
        return fp8_weight(q, torch.tensor(0.001), torch.tensor(0.02)).to(device)
    blocks = (-(-n // 128), -(-k // 128))
    scale = torch.rand(blocks, generator=generator) * 0.002 + 0.0005
    return fp8_weight(q, scale).to(device)


def random_x(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(device)


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_multiply_is_near_the_16_bit_one(kind: str) -> None:
    weight = random_weight(160, 320, kind)
    x = random_x(5, 320, torch.bfloat16)
    xq, sx = weight.quantise(x)
    exact = x.double() @ weight.dequantise(torch.float64).t()
    assert relative_error(weight.matmul(x), exact) < 1e-2
    # Rounding activations to 3 mantissa bits costs about 2.6 %.
    assert relative_error(fp8_gemm(xq, sx, weight), exact) < 4e-2


def test_scales_of_every_shape() -> None:
    q = random_weight(256, 130, "channel").q
    per_channel = torch.rand(256, 1, dtype=torch.float32) + 0.5
    for scale in (torch.tensor(2.0), torch.tensor([2.0]), per_channel, per_channel.bfloat16()):
        expected = q.float() * scale.float().reshape(-1, 1)
        assert torch.equal(fp8_weight(q, scale).dequantise(torch.float32), expected)
    blocks = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    w = fp8_weight(q, blocks).dequantise(torch.float32)
    assert torch.equal(w[:128, 128:], q[:128, 128:].float() * 2.0)
    assert torch.equal(w[128:, :128], q[128:, :128].float() * 4.0)


def test_fused_parts_keep_their_scales() -> None:
    parts = [random_weight(n, 64, "static") for n in (32, 16)]
    parts[1] = fp8_weight(parts[1].q, torch.tensor(0.5), torch.tensor(0.03))
    fused = concatenate(parts)
    stacked = torch.cat([part.dequantise(torch.float32) for part in parts])
    assert torch.equal(fused.dequantise(torch.float32), stacked)
    assert fused.input_scale is not None and fused.input_scale.tolist() == [pytest.approx(0.03)]


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("shape", [(64, 128), (72, 200)])
def test_weight_only_form_loses_nothing(shape: tuple[int, int], kind: str) -> None:
    weight = random_weight(*shape, kind)
    packed = pack_weight_only(weight)
    back = unpack_weight_only(packed)
    assert torch.equal(back.q.view(torch.uint8), weight.q.view(torch.uint8))
    x = random_x(3, shape[1], torch.float64)
    expected = x @ weight.dequantise(torch.float64).t()
    assert torch.allclose(packed.matmul(x), expected, rtol=1e-12)


@pytest.mark.parametrize("chip", [H200, RTX_4090, Chip("NVIDIA A100", 80, 108)])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (576, 576)])
def test_the_split_never_depends_on_the_batch(n: int, k: int, chip: Chip) -> None:
    for choose in (
        lambda m: op.choose_launch(m, n, k, chip, blockwise=False),
        lambda m: wo.choose_launch(m, n, k, chip)[0],
    ):
        tiles = [choose(m) for m in range(1, 65)]
        assert all(isinstance(tile, Tile) for tile in tiles)
        orders = {(t.split_k * t.parts, t.pairs * t.parts) for t in tiles if isinstance(t, Tile)}
        assert len(orders) == 1
    assert op.choose_launch(4096, n, k, chip, blockwise=False) is op.Path.ROWS
    # The row-wise library form knows no fp16: its bf16 result would be 4 times too coarse.
    assert op.choose_launch(4096, n, k, chip, False, torch.float16) is op.Path.SCALED
    assert op.choose_launch(4096, n, k, chip, blockwise=True) is op.Path.WIDENED
    assert wo.choose_launch(4096, n, k, chip)[0] is None
    assert isinstance(op.choose_launch(4096, n, k + 8, chip, blockwise=False), Tile)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "m"), [(64, 128, 1), (130, 400, 5), (64, 512, 17)])
@pytest.mark.parametrize("split_k", [1, 3])
def test_kernel_matches_reference(n: int, k: int, m: int, kind: str, split_k: int) -> None:
    weight = random_weight(n, k, kind)
    xq, sx = weight.quantise(random_x(m, k, torch.float16))
    tile = Tile(block_n=64, block_m=bucket_of(m, 16), split_k=split_k)
    y = op.run_split(xq, sx, weight, torch.float16, tile)
    exact = fp8_gemm_ref(xq, sx, weight, torch.float64, torch.float64)
    assert relative_error(y, exact) < 1e-3
    assert not weight.counters.any()


@pytest.mark.interpreter
@pytest.mark.parametrize("k", [1024, 1152, 640])
def test_a_fine_split_and_a_split_of_two_parts_give_the_same_bits(k: int) -> None:
    weight = random_weight(64, k, "channel")
    xq, sx = weight.quantise(random_x(3, k, torch.float16))
    coarse, fine = (
        op.run_split(xq, sx, weight, torch.float16, Tile(split_k=split, parts=parts, pairs=pairs))
        for split, parts, pairs in ((2, 2, 1), (4, 1, 2))
    )
    assert torch.equal(coarse, fine)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize(("n", "k", "m"), [(64, 128, 1), (130, 400, 5)])
@pytest.mark.parametrize("split_k", [1, 2])
def test_weight_only_kernel_matches_reference(
    n: int, k: int, m: int, kind: str, split_k: int
) -> None:
    weight = pack_weight_only(random_weight(n, k, kind))
    x = random_x(m, k, torch.float16)
    tile = Tile(block_n=64, block_m=16, split_k=split_k)
    y = wo.run_fused(x, weight, tile)
    assert relative_error(y, fp8_weight_only_ref(x.double(), weight)) < 1e-3
    sliced = wo.run_sliced(x, weight, slice_n=128)
    assert relative_error(sliced, fp8_weight_only_ref(x.double(), weight)) < 2e-3


@pytest.mark.interpreter
def test_widened_slices_match_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "slice_rows", lambda n, k: 128)
    weight = random_weight(300, 256, "block")
    xq, sx = weight.quantise(random_x(5, 256, torch.float16))
    y = op.run_widened(xq, sx, weight, torch.float16)
    exact = fp8_gemm_ref(xq, sx, weight, torch.float64, torch.float64)
    assert relative_error(y, exact) < 2e-3


@pytest.mark.interpreter
def test_rows_are_independent_and_nan_stays_alone() -> None:
    for kind in ("channel", "block"):
        weight = random_weight(64, 384, kind)
        x = random_x(5, 384, torch.float16)
        whole = weight.matmul(x)
        for row in range(5):
            assert torch.equal(weight.matmul(x[row : row + 1])[0], whole[row])
        # Not the whole row: numpy, inside the interpreter, warns about that.
        x[3, 10:20] = float("nan")
        poisoned = weight.matmul(x)
        keep = [0, 1, 2, 4]
        assert bool(poisoned[3].isnan().all()) and torch.equal(poisoned[keep], whole[keep])


DEVICE_SHAPES = ((6144, 4096), (576, 576), (200, 352), (4096, 14336), (72, 1000))
DEVICE_ROWS = (1, 2, 7, 16, 33, 64, 65, 128, 300)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "chip"),
    [
        ("channel", torch.bfloat16, None),
        ("channel", torch.float16, RTX_4090),
        ("static", torch.bfloat16, None),
        ("block", torch.bfloat16, RTX_4090),
        ("block", torch.float16, None),
    ],
)
@pytest.mark.parametrize(("n", "k"), DEVICE_SHAPES)
def test_device_matches_fp64(
    n: int, k: int, kind: str, dtype: torch.dtype, chip: Chip | None
) -> None:
    weight = random_weight(n, k, kind, "cuda")
    wide = pack_weight_only(weight)
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    force_chip(chip)
    try:
        for m in DEVICE_ROWS:
            x = random_x(m, k, dtype, "cuda")
            xq, sx = weight.quantise(x)
            y = fp8_gemm(xq, sx, weight, dtype)
            exact = fp8_gemm_ref(xq, sx, weight, torch.float64, torch.float64)
            assert relative_error(y, exact) < limit, f"M={m}"
            assert torch.equal(y, fp8_gemm(xq, sx, weight, dtype))
            if n % 16 == 0 and k % 16 == 0 and kind != "block":
                y = op.run_scaled(xq, sx, weight, dtype)
                assert relative_error(y, exact) < limit, f"scaled, M={m}"
            y = fp8_weight_only(x, wide)
            assert relative_error(y, fp8_weight_only_ref(x.double(), wide)) < limit, f"M={m}"
    finally:
        force_chip(None)
    assert not weight.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_device_rows_are_independent_of_the_batch(kind: str) -> None:
    weight = random_weight(6144, 4096, kind, "cuda")
    wide = pack_weight_only(weight)
    x = random_x(64, 4096, torch.bfloat16, "cuda")
    for multiply in (weight.matmul, wide.matmul):
        whole = multiply(x)
        for m in (1, 2, 5, 9, 16, 17, 32, 40):
            assert torch.equal(multiply(x[:m]), whole[:m]), f"M={m}"
        poisoned_x = x.clone()
        poisoned_x[3] = float("nan")
        poisoned = multiply(poisoned_x)
        keep = [row for row in range(64) if row != 3]
        assert torch.equal(poisoned[keep], whole[keep]) and bool(poisoned[3].isnan().all())

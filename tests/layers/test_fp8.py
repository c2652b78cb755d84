"""FP8 linears: scales by row, static and by blocks, and rows that do not touch one another."""

import pytest
import torch

from multilora_cli.layers.fp8 import Fp8Linear, fp8_linear, quantise_at_load
from multilora_cli.layers.linear import QuantisedWeight, StackedWeight
from multilora_kernels.fp8_gemm import Fp8Weight, fp8_weight
from multilora_kernels.rows import Rows
from tests.models.quantized_kit import dynamic_rows, pack_fp8

CASES = ("tensor", "channel", "block")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(
    scales: str, num_out: int = 128, num_in: int = 256, seed: int = 0, **how: float
) -> tuple[Fp8Weight, torch.Tensor]:
    packed = pack_fp8(scales)(random(num_out, num_in, seed=seed))
    bound = how.get("upper_bound", float("inf"))
    given = how.get("input_scale")
    static = None if given is None else torch.tensor(given)
    tensors = packed.tensors
    return fp8_weight(tensors["weight"], tensors["weight_scale"], static, bound), packed.weight


@pytest.mark.parametrize("scales", CASES)
def test_rows_are_rounded_and_multiplied(scales: str) -> None:
    """As by hand: each row (or row and 128 inputs) by its own largest magnitude."""
    weight, matrix = make(scales)
    x = random(6, 256, seed=1) * torch.logspace(-3, 3, 6)[:, None]
    through = dynamic_rows(group=128 if scales == "block" else 0)
    linear = fp8_linear([weight], torch.float32, weight_only=False)
    assert torch.allclose(linear.matmul(Rows(x)), through(x) @ matrix.T, rtol=1e-4, atol=1e-5)
    assert torch.equal(linear.dequantise(), matrix)


def test_the_bound_of_fbgemm() -> None:
    """Magnitudes beyond it saturate."""
    weight, matrix = make("channel", upper_bound=1.5)
    x = random(4, 256, seed=2)
    linear = fp8_linear([weight], torch.float32, weight_only=False)
    assert float(x.abs().max()) > 2
    assert torch.allclose(linear.matmul(Rows(x)), dynamic_rows(bound=1.5)(x) @ matrix.T, atol=1e-4)


@pytest.mark.parametrize("scales", CASES)
def test_a_row_of_nan_leaves_the_others_as_they_were(scales: str) -> None:
    """A scale shared by rows would spread it; beside it every row is bit for bit the same."""
    linear = fp8_linear([make(scales)[0]], torch.float32, weight_only=False)
    x = random(5, 256, seed=3)
    expected = linear.matmul(Rows(x))
    x[2, 17] = torch.nan
    found = linear.matmul(Rows(x))
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("scales", CASES)
@pytest.mark.parametrize("sizes", [(128, 256, 128), (96, 40, 64)])
def test_parts_share_a_multiply_where_their_scales_allow(
    scales: str, sizes: tuple[int, ...]
) -> None:
    """A block of 128 rows may not reach from one part into the next."""
    made = [make(scales, size, seed=seed) for seed, size in enumerate(sizes)]
    linear = fp8_linear([weight for weight, _ in made], torch.float32, weight_only=False)
    apart = scales == "block" and sizes[0] % 128
    assert isinstance(linear, StackedWeight if apart else Fp8Linear)
    matrix = torch.cat([matrix for _, matrix in made])
    assert torch.equal(linear.dequantise(), matrix)
    x = random(3, 256, seed=9)
    through = dynamic_rows(group=128 if scales == "block" else 0)
    assert torch.allclose(linear.matmul(Rows(x)), through(x) @ matrix.T, rtol=1e-4, atol=1e-4)


def test_static_scales_are_each_parts_own() -> None:
    """Equal ones share a multiply; the largest of different ones would round the others coarser."""
    equal = [make("tensor", seed=s, input_scale=0.01)[0] for s in (1, 2)]
    assert isinstance(fp8_linear(equal, torch.float32, weight_only=False), Fp8Linear)
    made = [make("tensor", seed=s, input_scale=scale) for s, scale in ((1, 0.01), (2, 0.3))]
    parts = [weight for weight, _ in made]
    linear = fp8_linear(parts, torch.float32, weight_only=False)
    assert isinstance(linear, StackedWeight)
    x = random(4, 256, seed=5)
    expected = [
        (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale @ matrix.T
        for (_, matrix), scale in zip(made, (0.01, 0.3), strict=True)
    ]
    assert torch.allclose(linear.matmul(Rows(x)), torch.cat(expected, 1), rtol=1e-4, atol=1e-4)
    weight_only = fp8_linear(parts, torch.float32, weight_only=True)
    assert isinstance(weight_only, QuantisedWeight)


@pytest.mark.parametrize("scales", CASES)
def test_weights_alone(scales: str) -> None:
    """Activations stay as they are."""
    made = [make(scales, seed=seed) for seed in (1, 2)]
    linear = fp8_linear([weight for weight, _ in made], torch.float32, weight_only=True)
    matrix = torch.cat([matrix for _, matrix in made])
    x = random(4, 256, seed=6)
    assert torch.equal(linear.dequantise(), matrix)
    assert torch.allclose(linear.matmul(Rows(x)), x @ matrix.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("slice_weights", [100, 10**7])
def test_quantised_at_load_by_row(slice_weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's largest magnitude becomes 448; a row of zeros stays one."""
    monkeypatch.setattr("multilora_cli.layers.fp8._SLICE_WEIGHTS", slice_weights)
    matrix = random(70, 64, seed=7)
    matrix[5] = 0.0
    weight = quantise_at_load(matrix.bfloat16())
    largest = matrix.bfloat16().float().abs().amax(1)
    assert torch.allclose(weight.scale * 448, largest.clamp(min=1e-10), rtol=1e-6)
    assert torch.allclose(weight.dequantise(torch.float32), matrix, atol=float(largest.max()) / 16)
    assert not weight.dequantise(torch.float32)[5].any()

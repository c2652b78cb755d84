"""4-bit parts: packed in slices, fused, and dequantised, from words made by hand."""

from collections.abc import Callable

import pytest
import torch

from multilora_cli.layers.awq import (
    AutoAwqPart,
    CompressedPart,
    Int4Part,
    dequantise_part,
    pack_parts,
)
from multilora_cli.layers.linear import QuantisedWeight, StackedWeight
from multilora_kernels.rows import Rows
from tests.models.quantized_kit import pack_awq, pack_compressed


def autoawq(weight: torch.Tensor, group: int = 32, **how: object) -> tuple[Int4Part, torch.Tensor]:
    packed = pack_awq(group, **how)(weight)  # type: ignore[arg-type]
    tensors = packed.tensors
    return AutoAwqPart(tensors["qweight"], tensors["qzeros"], tensors["scales"]), packed.weight


def compressed(
    weight: torch.Tensor, group: int = 32, symmetric: bool = False, **how: object
) -> tuple[Int4Part, torch.Tensor]:
    packed = pack_compressed(group, symmetric=symmetric, **how)(weight)  # type: ignore[arg-type]
    tensors = packed.tensors
    zero = tensors.get("weight_zero_point")
    part = CompressedPart(tensors["weight_packed"], tensors["weight_scale"], zero, weight.shape[1])
    return part, packed.weight


def random(num_out: int, num_in: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed))


def test_one_autoawq_word_by_hand() -> None:
    """0x76543210 holds columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up."""
    part = AutoAwqPart(
        torch.full((32, 1), 0x76543210, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, 8, dtype=torch.float16),
    )
    out = torch.empty(8, 32)
    dequantise_part(part, out)
    assert out[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_one_compressed_word_by_hand() -> None:
    """0x76543210 holds inputs 0..7 from the lowest nibble up; zero points run along outputs."""
    zero = torch.tensor([[0x76543210]], dtype=torch.int32)
    part = CompressedPart(
        torch.full((8, 4), 0x76543210, dtype=torch.int32), torch.ones(8, 1), zero, 32
    )
    out = torch.empty(8, 32)
    dequantise_part(part, out)
    assert out[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert out[3, :8].tolist() == [-3, -2, -1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [autoawq, compressed], ids=["autoawq", "compressed"])
@pytest.mark.parametrize("rows", [8, 1000, 10**6])
def test_fused_parts_are_their_rows(
    make: Callable[..., tuple[Int4Part, torch.Tensor]], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts whose sizes are no multiples of 128 or of a slice; a group of zeros too."""
    monkeypatch.setattr("multilora_cli.layers.awq._SLICE_WEIGHTS", rows * 160)
    monkeypatch.setattr("multilora_cli.layers.awq._CACHED_WEIGHTS", rows * 160)
    matrices = [random(200, 160, 1), random(40, 160, 2), random(72, 160, 3)]
    matrices[1][:, 32:64] = 0.0
    made = [make(matrix) for matrix in matrices]
    weight = QuantisedWeight(pack_parts([part for part, _ in made]), torch.float32)
    expected = torch.cat([matrix for _, matrix in made])
    assert torch.equal(weight.dequantise(), expected)
    x = random(5, 160, 4)
    assert torch.allclose(weight.matmul(Rows(x)), x @ expected.T, atol=1e-5)
    assert not made[1][1][:, 32:64].any()
    for part, matrix in made:
        out = torch.empty_like(matrix)
        dequantise_part(part, out)
        assert torch.equal(out, matrix)


def test_the_bytes_hold_words_scales_and_counters() -> None:
    """[256, 128] in groups of 32: half a byte a weight, a word for 4 groups a row, 4 counters."""
    part, _ = autoawq(random(256, 128))
    weight = QuantisedWeight(pack_parts([part]), torch.float32)
    assert weight.nbytes == 256 * 128 // 2 + 256 * 4 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float16, torch.float16], torch.float16),
        ([torch.bfloat16, torch.bfloat16], torch.bfloat16),
        ([torch.float32, torch.float16], torch.float16),
    ],
)
def test_scales_keep_their_dtype(dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    """16-bit scales are kept as they are; others become fp16."""
    parts = [compressed(random(16, 64, i), scale_dtype=d)[0] for i, d in enumerate(dtypes)]
    assert pack_parts(parts).scale_dtype == expected


def test_scales_beyond_fp16_become_bf16() -> None:
    """1e-6 would be subnormal in fp16."""
    parts = [compressed(random(16, 64) * 1e-5, scale_dtype=torch.float32)[0]]
    assert pack_parts(parts).scale_dtype == torch.bfloat16


def test_stacked_weights_are_one_matrix() -> None:
    """Products side by side, rows one below the other, bytes together."""
    pairs = [autoawq(random(40, 64, 1)), compressed(random(24, 64, 2))]
    parts = [QuantisedWeight(pack_parts([part]), torch.float32) for part, _ in pairs]
    stacked, expected = StackedWeight(parts), torch.cat([matrix for _, matrix in pairs])
    x = random(3, 64, 5)
    assert torch.equal(stacked.dequantise(), expected)
    assert torch.allclose(stacked.matmul(Rows(x)), x @ expected.T, atol=1e-5)
    assert stacked.nbytes == sum(part.nbytes for part in parts)


def test_inputs_that_end_within_a_word() -> None:
    """compressed-tensors pads the last word of a row."""
    part, expected = compressed(random(16, 40), group=-1)
    assert isinstance(part, CompressedPart)
    cut = CompressedPart(part.weight_packed, part.scale, part.zero_point, 36)
    out = torch.empty(16, 36)
    dequantise_part(cut, out)
    assert torch.equal(out, expected[:, :36])

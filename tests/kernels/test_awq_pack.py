"""4-bit checkpoints: unpacked by hand-written loops, repacked and read back."""

import pytest
import torch

from multilora_kernels.awq_gemm import awq_gemm, dequantise, unpack
from multilora_kernels.awq_pack import pack
from multilora_kernels.int4_matrix import (
    Int4Matrix,
    concatenate,
    unpack_autoawq,
    unpack_compressed,
)

SEED = 4


def random_matrix(n: int, k: int, group: int, dtype: torch.dtype = torch.float16) -> Int4Matrix:
    generator = torch.Generator().manual_seed(SEED)
    groups = k // group if group > 0 else 1
    q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8)
    scale = (torch.rand((n, groups), generator=generator) * 0.02 + 0.001).to(dtype)
    return Int4Matrix(q, zero, scale)


def as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def autoawq_words(columns: list[list[int]]) -> torch.Tensor:
    """Rows of column values to AutoAWQ words: column 8c + j sits at nibble (0,4,1,5,2,6,3,7)[j]."""
    nibble_of_column = (0, 4, 1, 5, 2, 6, 3, 7)
    rows = []
    for row in columns:
        words = []
        for c in range(0, len(row), 8):
            word = sum(row[c + j] << (4 * nibble_of_column[j]) for j in range(8))
            words.append(as_int32(word))
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_autoawq_layout_is_unpacked_exactly(group: int) -> None:
    matrix = random_matrix(24, 256, group)
    qweight = autoawq_words(matrix.q.t().tolist())
    qzeros = autoawq_words(matrix.zero.t().tolist())
    assert qweight.shape == (256, 3)
    read = unpack_autoawq(qweight, qzeros, matrix.scale.t().contiguous())
    assert torch.equal(read.q, matrix.q)
    assert torch.equal(read.zero, matrix.zero)
    assert torch.equal(read.scale, matrix.scale)


@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors_layout_is_unpacked_exactly(symmetric: bool) -> None:
    matrix = random_matrix(16, 128, 32, torch.bfloat16)
    packed = [
        [as_int32(sum(row[c + j] << (4 * j) for j in range(8))) for c in range(0, 128, 8)]
        for row in matrix.q.tolist()
    ]
    zero = matrix.zero.tolist()
    zeros = [
        [as_int32(sum(zero[n + j][g] << (4 * j) for j in range(8))) for g in range(4)]
        for n in range(0, 16, 8)
    ]
    read = unpack_compressed(
        torch.tensor(packed, dtype=torch.int32),
        matrix.scale,
        None if symmetric else torch.tensor(zeros, dtype=torch.int32),
        in_features=128,
    )
    assert torch.equal(read.q, matrix.q)
    expected = torch.full_like(matrix.zero, 8) if symmetric else matrix.zero
    assert torch.equal(read.zero, expected)
    assert torch.equal(read.scale, matrix.scale)


@pytest.mark.parametrize("shape", [(128, 256), (200, 576), (8, 64), (130, 1152)])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_form_loses_nothing(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    n, k = shape
    if group > 0 and k % group:
        pytest.skip("group does not divide K")
    matrix = random_matrix(n, k, group, dtype)
    weight = pack(matrix)
    assert weight.scale_dtype == dtype
    exact = matrix.dequantise()
    assert torch.equal(unpack(weight).dequantise()[:, :k], exact)
    assert torch.equal(dequantise(weight, torch.float32), exact)
    # The padded inputs weigh nothing, whatever they are multiplied by.
    assert not unpack(weight).dequantise()[:, k:].any()


def test_groups_longer_than_a_block_are_repeated() -> None:
    matrix = random_matrix(16, 512, 256)
    weight = pack(matrix)
    assert weight.groups_per_block == 1
    assert torch.equal(dequantise(weight, torch.float32), matrix.dequantise())


def test_fp32_scales_keep_the_better_16_bit_type() -> None:
    matrix = random_matrix(8, 128, 128, torch.float32)
    assert pack(matrix).scale_dtype == torch.float16
    tiny = Int4Matrix(matrix.q, matrix.zero, matrix.scale * 1e-6)
    assert pack(tiny).scale_dtype == torch.bfloat16


def test_memory_is_four_bits_and_one_word_a_group() -> None:
    weight = pack(random_matrix(256, 1024, 128))
    assert weight.nbytes == 256 * 1024 // 2 + 256 * 8 * 4 + weight.counters.numel() * 4


def test_concatenated_weights_are_the_stacked_matrix() -> None:
    parts = [random_matrix(n, 128, 64) for n in (64, 32, 8)]
    weight = pack(concatenate(parts))
    stacked = torch.cat([part.dequantise() for part in parts])
    assert weight.out_features == 104
    assert torch.equal(dequantise(weight, torch.float32), stacked)


def test_cpu_path_is_the_reference_in_double() -> None:
    matrix = random_matrix(40, 192, 64)
    weight = pack(matrix)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    expected = x @ matrix.dequantise().double().t()
    assert torch.allclose(weight.matmul(x), expected, rtol=1e-12)
    rounded = awq_gemm(x.bfloat16(), weight)
    assert rounded.dtype == torch.bfloat16
    assert torch.allclose(rounded.double(), expected, atol=2e-2)

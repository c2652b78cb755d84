"""The packed form of 4-bit weights: read from two checkpoint formats, repacked once at load.

    W[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]        q, zero in 0..15

words  int16 [K/128, N, 32]   nibble j (from the least significant) of words[b, n, c] is
                              q[n, 128 b + 32 j + c]: one 32-bit word holds two neighbouring k
                              of one quarter of the block, so that a shift and one logic
                              operation give two weights, and a quarter is one matrix multiply
meta   int32 [K/128, G, N]    scale's 16 bits << 16 | zero; G = groups in a block of 128 (1, 2, 4);
                              groups longer than 128 are repeated
N is padded to 128 with scale 0, K with q = zero, so that neither adds anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from multilora_kernels.split_k import BLOCK_K

PAD_N = 128
_AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqWeight:
    """A 4-bit weight [N, K] in the packed form; `counters` make one multiply at a time safe."""

    words: torch.Tensor  # int16 [K/128, N padded, 32]
    meta: torch.Tensor  # int32 [K/128, G, N padded]
    counters: torch.Tensor  # int32 [N padded / 64], zero between multiplies
    out_features: int
    in_features: int
    scale_dtype: torch.dtype  # float16 or bfloat16

    @property
    def groups_per_block(self) -> int:
        """Groups in a block of 128 inputs: 1, 2 or 4."""
        return self.meta.shape[1]

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.meta, self.counters))

    def to(self, device: torch.device | str) -> "AwqWeight":
        """The same weight on `device`."""
        return replace(
            self,
            words=self.words.to(device),
            meta=self.meta.to(device),
            counters=self.counters.to(device),
        )

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] times this weight, [M, N] in x's dtype."""
        from multilora_kernels.awq_gemm import awq_gemm

        return awq_gemm(x, self)

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """W [N, K] in `dtype`, rounded once from (q - zero) * scale in fp32."""
        from multilora_kernels.awq_gemm import dequantise

        return dequantise(self, dtype)


@dataclass(frozen=True)
class Int4Matrix:
    """What a checkpoint says, unpacked: q [N, K] and zero [N, groups] uint8, scale [N, groups]."""

    q: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        """W [N, K] in fp32."""
        group = self.q.shape[1] // self.scale.shape[1]
        zero = self.zero.repeat_interleave(group, dim=1).float()
        return (self.q.float() - zero) * self.scale.float().repeat_interleave(group, dim=1)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] to uint8 [..., 8], least significant nibble first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)


def unpack_autoawq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Matrix:
    """AutoAWQ's GEMM layout: qweight int32 [K, N/8], qzeros int32 [K/g, N/8], scales [K/g, N]."""
    num_inputs, num_outputs = qweight.shape[0], qweight.shape[1] * 8
    groups = scales.shape[0]
    assert qweight.dtype == torch.int32 and qzeros.dtype == torch.int32
    assert qzeros.shape == (groups, num_outputs // 8) and scales.shape == (groups, num_outputs)
    assert num_inputs % groups == 0
    # Nibble i of a word holds column _AWQ_COLUMN_OF_NIBBLE[i]; the inverse puts columns in order.
    order = torch.tensor(_AWQ_COLUMN_OF_NIBBLE, device=qweight.device).argsort()
    q = _nibbles(qweight)[..., order].reshape(num_inputs, num_outputs)
    zero = _nibbles(qzeros)[..., order].reshape(groups, num_outputs)
    return Int4Matrix(q.t().contiguous(), zero.t().contiguous(), scales.t().contiguous())


def unpack_compressed(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
    in_features: int,
) -> Int4Matrix:
    """compressed-tensors pack-quantized W4A16: weight_packed int32 [N, K/8], weight_scale [N, K/g],
    weight_zero_point int32 [N/8, K/g] packed along N; None: symmetric, zero = 8.
    """
    num_outputs, groups = weight_scale.shape
    assert weight_packed.dtype == torch.int32 and weight_packed.shape[0] == num_outputs
    q = _nibbles(weight_packed).reshape(num_outputs, -1)[:, :in_features]
    if weight_zero_point is None:
        zero = torch.full_like(weight_scale, 8, dtype=torch.uint8)
    else:
        assert weight_zero_point.dtype == torch.int32 and weight_zero_point.shape[1] == groups
        zero = _nibbles(weight_zero_point).permute(0, 2, 1).reshape(-1, groups)[:num_outputs]
    return Int4Matrix(q.contiguous(), zero.contiguous(), weight_scale.contiguous())


def _scale_dtype(scale: torch.Tensor) -> torch.dtype:
    """The 16-bit type that keeps `scale` best: fp16 unless its range is too small."""
    if scale.dtype == torch.bfloat16:
        return torch.bfloat16
    if scale.dtype == torch.float16:
        return torch.float16
    magnitude = scale.abs()
    fits = (magnitude == 0) | ((magnitude >= 2.0**-14) & (magnitude <= 65504.0))
    return torch.float16 if bool(fits.all()) else torch.bfloat16


def _block_groups(values: torch.Tensor, group: int, num_blocks: int) -> torch.Tensor:
    """Per-group values [N, groups] as [N, blocks, G], groups longer than a block repeated."""
    per_block = max(1, BLOCK_K // group)
    if group > BLOCK_K:
        values = values.repeat_interleave(group // BLOCK_K, dim=1)
    values = values[:, : num_blocks * per_block]
    short = num_blocks * per_block - values.shape[1]
    values = torch.nn.functional.pad(values, (0, short))
    return values.reshape(values.shape[0], num_blocks, per_block)


def pack(matrix: Int4Matrix, scale_dtype: torch.dtype | None = None) -> AwqWeight:
    """Repack an unpacked 4-bit weight; groups of 32, 64, a multiple of 128, or the whole of K.

    fp32 scales are rounded to fp16 (to bf16 where fp16's range is too small).
    """
    num_outputs, num_inputs = matrix.q.shape
    groups = matrix.scale.shape[1]
    assert groups > 0 and num_inputs % groups == 0, f"{groups} groups of {num_inputs} inputs"
    scale, zero = matrix.scale, matrix.zero
    num_blocks = -(-num_inputs // BLOCK_K)
    group = num_inputs // groups
    if groups == 1:  # whole column: the padded K belongs to the same group
        group = num_blocks * BLOCK_K
    assert group in (32, 64) or group % BLOCK_K == 0, f"group of {group} inputs"
    dtype = scale_dtype or _scale_dtype(scale)
    pad_n, pad_k = -num_outputs % PAD_N, num_blocks * BLOCK_K - num_inputs
    bits = _block_groups(scale.to(dtype).view(torch.int16).int() & 0xFFFF, group, num_blocks)
    zeros = _block_groups(zero.int(), group, num_blocks)
    meta = torch.nn.functional.pad((bits << 16) | zeros, (0, 0, 0, 0, 0, pad_n))
    q = torch.nn.functional.pad(matrix.q.int(), (0, pad_k))
    if pad_k:
        last = zeros.repeat_interleave(BLOCK_K // zeros.shape[2], dim=2)
        q[:, num_inputs:] = last.reshape(num_outputs, -1)[:, num_inputs:]
    q = torch.nn.functional.pad(q, (0, 0, 0, pad_n)).reshape(-1, num_blocks, 4, 32)
    words = q[:, :, 0] | (q[:, :, 1] << 4) | (q[:, :, 2] << 8) | (q[:, :, 3] << 12)
    return AwqWeight(
        words=words.to(torch.int16).permute(1, 0, 2).contiguous(),
        meta=meta.permute(1, 2, 0).contiguous(),
        counters=torch.zeros((num_outputs + pad_n) // 64, dtype=torch.int32, device=q.device),
        out_features=num_outputs,
        in_features=num_inputs,
        scale_dtype=dtype,
    )


def unpack(weight: AwqWeight) -> Int4Matrix:
    """The inverse of `pack`, with groups of at most 128 and K still padded."""
    blocks, outputs, _ = weight.words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=weight.words.device)
    q = (weight.words.int().unsqueeze(2) >> shifts[:, None]) & 0xF  # [blocks, N, 4, 32]
    q = q.permute(1, 0, 2, 3).reshape(outputs, blocks * BLOCK_K)
    meta = weight.meta.permute(2, 0, 1).reshape(outputs, -1)
    scale = (meta >> 16).to(torch.int16).view(weight.scale_dtype)
    n = weight.out_features
    return Int4Matrix(q[:n].to(torch.uint8), (meta[:n] & 0xF).to(torch.uint8), scale[:n])


def concatenate(matrices: Sequence[Int4Matrix]) -> Int4Matrix:
    """Weights over the same inputs and groups stacked along N (q, k, v; gate, up)."""
    dtypes = {matrix.scale.dtype for matrix in matrices}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Int4Matrix(
        torch.cat([matrix.q for matrix in matrices]),
        torch.cat([matrix.zero for matrix in matrices]),
        torch.cat([matrix.scale.to(dtype) for matrix in matrices]),
    )

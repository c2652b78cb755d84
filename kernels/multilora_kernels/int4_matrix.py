"""4-bit weights as checkpoints hold them: two layouts read into one.

W[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]        q, zero in 0..15
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


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


def concatenate(matrices: Sequence[Int4Matrix]) -> Int4Matrix:
    """Weights over the same inputs and groups stacked along N (q, k, v; gate, up)."""
    dtypes = {matrix.scale.dtype for matrix in matrices}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Int4Matrix(
        torch.cat([matrix.q for matrix in matrices]),
        torch.cat([matrix.zero for matrix in matrices]),
        torch.cat([matrix.scale.to(dtype) for matrix in matrices]),
    )

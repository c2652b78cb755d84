"""4-bit weights repacked once at load into the form that `awq_gemm` reads.

    W[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]        q, zero in 0..15

words  int16 [K/128, N, 32]   nibble j (from the least significant) of words[b, n, c] is
                              q[n, 128 b + 32 j + c]: one 32-bit word holds two neighbouring k
                              of one quarter of the block, so that a shift and one logic
                              operation give two weights, and a quarter is one matrix multiply
meta   int32 [K/128, G, N]    scale's 16 bits << 16 | zero; G = groups in a block of 128 (1, 2, 4);
                              groups longer than 128 are repeated
N is padded to 128 with scale 0, K with q = zero, so that neither adds anything.
"""

import torch

from multilora_kernels.awq_gemm import PAD_N, AwqWeight
from multilora_kernels.int4_matrix import Int4Matrix
from multilora_kernels.split_k import BLOCK_K


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

"""FP8 (e4m3) linears: their weights fused, with activations quantised by row or left alone.

y = (xq sx) (wq sw)^T      sx per row: computed, or one number from the checkpoint
"""

from collections.abc import Sequence

import torch

from multilora_cli.layers.linear import QuantisedWeight, StackedWeight, Weight, copied_tensors
from multilora_kernels.fp8_gemm import (
    Fp8Weight,
    concatenate,
    fp8_gemm,
    fp8_gemm_ref,
    fp8_weight,
    quantise_weight,
)
from multilora_kernels.fp8_quant import RowScaling
from multilora_kernels.fp8_weight_only import pack_weight_only
from multilora_kernels.rows import Rows

BLOCK = 128
# Weights quantised at a time: as fp32, and a handful of such arrays, 400 MB.
_SLICE_WEIGHTS = 16 * 2**20


class Fp8Linear:
    """An FP8 matrix whose activations are quantised too, a scale per row or a static one."""

    def __init__(self, weight: Fp8Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._weight.nbytes

    @property
    def scaling(self) -> RowScaling:
        """A scale per row, per row and 128 inputs, or the checkpoint's."""
        return self._weight.scaling

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Rows [T, in], quantised, times the transposed matrix: [T, out]."""
        xq, scale = rows.fp8 or self._weight.quantise(rows.x)
        if rows.x.is_cuda:
            return fp8_gemm(xq, scale, self._weight, rows.x.dtype)
        return fp8_gemm_ref(xq, scale, self._weight, rows.x.dtype)

    def dequantise(self) -> torch.Tensor:
        """The matrix in the compute dtype, each weight rounded once."""
        return self._weight.dequantise(self._dtype)

    def copied(self) -> "Fp8Linear":
        """The same in memory that is taken anew."""
        return Fp8Linear(copied_tensors(self._weight), self._dtype)


def fp8_linear(parts: Sequence[Fp8Weight], dtype: torch.dtype, *, weight_only: bool) -> Weight:
    """The packed projection of `parts`, their rows one after another.

    Parts that one multiply cannot serve exactly stay apart: scale blocks that reach over a part's
    end, and static activation scales that differ.
    """
    groups = [[part] for part in parts] if not _fuse(parts, weight_only) else [list(parts)]
    weights: list[Weight] = []
    for group in groups:
        whole = concatenate(group) if len(group) > 1 else group[0]
        if weight_only:
            weights.append(QuantisedWeight(pack_weight_only(whole), dtype))
        else:
            weights.append(Fp8Linear(whole, dtype))
    return weights[0] if len(weights) == 1 else StackedWeight(weights)


def quantise_at_load(weight: torch.Tensor) -> Fp8Weight:
    """A float matrix [out, in] as FP8 with a scale per row."""
    step = max(_SLICE_WEIGHTS // weight.shape[1], 1)
    pieces = [quantise_weight(rows) for rows in torch.split(weight, step)]
    if len(pieces) == 1:
        return pieces[0]
    return fp8_weight(
        torch.cat([piece.q for piece in pieces]), torch.cat([piece.scale for piece in pieces])
    )


def _fuse(parts: Sequence[Fp8Weight], weight_only: bool) -> bool:
    if parts[0].blockwise and any(part.out_features % BLOCK for part in parts[:-1]):
        return False
    scales = {None if p.input_scale is None else float(p.input_scale) for p in parts}
    return weight_only or len(scales) == 1

"""4-bit linears: what two checkpoint layouts hold, packed for the kernel or dequantised.

    W[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]        q, zero in 0..15

Both are done in slices of rows, so that loading takes little memory beside the weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from multilora_kernels.awq_gemm import PAD_N, AwqWeight
from multilora_kernels.awq_pack import pack
from multilora_kernels.int4_matrix import Int4Matrix, unpack_autoawq, unpack_compressed

# Weights unpacked at a time: as int32, and a handful of such arrays, 400 MB.
_SLICE_WEIGHTS = 16 * 2**20
# Weights dequantised at a time: a few arrays of them in a CPU's cache.
_CACHED_WEIGHTS = 2**20
_AWQ_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_ROWS_PER_COUNTER = 64
_MIN_NORMAL_F16, _MAX_F16 = 2.0**-14, 65504.0


class Int4Part(Protocol):
    """One module's 4-bit weight as its checkpoint has it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of W."""

    @property
    def scale(self) -> torch.Tensor:
        """The scales in their stored dtype, in any order."""

    def rows(self, start: int, stop: int) -> Int4Matrix:
        """Rows `start`..`stop` of W unpacked; both are multiples of 8, or the end."""

    def dequantise(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with rows `start`..`stop` of W, as `rows` but five times as fast on a CPU."""


@dataclass(frozen=True)
class AutoAwqPart:
    """AutoAWQ's GEMM layout, which is W transposed."""

    qweight: torch.Tensor  # int32 [in, out/8]
    qzeros: torch.Tensor  # int32 [groups, out/8]
    scale: torch.Tensor  # [groups, out]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of W."""
        return self.scale.shape[1], self.qweight.shape[0]

    def rows(self, start: int, stop: int) -> Int4Matrix:
        """Rows of W unpacked."""
        columns = slice(start // 8, stop // 8)
        return unpack_autoawq(
            self.qweight[:, columns], self.qzeros[:, columns], self.scale[:, start:stop]
        )

    def dequantise(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with rows of W, the rows of one nibble at a time."""
        columns = slice(start // 8, stop // 8)
        words = self.qweight[:, columns].t().contiguous()  # [out/8, in]
        zeros = self.qzeros[:, columns].t()
        scales = self.scale[:, start:stop].t().float().reshape(len(words), 8, -1)
        rows = out.view(len(words), 8, -1)
        for nibble, row in enumerate(_AWQ_ROW_OF_NIBBLE):
            shift = 4 * nibble
            rows[:, row] = _scaled(words, shift, (zeros >> shift) & 0xF, scales[:, row])


@dataclass(frozen=True)
class CompressedPart:
    """compressed-tensors' pack-quantized layout."""

    weight_packed: torch.Tensor  # int32 [out, in/8]
    scale: torch.Tensor  # [out, groups]
    zero_point: torch.Tensor | None  # int32 [out/8, groups]; None: 8
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of W."""
        return self.scale.shape[0], self.in_features

    def rows(self, start: int, stop: int) -> Int4Matrix:
        """Rows of W unpacked."""
        zero = self.zero_point
        return unpack_compressed(
            self.weight_packed[start:stop],
            self.scale[start:stop],
            None if zero is None else zero[start // 8 : -(-stop // 8)],
            self.in_features,
        )

    def dequantise(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with rows of W, the columns of one nibble at a time."""
        if self.in_features % 8:
            out.copy_(self.rows(start, stop).dequantise())
            return
        words, scales = self.weight_packed[start:stop], self.scale[start:stop].float()
        zeros = torch.full_like(scales, 8.0)
        if self.zero_point is not None:
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
            packed = self.zero_point[start // 8 : -(-stop // 8)]
            unpacked = (packed[:, None] >> shifts[:, None]) & 0xF  # [out/8, 8, groups]
            zeros = unpacked.flatten(0, 1)[: stop - start]
        columns = out.view(stop - start, -1, 8)
        for nibble in range(8):
            columns[:, :, nibble] = _scaled(words, 4 * nibble, zeros, scales)


def pack_parts(parts: Sequence[Int4Part]) -> AwqWeight:
    """One weight for `awq_gemm` of parts over the same inputs, their rows one after another.

    Scales that are not 16-bit are rounded to fp16, to bf16 where fp16's range is too small.
    """
    dtype = _scale_dtype([part.scale for part in parts])
    num_rows = sum(part.shape[0] for part in parts)
    padded = -(-num_rows // PAD_N) * PAD_N
    words: torch.Tensor | None = None
    meta: torch.Tensor | None = None
    row = 0
    pieces = (
        pack(part.rows(*rows), dtype) for part in parts for rows in _slices(part, _SLICE_WEIGHTS)
    )
    for piece in pieces:
        if words is None or meta is None:
            blocks, _, width = piece.words.shape
            words = piece.words.new_zeros(blocks, padded, width)
            meta = piece.meta.new_zeros(blocks, piece.groups_per_block, padded)
        stop = row + piece.out_features
        words[:, row:stop] = piece.words[:, : piece.out_features]
        meta[:, :, row:stop] = piece.meta[:, :, : piece.out_features]
        row = stop
    assert words is not None and meta is not None, "no parts"
    counters = torch.zeros(padded // _ROWS_PER_COUNTER, dtype=torch.int32, device=words.device)
    return AwqWeight(words, meta, counters, num_rows, parts[0].shape[1], dtype)


def dequantise_part(part: Int4Part, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns] with W, each weight rounded once from fp32."""
    for start, stop in _slices(part, _CACHED_WEIGHTS):
        part.dequantise(start, stop, out[start:stop])


def _slices(part: Int4Part, weights: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold about `weights` weights."""
    num_rows, num_columns = part.shape
    step = max(weights // num_columns // 8 * 8, 8)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _scaled(
    words: torch.Tensor, shift: int, zeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """(q - zero) * scale of one nibble: words int32 [n, k], zeros and scales [n, groups]."""
    num_rows, groups = scales.shape
    q = ((words >> shift) & 0xF).view(num_rows, groups, -1).float()
    q -= zeros[:, :, None]
    q *= scales[:, :, None]
    return q.view(num_rows, -1)


def _scale_dtype(scales: Sequence[torch.Tensor]) -> torch.dtype:
    """The 16-bit dtype that all scales are in already, or the one that keeps them best."""
    dtypes = {scale.dtype for scale in scales}
    if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16}:
        return dtypes.pop()
    for scale in scales:
        magnitude = scale.float().abs()
        fits = (magnitude >= _MIN_NORMAL_F16) & (magnitude <= _MAX_F16)
        if not bool(((magnitude == 0) | fits).all()):
            return torch.bfloat16
    return torch.float16

"""Linear layers with the adapters written in: y = W x + b, then y += B_s (A_s x) per token row.

DoRA and trained biases then scale and shift y by vectors (see `multilora_kernels.scale_shift`).
q, k and v are one packed multiply, and so are gate and up. How W is stored is behind `Weight`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from multilora_cli.layers.context import StepContext
from multilora_kernels.add_lora import add_lora, multiply_add_lora
from multilora_kernels.bf16_gemv import bf16_gemv
from multilora_kernels.fp8_quant import RowScaling
from multilora_kernels.rows import Rows
from multilora_kernels.scale_shift import scale_shift

Packed = TypeVar("Packed", bound=Any)


class Weight(Protocol):
    """A matrix [out, in] in some storage."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""

    @property
    def scaling(self) -> RowScaling | None:
        """How `matmul` wants its rows quantised beside the plain ones; None: not at all."""

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Rows [T, in] times the transposed matrix: a new tensor [T, out] of their dtype."""

    def dequantise(self) -> torch.Tensor:
        """The matrix in the compute dtype: [out, in]; not to be written to."""

    def copied(self) -> "Weight":
        """The same in memory that is taken anew."""


class DenseWeight:
    """A matrix stored as it is, in the compute dtype."""

    scaling = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def empty(
        cls, size_out: int, size_in: int, dtype: torch.dtype, device: torch.device
    ) -> "DenseWeight":
        """Uninitialised [size_out, size_in], to be filled by the loader."""
        return cls(torch.empty(size_out, size_in, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.tensor.nbytes

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Rows [T, in] times the transposed matrix: [T, out]."""
        return bf16_gemv(rows.x, self.tensor)

    def dequantise(self) -> torch.Tensor:
        """The matrix itself."""
        return self.tensor

    def copied(self) -> "DenseWeight":
        """The same in memory that is taken anew."""
        return DenseWeight(self.tensor.clone())


class PackedMatrix(Protocol):
    """A quantised matrix in the form its kernel reads (AwqWeight, Fp8WeightOnly)."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the transposed matrix."""

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in `dtype`."""


class QuantisedWeight:
    """A packed matrix multiplied by its kernel; activations stay in the compute dtype."""

    scaling = None

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype) -> None:
        self._packed = packed
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._packed.nbytes

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Rows [T, in] times the transposed matrix: [T, out]."""
        return self._packed.matmul(rows.x)

    def dequantise(self) -> torch.Tensor:
        """The matrix in the compute dtype, each weight rounded once."""
        return self._packed.dequantise(self._dtype)

    def copied(self) -> "QuantisedWeight":
        """The same in memory that is taken anew."""
        return QuantisedWeight(copied_tensors(self._packed), self._dtype)


class StackedWeight:
    """Matrices over the same inputs, one below the other, that no single multiply can serve.

    Their rows cannot be quantised once for all: each part does it for itself.
    """

    scaling = None

    def __init__(self, parts: Sequence[Weight]) -> None:
        self._parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self._parts)

    def matmul(self, rows: Rows) -> torch.Tensor:
        """Rows [T, in] times the transposed matrices: [T, sum of out]."""
        return torch.cat([part.matmul(rows) for part in self._parts], dim=1)

    def dequantise(self) -> torch.Tensor:
        """All matrices as one, in the compute dtype."""
        return torch.cat([part.dequantise() for part in self._parts])

    def copied(self) -> "StackedWeight":
        """The same in memory that is taken anew."""
        return StackedWeight([part.copied() for part in self._parts])


def copied_tensors(packed: Packed) -> Packed:
    """A packed matrix, a dataclass, with every tensor of it copied."""
    found = {field.name: getattr(packed, field.name) for field in fields(packed)}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return replace(packed, **{name: tensor.clone() for name, tensor in tensors.items()})


class LoraLinear:
    """One packed projection of one layer, with the adapters of every token row added.

    `group` is the key of `multilora_kernels.layout.GROUPS` that lists its modules in the order
    in which their rows are packed: qkv, o, gate_up or down.
    """

    def __init__(
        self, weight: Weight, layer: int, group: str, bias: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.layer = layer
        self.group = group

    @property
    def scaling(self) -> RowScaling | None:
        """How the rows it is called with are best quantised by what makes them."""
        return self.weight.scaling

    def __call__(self, rows: Rows, ctx: StepContext) -> torch.Tensor:
        """Rows [T, in]; returns [T, out]."""
        if ctx.segments is None or not ctx.segments.has_adapters:
            return self._multiply(rows)
        assert ctx.table is not None, "segments with adapters need their table"
        where = (ctx.pool, ctx.table, ctx.segments, self.layer, self.group)
        if ctx.side is None:
            y = self._multiply(rows)
            add_lora(y, rows.x, *where)
        else:
            y = multiply_add_lora(partial(self._multiply, rows), rows.x, *where, ctx.side)
        scale_shift(y, *where)
        return y

    def _multiply(self, rows: Rows) -> torch.Tensor:
        """The base's own result: a new tensor [T, out]."""
        y = self.weight.matmul(rows)
        if self.bias is not None:
            y += self.bias
        return y

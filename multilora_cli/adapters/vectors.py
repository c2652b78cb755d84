"""What DoRA and trained biases come down to when served: two vectors over a module's outputs.

PEFT computes  y = m / ||W + s B A|| * (W x + s (B A x + b_B)) + b  with a trained bias b in place
of the base's b_0. Served is  y = scale * (W x + b_0 + s B A x) + shift, so

    scale = m / ||W + s B A||   per output row, over the base as it is served, quantised or not
    shift = b + s b_B - scale * b_0

Both are computed once, in float32, when the adapter's image is built.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from multilora_cli.adapters.coverage import ModuleWeights
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.tensor_names import EdgeModule
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import VectorKind

Read = Callable[[TensorEntry], torch.Tensor]
"""The values of a tensor, valid until the next read."""


class BaseRows(Protocol):
    """What the vectors need to know of the base; results are float32 on the CPU."""

    def row_norms(
        self, layer: int, module: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """||W + scaling * B A|| of every output row: [d_out]; A [r, d_in], B [d_out, r]."""

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        """The base's own bias [d_out], if it has one."""

    def edge_rows(self, module: EdgeModule, tokens: torch.Tensor) -> torch.Tensor:
        """Rows `tokens` int64 [N] of the embedding or the head: [N, hidden]."""


class UnknownBase:
    """Stands in where an adapter's values are checked without its base: norm 1, bias 0."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self._geometry = geometry

    def row_norms(
        self, layer: int, module: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Ones [d_out]."""
        return torch.ones(len(lora_b))

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        """Zeros [d_out] where the base has a bias."""
        if module not in self._geometry.biased_modules:
            return None
        return torch.zeros(self._geometry.module_shapes[module][1])

    def edge_rows(self, module: EdgeModule, tokens: torch.Tensor) -> torch.Tensor:
        """Zeros [N, hidden]."""
        return torch.zeros(len(tokens), self._geometry.hidden_size)


def vectors_of(
    adapter: AdapterFile, key: tuple[int, str], read: Read, base: BaseRows
) -> dict[VectorKind, torch.Tensor]:
    """Scale and shift of one (layer, module), float32 [d_out], as far as it has them.

    Raises AdapterError for values that are not finite.
    """
    weights, bias = adapter.weights.get(key), adapter.biases.get(key)
    own = base.bias(*key)
    found: dict[VectorKind, torch.Tensor] = {}
    if weights is not None and weights.magnitude is not None:
        found["scale"] = _scale(key, weights, weights.magnitude, read, base)
    # Where nothing was trained, base biases keep their value, also under a scale.
    trained = own if bias is None else _finite(bias, read)
    shift = torch.zeros(()) if trained is None else trained
    if weights is not None and weights.lora_bias is not None:
        shift = shift + weights.scaling * _finite(weights.lora_bias, read)
    if own is not None:
        shift = shift - found.get("scale", torch.ones(())) * own
    if (*key, "shift") in adapter.extras.vectors:
        found["shift"] = shift
    return found


def _scale(
    key: tuple[int, str],
    weights: ModuleWeights,
    magnitude: TensorEntry,
    read: Read,
    base: BaseRows,
) -> torch.Tensor:
    lora_a, lora_b = read(weights.lora_a).float().clone(), read(weights.lora_b).float().clone()
    norms = base.row_norms(*key, lora_a, lora_b, weights.scaling)
    scale = _finite(magnitude, read) / norms
    wrong = int((~scale.isfinite()).sum())
    if wrong:
        raise AdapterError(
            f"{magnitude.file}: tensor {quoted(magnitude.name)}: {wrong} of {scale.numel():,} rows"
            " of the adapted base have norm zero, so their magnitude cannot be applied",
            reason="not_finite",
            field=magnitude.name,
        )
    return scale


def _finite(entry: TensorEntry, read: Read) -> torch.Tensor:
    """The tensor in float32, a copy. Raises AdapterError for NaN and infinity."""
    values = read(entry).float().clone()
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    if nan or inf:
        raise AdapterError(
            f"{entry.file}: tensor {quoted(entry.name)}: {nan} NaN and {inf} infinite of"
            f" {values.numel():,} values",
            reason="not_finite",
            field=entry.name,
        )
    return values

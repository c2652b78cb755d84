"""Builds the quantised linears of a base from a checkpoint's tensors, or from random ones."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError
from multilora_cli.layers.awq import (
    AutoAwqPart,
    CompressedPart,
    Int4Part,
    dequantise_part,
    pack_parts,
)
from multilora_cli.layers.fp8 import fp8_linear, quantise_at_load
from multilora_cli.layers.linear import DenseWeight, QuantisedWeight, StackedWeight, Weight
from multilora_cli.models.checkpoint import open_checkpoint
from multilora_cli.models.quantized_tensors import StoredLinears, find_linears
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_cli.sizing.quantization import Quantization, choose_quantization
from multilora_cli.sizing.quantization_config import read_quantization
from multilora_kernels.fp8_gemm import Fp8Weight, fp8_weight
from multilora_kernels.launch import chip_of
from multilora_kernels.layout import GROUPS

Fetch = Callable[[TensorEntry], torch.Tensor]
"""The tensor of an entry in its stored dtype, on the device."""

Part = torch.Tensor | Int4Part | Fp8Weight
"""One module's weight: as it is, 4-bit, or FP8."""

_EIGHTS = -0x77777778  # eight nibbles of 8 in an int32


def base_quantization(
    folder: Path, geometry: ModelGeometry, wanted: str, *, from_files: bool = True
) -> Quantization:
    """How the linears of the base in `folder` are stored; `wanted` is `base.quantization`.

    From the files themselves, or from config.json alone. Raises ModelError.
    """
    where = str(folder / "config.json")
    quantization = choose_quantization(
        wanted, read_quantization(geometry.quantization, where), where
    )
    if quantization.method == "none" or not from_files:
        return quantization
    return find_linears(folder, open_checkpoint(folder), geometry, quantization).quantization


def placed(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> Quantization:
    """The form in which weights lie on `device` to multiply activations of `dtype`."""
    gpu = device.type == "cuda"
    has_fp8 = gpu and chip_of(device.index or 0).has_fp8
    return quantization.on(gpu=gpu, has_fp8=has_fp8, itemsize=dtype.itemsize)


def storage_notes(stored: StoredLinears) -> tuple[str, ...]:
    """What a person should know of the base's storage, for the start panel."""
    notes, quantization = [], stored.quantization
    if quantization.method != "none" and quantization.placement == "dense":
        notes.append(f"base: {quantization.describe()} to the compute dtype at load")
    elif quantization.placement == "weight_only" and quantization.activations != "none":
        notes.append("base: FP8 weights, 16-bit activations: this device multiplies no FP8")
    if stored.unused:
        notes.append(
            f"{len(stored.unused)} scales for an FP8 KV cache are not used: K and V are kept in"
            " the compute dtype, or as FP8 without a scale (base.kv_cache_dtype: fp8)"
        )
    return tuple(notes)


class QuantisedLinears:
    """Makes the packed weight of one layer's group; called while a decoder is built."""

    def __init__(
        self, stored: StoredLinears, geometry: ModelGeometry, dtype: torch.dtype, fetch: Fetch
    ) -> None:
        self._stored = stored
        self._shapes = geometry.module_shapes
        self._dtype = dtype
        self._fetch = fetch

    def __call__(self, layer: int, group: str) -> Weight | None:
        """The weight of a group that holds a quantised part, else None. Raises ModelError.

        A packed one is copied once what it is made from is gone: it then lies right behind the one
        before. Without that the holes between the weights of an 8B made FP8 at load took 300 MiB.
        """
        if not self._stored.covers(layer, group):
            return None
        names = [projection_name(layer, module) for module in GROUPS[group]]
        if self._stored.quantization.placement == "dense":
            return self._dense(names)
        return self._packed(names).copied()

    def _packed(self, names: list[str]) -> Weight:
        parts = [self._part(name) for name in names]
        int4 = [part for part in parts if isinstance(part, AutoAwqPart | CompressedPart)]
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(int4) == len(parts):
            return QuantisedWeight(pack_parts(int4), self._dtype)
        if len(fp8) == len(parts):
            return self._fp8(fp8)
        return StackedWeight([self._alone(part) for part in parts])

    def _alone(self, part: Part) -> Weight:
        if isinstance(part, torch.Tensor):
            return DenseWeight(part.to(self._dtype))
        if isinstance(part, Fp8Weight):
            return self._fp8([part])
        return QuantisedWeight(pack_parts([part]), self._dtype)

    def _fp8(self, parts: list[Fp8Weight]) -> Weight:
        weight_only = self._stored.quantization.placement == "weight_only"
        return fp8_linear(parts, self._dtype, weight_only=weight_only)

    def _dense(self, names: list[str]) -> Weight:
        """All parts dequantised, part by part."""
        shapes = [self._shapes[name.rpartition(".")[2]] for name in names]
        whole: torch.Tensor | None = None
        row = 0
        for name, (d_in, d_out) in zip(names, shapes, strict=True):
            part = self._part(name)
            if whole is None:
                num_rows, device = sum(shape[1] for shape in shapes), _device(part)
                whole = torch.empty(num_rows, d_in, dtype=self._dtype, device=device)
            rows = whole[row : row + d_out]
            if isinstance(part, torch.Tensor):
                rows.copy_(part)
            elif isinstance(part, Fp8Weight):
                rows.copy_(part.dequantise(self._dtype))
            else:
                dequantise_part(part, rows)
            self._check_finite(name, rows)
            row += d_out
        assert whole is not None, "a group without modules"
        return DenseWeight(whole)

    def _part(self, name: str) -> Part:
        entries, quantization = self._stored.parts[name], self._stored.quantization
        tensors = {key: self._checked(key, entry) for key, entry in entries.items()}
        if "plain" in tensors:
            return tensors["plain"]
        if quantization.at_load:
            return quantise_at_load(tensors["weight"])
        if quantization.method == "fp8":
            return fp8_weight(
                tensors["weight"], tensors["scale"], tensors.get("input"), quantization.upper_bound
            )
        if quantization.layout == "autoawq":
            return AutoAwqPart(tensors["q"], tensors["zero"], tensors["scale"])
        d_in, d_out = self._shapes[name.rpartition(".")[2]]
        if tensors["shape"].tolist() != [d_out, d_in]:
            found = tensors["shape"].tolist()
            raise _error(entries["shape"], f"found {found}, expected {[d_out, d_in]}")
        return CompressedPart(tensors["q"], tensors["scale"], tensors.get("zero"), d_in)

    def _checked(self, key: str, entry: TensorEntry) -> torch.Tensor:
        """The tensor, its values proven finite."""
        tensor = self._fetch(entry)
        if tensor.dtype == torch.float8_e4m3fn:
            if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
                raise _error(entry, "holds NaN")
        elif tensor.dtype == torch.float8_e8m0fnu:
            tensor = tensor.float()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            if not bool(tensor.isfinite().all()):
                raise _error(entry, "not finite")
            if key == "input" and not bool((tensor > 0).all()):
                raise _error(entry, f"found {float(tensor):g}, expected a positive scale")
        return tensor

    def _check_finite(self, name: str, rows: torch.Tensor) -> None:
        if not bool(torch.stack(torch.aminmax(rows)).isfinite().all()):
            entry = next(iter(self._stored.parts[name].values()))
            dtype = str(self._dtype).removeprefix("torch.")
            raise ModelError(
                f"{entry.file}: {name}: not finite in {dtype} once dequantised",
                hint="serve it as bfloat16" if self._dtype == torch.float16 else None,
            )


class RandomTensors:
    """Random tensors of quantised linears whose matrices have an rms of 1/sqrt(in)."""

    def __init__(self, geometry: ModelGeometry, device: torch.device, seed: int = 0) -> None:
        self._shapes = geometry.module_shapes
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, entry: TensorEntry) -> torch.Tensor:
        """A tensor of the entry's shape and dtype."""
        module, suffix = entry.name.split(".")[-2:]
        d_in, d_out = self._shapes[module]
        bound = math.sqrt(3 / d_in)
        if suffix in ("qweight", "weight_packed"):
            options = {"dtype": torch.int32, "device": self._device, "generator": self._generator}
            return torch.randint(-(2**31), 2**31, entry.shape, **options)  # type: ignore[call-overload,no-any-return]
        if suffix in ("qzeros", "weight_zero_point"):
            return torch.full(entry.shape, _EIGHTS, dtype=torch.int32, device=self._device)
        if suffix == "weight_shape":
            return torch.tensor([d_out, d_in], device=self._device)
        if suffix == "weight":
            matrix = torch.empty(entry.shape, device=self._device)
            if entry.dtype == "F8_E4M3":
                return matrix.uniform_(-448, 448, generator=self._generator).to(torch.float8_e4m3fn)
            return matrix.uniform_(-bound, bound, generator=self._generator).bfloat16()
        # Activations reach about 9; nibbles less 8 lie within -8 and 7, FP8 within 448.
        value = {"input_scale": 0.02, "scales": bound / 8, "weight_scale": bound / 448}[suffix]
        if entry.dtype in ("F16", "BF16"):
            return torch.full(entry.shape, bound / 8, dtype=torch.float16, device=self._device)
        return torch.full(entry.shape, value, device=self._device)


def _device(part: Part) -> torch.device:
    tensor = part if isinstance(part, torch.Tensor) else _storage(part)
    return tensor.device


def _storage(part: Int4Part | Fp8Weight) -> torch.Tensor:
    return part.q if isinstance(part, Fp8Weight) else part.scale


def _error(entry: TensorEntry, what: str) -> ModelError:
    return ModelError(f"{entry.file}: tensor {quoted(entry.name)}: {what}")

"""Quantised checkpoints made bit by bit from their documented layouts, and what they mean.

Nothing here uses the code under test: words are packed nibble by nibble with numpy, and the
reference is a transformers model in fp32 whose weights are the dequantised ones, its activations
rounded to FP8 by hooks where the format says so.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import tiny

# Nibble i (from the least significant) of an AutoAWQ word holds column 8 c + AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3_MAX = 448.0
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64,
}  # fmt: skip
# No size is a multiple of 128, as SmolLM2's 576 and 1536 with heads of 64.
EDGE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One module's tensors by suffix, its weight dequantised, and its static activation scale."""

    tensors: dict[str, Tensor]
    weight: Tensor  # fp32 [out, in]


@dataclass(frozen=True)
class Kind:
    """A format: its quantization_config and how one module is packed."""

    config: dict[str, Any] | None
    pack: Callable[[Tensor], Packed]
    activations: Callable[[Tensor], Tensor] | None = None  # what the format does to a row of x
    skips: tuple[str, ...] = ()  # modules left in 16 bits, by the end of their name
    shape: dict[str, Any] = field(default_factory=lambda: WIDE)
    extra: dict[str, Tensor] = field(default_factory=dict)  # tensors beside


# ---------------------------------------------------------------- INT4


def _pack_words(nibbles: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """[..., 8 n] of 0..15 to int32 [..., n]; nibble i of a word is element order[i]."""
    words = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), dtype=np.uint32)
    for i, column in enumerate(order):
        words |= nibbles[..., column::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def _quantise_int4(
    weight: Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [out, in], zero and scale [out, groups]; a group of zeros gets scale 1."""
    num_out, num_in = weight.shape
    groups = weight.reshape(num_out, -1, num_in if group == -1 else group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = groups.abs().amax(-1) / 7.5 if symmetric else (high - low) / 15
    scale = torch.where(scale == 0, 1.0, scale).to(scale_dtype)
    wide = scale.float()
    zero = torch.full_like(wide, 8.0) if symmetric else (-low / wide).round().clamp(0, 15)
    q = (groups / wide[..., None] + zero[..., None]).round().clamp(0, 15)
    return q.reshape(num_out, num_in), zero, scale


def _dequantise_int4(q: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    groups = q.reshape(q.shape[0], scale.shape[1], -1)
    return ((groups - zero[..., None]) * scale.float()[..., None]).reshape(q.shape)


def pack_awq(
    group: int, *, symmetric: bool = False, scale_dtype: torch.dtype = torch.float16
) -> Callable[[Tensor], Packed]:
    """AutoAWQ's GEMM layout: everything transposed, words along the outputs."""

    def pack(weight: Tensor) -> Packed:
        q, zero, scale = _quantise_int4(weight, group, symmetric, scale_dtype)
        tensors = {
            "qweight": torch.from_numpy(_pack_words(q.T.int().numpy(), AWQ_ORDER)),
            "qzeros": torch.from_numpy(_pack_words(zero.T.int().numpy(), AWQ_ORDER)),
            "scales": scale.T.contiguous(),
        }
        return Packed(tensors, _dequantise_int4(q, zero, scale))

    return pack


def pack_compressed(
    group: int, *, symmetric: bool, scale_dtype: torch.dtype = torch.bfloat16
) -> Callable[[Tensor], Packed]:
    """compressed-tensors pack-quantized: words along the inputs, zero points along the outputs."""

    def pack(weight: Tensor) -> Packed:
        q, zero, scale = _quantise_int4(weight, group, symmetric, scale_dtype)
        plain = tuple(range(8))
        tensors = {
            "weight_packed": torch.from_numpy(_pack_words(q.int().numpy(), plain)),
            "weight_scale": scale,
            "weight_shape": torch.tensor(list(weight.shape)),
        }
        if not symmetric:
            packed = _pack_words(np.ascontiguousarray(zero.T.int().numpy()), plain)
            tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed.T))
        return Packed(tensors, _dequantise_int4(q, zero, scale))

    return pack


# ---------------------------------------------------------------- FP8


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def pack_fp8(
    scales: str,
    *,
    names: tuple[str, str] = ("weight_scale", "input_scale"),
    shape: tuple[int, ...] = (),
    scale_dtype: torch.dtype = torch.float32,
    static: bool = False,
) -> Callable[[Tensor], Packed]:
    """FP8 weights with a scale per tensor, channel or block; `names` of weight and input scale."""

    def pack(weight: Tensor) -> Packed:
        num_out, num_in = weight.shape
        rows, columns = {
            "tensor": (num_out, num_in), "channel": (1, num_in), "block": (128, 128),
        }[scales]  # fmt: skip
        grid = (-(-num_out // rows), -(-num_in // columns))
        scale = torch.empty(grid)
        wide = torch.empty_like(weight)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[i, j] = (part.abs().max().clamp(min=1e-6) / E4M3_MAX).item()
                if scale_dtype == torch.float8_e8m0fnu:
                    scale[i, j] = 2.0 ** torch.ceil(torch.log2(scale[i, j]))
        stored = scale.to(scale_dtype)
        scale = stored.float()
        for i in range(grid[0]):
            for j in range(grid[1]):
                cut = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                wide[cut] = _to_e4m3(weight[cut] / scale[i, j]).float()
        repeated = scale.repeat_interleave(rows, 0)[:num_out].repeat_interleave(columns, 1)
        tensors = {
            "weight": wide.to(torch.float8_e4m3fn),
            names[0]: stored if scales != "tensor" else stored.reshape(shape),
        }
        if static:
            tensors[names[1]] = torch.full(shape, STATIC_SCALE)
        return Packed(tensors, wide * repeated[:, :num_in])

    return pack


STATIC_SCALE = 0.015625


def static_rows(x: Tensor) -> Tensor:
    """Activations through FP8 with the checkpoint's scale."""
    return _to_e4m3(x / STATIC_SCALE).float() * STATIC_SCALE


def dynamic_rows(bound: float = float("inf"), group: int = 0) -> Callable[[Tensor], Tensor]:
    """Activations through FP8 with a scale per row, or per row and 128 inputs."""

    def through(x: Tensor) -> Tensor:
        width = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -width % (group or width)))
        parts = padded.unflatten(-1, (-1, group or width))
        scale = parts.abs().amax(-1, keepdim=True).clamp(1e-10, bound) / E4M3_MAX
        return (_to_e4m3(parts / scale).float() * scale).flatten(-2)[..., :width]

    return through


# ---------------------------------------------------------------- checkpoints


def compressed_config(
    weights: dict[str, Any], activations: dict[str, Any] | None, format_name: str
) -> dict[str, Any]:
    """A quantization_config as llmcompressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def linears(model: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The projections of all layers by name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module


def quantise_checkpoint(model: Any, folder: Path, kind: Kind) -> Any:
    """Save `model` in `folder` as `kind`; returns the reference: weights dequantised, in fp32."""
    tiny.save_model(model, folder)
    return requantise(folder, model, kind)


def requantise(folder: Path, model: Any, kind: Kind) -> Any:
    """Turn the fp32 checkpoint in `folder` into `kind`; returns the reference model."""
    reference = copy.deepcopy(model)
    tensors = load_file(folder / "model.safetensors")
    for name, module in linears(reference):
        if name.endswith(kind.skips) if kind.skips else False:
            continue
        packed = kind.pack(tensors.pop(f"{name}.weight"))
        tensors.update({f"{name}.{suffix}": t for suffix, t in packed.tensors.items()})
        with torch.no_grad():
            module.weight.copy_(packed.weight)
    save_file({**tensors, **kind.extra}, folder / "model.safetensors")
    if kind.config is not None:
        edit_config(folder, lambda config: config.update(quantization_config=kind.config))
    return reference


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite config.json after `change`."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite model.safetensors after `change` of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def with_activations(reference: Any, kind: Kind) -> Any:
    """The reference model with its linears' inputs rounded as `kind` says."""
    model = copy.deepcopy(reference)
    through = kind.activations
    if through is not None:
        for name, module in linears(model):
            if not (kind.skips and name.endswith(kind.skips)):
                module.register_forward_pre_hook(lambda _, args: (through(args[0]),))
    return model


# ---------------------------------------------------------------- the kinds


def _awq(group: int, **changes: Any) -> dict[str, Any]:
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip
    return config | changes


def _int4(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
               "symmetric": True, "dynamic": False, "actorder": None}  # fmt: skip
    return compressed_config(weights | changes, None, "pack-quantized")


def _float8(
    weights: str, activations: dict[str, Any] | None, block: list[int] | None = None
) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": weights, "symmetric": True,
              "dynamic": False, "block_structure": block}  # fmt: skip
    if activations is not None:
        activations = {"num_bits": 8, "type": "float", "symmetric": True} | activations
    return compressed_config(scheme, activations, "float-quantized")


_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
           "weight_block_size": [128, 128]}  # fmt: skip
_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_OLD_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}
_KV = {
    f"model.layers.{layer}.self_attn.{name}": torch.ones(1)
    for layer in range(2)
    for name in ("k_scale", "v_scale", "k_proj.output_scale")
}

INT4: dict[str, Kind] = {
    "awq-32": Kind(_awq(32), pack_awq(32), shape=EDGE),
    "awq-64": Kind(_awq(64), pack_awq(64), shape=EDGE),
    "awq-128": Kind(_awq(128), pack_awq(128)),
    "awq-column": Kind(_awq(-1), pack_awq(-1), shape=EDGE),
    "awq-old-keys": Kind(_OLD_AWQ, pack_awq(64)),
    "awq-no-zero-point": Kind(_awq(128, zero_point=False), pack_awq(128, symmetric=True)),
    "awq-skips": Kind(
        _awq(64, modules_to_not_convert=["k_proj", "model.layers.1.mlp", "lm_head"]),
        pack_awq(64), skips=("k_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"),
    ),
    "awq-gptqmodel": Kind(
        _awq(128, format="gemm", desc_act=False, sym=False, lm_head=False,
             meta={"quantizer": ["gptqmodel:7.6.0"]}),
        pack_awq(128, scale_dtype=torch.bfloat16),
    ),
    "w4a16": Kind(_int4(), pack_compressed(128, symmetric=True)),
    "w4a16-asymmetric-32": Kind(
        _int4(group_size=32, symmetric=False), pack_compressed(32, symmetric=False), shape=EDGE
    ),
    "w4a16-channel": Kind(
        _int4(strategy="channel", group_size=None),
        pack_compressed(-1, symmetric=True, scale_dtype=torch.float16), shape=EDGE,
    ),
    "w4a16-asymmetric-channel-fp32": Kind(
        _int4(strategy="channel", group_size=None, symmetric=False),
        pack_compressed(-1, symmetric=False, scale_dtype=torch.float32),
    ),
}  # fmt: skip

FP8: dict[str, Kind] = {
    "fp8-static": Kind(_STATIC, pack_fp8("tensor", static=True), static_rows),
    "fp8-static-mistral": Kind(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        pack_fp8("tensor", names=("weight_scale_inv", "activation_scale"), static=True),
        static_rows,
    ),
    "fp8-dynamic": Kind(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": "static"},
        pack_fp8("tensor"), dynamic_rows(), extra=_KV,
    ),
    "fp8-dynamic-channel": Kind(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, pack_fp8("channel"),
        dynamic_rows(), skips=("o_proj", "0.self_attn.v_proj"), shape=EDGE,
    ),
    "fbgemm": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5, "modules_to_not_convert": []},
        pack_fp8("channel"), dynamic_rows(bound=1.5),
    ),
    "w8a8-dynamic": Kind(
        _float8("channel", {"strategy": "token", "dynamic": True}),
        pack_fp8("channel", scale_dtype=torch.bfloat16), dynamic_rows(), shape=EDGE,
    ),
    "w8a8-static": Kind(
        _float8("tensor", {"strategy": "tensor", "dynamic": False}),
        pack_fp8("tensor", shape=(1,), static=True), static_rows,
    ),
    "w8a8-block": Kind(
        _float8("block", {"strategy": "group", "group_size": 128, "dynamic": True}, [128, 128]),
        pack_fp8("block", scale_dtype=torch.bfloat16), dynamic_rows(group=128), shape=EDGE,
    ),
    "w8a16": Kind(_float8("channel", None), pack_fp8("channel")),
    "fp8-block": Kind(
        _BLOCKS, pack_fp8("block", names=("weight_scale_inv", "")), dynamic_rows(group=128)
    ),
    "fp8-block-e8m0": Kind(
        _BLOCKS | {"scale_fmt": "ue8m0"},
        pack_fp8("block", names=("weight_scale_inv", ""), scale_dtype=torch.float8_e8m0fnu),
        dynamic_rows(group=128), shape=EDGE,
    ),
}  # fmt: skip
KINDS = INT4 | FP8

"""Which tensors of a checkpoint make up its quantised linears: found and checked from headers.

The tensors decide which modules are quantised; config.json says how. Of each quantised module
every tensor is there, with the dtype and shape that its layout gives it, or the base is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError
from multilora_cli.models.checkpoint import Checkpoint
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_cli.sizing.quantization import BLOCK, Quantization
from multilora_kernels.layout import GROUPS

_FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = ("F16", "BF16", "F32")
_SCALARS: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
# A module that has one of these is quantised, whatever its weight's dtype.
_MARKS = {
    "qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_shape",
}  # fmt: skip
# Scales for a KV cache in FP8, as several exporters name them.
_KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(?:\w+\.)?(?:q|k|v|kv|output)_scale")
_FOREIGN = {
    "g_idx": "act-order is not read: requantise without it (desc_act false)",
    "weight_g_idx": "act-order is not read: requantise without it (actorder weight or none)",
    "SCB": "bitsandbytes is not read: serve the 16-bit model or quantise it to awq",
    "absmax": "bitsandbytes is not read: serve the 16-bit model or quantise it to awq",
    "weight_global_scale": "nvfp4 is not read: quantise the 16-bit model to awq or fp8",
    "weight_scale_2": "nvfp4 is not read: quantise the 16-bit model to awq or fp8",
}


@dataclass(frozen=True)
class Rule:
    """One tensor of a quantised module: its names in the wild, and what it must be."""

    key: str
    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StoredLinears:
    """The quantised linears of a checkpoint.

    `parts` maps a module to its tensors by the keys of `Rule`. Modules kept as they are appear,
    under the key plain, where they share a packed weight with a quantised one.
    """

    quantization: Quantization  # `ignored` lists just the modules kept as they are
    parts: Mapping[str, Mapping[str, TensorEntry]]
    unused: frozenset[str]  # tensors that have no effect

    @property
    def names(self) -> frozenset[str]:
        """Every tensor that is accounted for here."""
        used = {entry.name for part in self.parts.values() for entry in part.values()}
        return self.unused | used

    def covers(self, layer: int, group: str) -> bool:
        """Whether the packed weight of a group holds a quantised part."""
        return any(projection_name(layer, module) in self.parts for module in GROUPS[group])


def find_linears(
    folder: Path, checkpoint: Checkpoint, geometry: ModelGeometry, quantization: Quantization
) -> StoredLinears:
    """The quantised linears in the files of `folder`. Raises ModelError naming file and tensor."""
    if quantization.method == "none":
        return StoredLinears(quantization, {}, frozenset())
    modules, unused = _by_module(checkpoint, geometry)
    parts: dict[str, Mapping[str, TensorEntry]] = {}
    plain: dict[str, TensorEntry] = {}
    for name, (d_in, d_out) in _projections(geometry):
        found = modules[name]
        if quantization.at_load or not _is_plain(found):
            if found or quantization.covers(name):
                rules = module_rules(quantization, name, d_in, d_out)
                parts[name] = {rule.key: _match(folder, name, rule, found) for rule in rules}
        else:
            plain[name] = _match(
                folder, name, Rule("plain", ("weight",), _FLOATS, ((d_out, d_in),)), found
            )
    if not parts:
        raise ModelError(
            f"{folder / 'config.json'}: quantization_config says {quantization.method}, but no"
            " linear layer is stored so",
            hint="remove quantization_config to serve the weights as they are",
        )
    exact = quantization if quantization.at_load else _exactly(quantization, plain)
    return StoredLinears(exact, parts | _beside(plain, parts, geometry), unused)


def outline_linears(geometry: ModelGeometry, quantization: Quantization) -> StoredLinears:
    """What config.json alone promises, for random weights: entries without a file."""
    parts: dict[str, Mapping[str, TensorEntry]] = {}
    plain: dict[str, TensorEntry] = {}
    for name, (d_in, d_out) in _projections(geometry):
        if quantization.covers(name):
            parts[name] = {
                rule.key: _entry(name, rule)
                for rule in module_rules(quantization, name, d_in, d_out)
            }
        else:
            plain[name] = _entry(name, Rule("plain", ("weight",), _FLOATS, ((d_out, d_in),)))
    return StoredLinears(quantization, parts | _beside(plain, parts, geometry), frozenset())


def module_rules(quantization: Quantization, name: str, d_in: int, d_out: int) -> tuple[Rule, ...]:
    """The tensors of one module in the layout of `quantization`."""
    if quantization.at_load:
        return (Rule("weight", ("weight",), _FLOATS, ((d_out, d_in),)),)
    if quantization.method == "fp8":
        return tuple(_fp8_rules(quantization, d_in, d_out))
    group = d_in if quantization.group_size == -1 else quantization.group_size
    if d_in % group:
        raise ModelError(
            f"{name}: group_size {group} does not divide its {d_in} inputs",
            hint="quantise again with a group_size that divides every input: 64, 32 or -1",
        )
    if quantization.layout == "autoawq":
        return _autoawq_rules(name, d_in, d_out, d_in // group)
    return tuple(_compressed_rules(quantization, d_in, d_out, d_in // group))


def foreign_hint(names: Iterable[str]) -> str | None:
    """What tensors that have no place here are known to be, in words."""
    for name in sorted(names):
        path, _, suffix = name.rpartition(".")
        if suffix in _FOREIGN:
            return _FOREIGN[suffix]
        if path in ("lm_head", "model.embed_tokens") and suffix in _MARKS:
            return f"{path} is quantised; quantise again and leave it in 16 bits"
        if suffix in _MARKS:
            return "config.json has no quantization_config that explains it"
    return None


def _autoawq_rules(name: str, d_in: int, d_out: int, groups: int) -> tuple[Rule, ...]:
    if d_out % 8:
        raise ModelError(f"{name}: {d_out} outputs, AutoAWQ's layout packs multiples of 8")
    return (
        Rule("q", ("qweight",), ("I32",), ((d_in, d_out // 8),)),
        Rule("zero", ("qzeros",), ("I32",), ((groups, d_out // 8),)),
        Rule("scale", ("scales",), _SCALES, ((groups, d_out),)),
    )


def _compressed_rules(
    quantization: Quantization, d_in: int, d_out: int, groups: int
) -> Iterator[Rule]:
    yield Rule("q", ("weight_packed",), ("I32",), ((d_out, -(-d_in // 8)),))
    yield Rule("scale", ("weight_scale",), _SCALES, ((d_out, groups),))
    yield Rule("shape", ("weight_shape",), ("I64",), ((2,),))
    if quantization.zero_point:
        yield Rule("zero", ("weight_zero_point",), ("I32",), ((-(-d_out // 8), groups),))


def _fp8_rules(quantization: Quantization, d_in: int, d_out: int) -> Iterator[Rule]:
    rows: tuple[tuple[int, ...], ...] = ((d_out, 1), (d_out,))
    shapes = {
        "tensor": _SCALARS + rows,
        "channel": rows,
        "block": ((-(-d_out // BLOCK), -(-d_in // BLOCK)),),
    }[quantization.granularity]
    yield Rule("weight", ("weight",), ("F8_E4M3",), ((d_out, d_in),))
    scales = ("weight_scale", "weight_scale_inv")
    yield Rule("scale", scales, ("F32", "BF16", "F16", "F8_E8M0"), shapes)
    if quantization.activations == "static":
        yield Rule("input", ("input_scale", "activation_scale"), ("F32", "BF16", "F16"), _SCALARS)


def _projections(geometry: ModelGeometry) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer in range(geometry.num_layers):
        for module, shape in geometry.module_shapes.items():
            yield projection_name(layer, module), shape


def _by_module(
    checkpoint: Checkpoint, geometry: ModelGeometry
) -> tuple[dict[str, dict[str, TensorEntry]], frozenset[str]]:
    """The tensors of each projection by suffix, and the names of KV-cache scales."""
    modules: dict[str, dict[str, TensorEntry]] = {name: {} for name, _ in _projections(geometry)}
    unused = set()
    for entry in checkpoint.entries():
        path, _, suffix = entry.name.rpartition(".")
        if _KV_SCALE.fullmatch(entry.name):
            unused.add(entry.name)
        elif path in modules and suffix != "bias":
            modules[path][suffix] = entry
    return modules, frozenset(unused)


def _is_plain(found: Mapping[str, TensorEntry]) -> bool:
    return "weight" in found and found["weight"].dtype in _FLOATS and not _MARKS & found.keys()


def _match(folder: Path, name: str, rule: Rule, found: Mapping[str, TensorEntry]) -> TensorEntry:
    """The tensor of `rule` among the tensors of its module."""
    entry = next((found[suffix] for suffix in rule.suffixes if suffix in found), None)
    if entry is None:
        beside = next(iter(found.values()), None)
        raise ModelError(
            f"{beside.file if beside else folder}: tensor {quoted(f'{name}.{rule.suffixes[0]}')} is"
            f" missing, expected {_expected(rule)}"
            + (f" beside {quoted(beside.name)}" if beside else ""),
            hint=foreign_hint(f"{name}.{suffix}" for suffix in found if suffix in _FOREIGN),
        )
    if entry.dtype not in rule.dtypes or entry.shape not in rule.shapes:
        raise ModelError(
            f"{entry.file}: tensor {quoted(entry.name)}: found {entry.dtype} {list(entry.shape)},"
            f" expected {_expected(rule)}"
        )
    return entry


def _expected(rule: Rule) -> str:
    shapes = " or ".join(str(list(shape)) for shape in rule.shapes)
    return f"{' or '.join(rule.dtypes)} {shapes}"


def _exactly(quantization: Quantization, plain: Iterable[str]) -> Quantization:
    return replace(quantization, ignored=tuple(plain), targets=())


def _beside(
    plain: Mapping[str, TensorEntry],
    parts: Mapping[str, Mapping[str, TensorEntry]],
    geometry: ModelGeometry,
) -> dict[str, Mapping[str, TensorEntry]]:
    """Modules kept as they are that share a packed weight with a quantised one."""
    beside: dict[str, Mapping[str, TensorEntry]] = {}
    for layer in range(geometry.num_layers):
        for modules in GROUPS.values():
            names = [projection_name(layer, module) for module in modules]
            if any(name in parts for name in names):
                beside.update({name: {"plain": plain[name]} for name in names if name in plain})
    return beside


def _entry(name: str, rule: Rule) -> TensorEntry:
    return TensorEntry(
        f"{name}.{rule.suffixes[0]}", Path("random"), rule.dtypes[0], rule.shapes[0], 0, 0
    )

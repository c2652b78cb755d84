"""Lands every tensor of an adapter file on a module of the base, or refuses the adapter.

A tensor that is skipped in silence is an adapter that answers partly as the base, so there are only
two outcomes: all tensors used and all modules that the config declares present, or an error that
names tensor, found and expected.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, NoReturn

from multilora_cli.adapters.module_pattern import matches_key
from multilora_cli.adapters.peft_config import AdapterConfig
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.units import format_size

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_NAME = re.compile(
    r"(?P<prefix>(?:(?:base_model|model|language_model|module|_orig_mod|_fsdp_wrapped_module)\.)*)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<block>self_attn|mlp)\.(?P<module>\w+)"
    r"\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)
_BLOCKS: Mapping[str, str] = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "qkv_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "gate_up_proj": "mlp",
    "down_proj": "mlp",
}
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# What an unknown tensor most likely is, by a part of its name.
_UNSUPPORTED = (
    ("lora_magnitude_vector", "a DoRA magnitude (use_dora)"),
    ("lora_embedding_", "LoRA on an embedding"),
    ("lora_B.bias", "a bias on lora_B (lora_bias)"),
    ("trainable_tokens", "trained token rows (trainable_token_indices)"),
    ("lm_head", "an adapted or saved output head"),
    ("embed_tokens", "an adapted or saved embedding"),
    ("modules_to_save", "a saved module (modules_to_save)"),
    (".bias", "a trained bias"),
    ("lora_", "LoRA on a module that this base does not have"),
)


class ModuleWeights(NamedTuple):
    """The two factors of one projection in one layer, and alpha / r (or alpha / sqrt(r))."""

    lora_a: TensorEntry  # [rank, d_in]
    lora_b: TensorEntry  # [d_out, rank]
    rank: int
    scaling: float


class _Name(NamedTuple):
    """A tensor name taken apart."""

    prefix: str
    layer: int
    module: str  # one of _BLOCKS
    matrix: str  # A or B
    adapter: str  # the segment some tools put after lora_A; empty where there is none

    @property
    def form(self) -> tuple[str, str]:
        """What all names of one file have in common."""
        return (self.prefix, self.adapter)


_Pairs = dict[tuple[int, str], dict[str, TensorEntry]]


class Coverage:
    """Binds the tensors of one file to a base; `where` names file or folder in errors."""

    def __init__(self, config: AdapterConfig, geometry: ModelGeometry, where: str) -> None:
        self._config = config
        self._geometry = geometry
        self._where = where
        self.notes: tuple[str, ...] = ()  # for people, after `bind`
        self._shapes = dict(geometry.module_shapes)
        for fused, members in FUSED.items():
            d_in = self._shapes[members[0]][0]
            self._shapes[fused] = (d_in, sum(self._shapes[m][1] for m in members))

    def split(
        self, tensors: Mapping[str, TensorEntry]
    ) -> tuple[dict[str, _Name], tuple[TensorEntry, ...]]:
        """LoRA factors with their parsed names, and everything else. Raises AdapterError."""
        if not tensors:
            self._fail("holds no tensors: an empty save, as ZeRO-3 leaves behind", "empty")
        names: dict[str, _Name] = {}
        others: list[TensorEntry] = []
        for name, entry in tensors.items():
            parsed = _parse(name)
            if parsed is None:
                others.append(entry)
            else:
                names[name] = parsed
        self._check_modules_to_save(others)
        if not names:
            lead = f"none of {len(others):,} tensors belongs to this base; the first is "
            raise self._unknown(others[0].name, lead)
        return names, tuple(others)

    def bind(
        self, names: Mapping[str, _Name], tensors: Mapping[str, TensorEntry], max_rank: int
    ) -> dict[tuple[int, str], ModuleWeights]:
        """The factors of every adapted (layer, module), fused ones split. Raises AdapterError."""
        prefix = self._check_forms(names)
        pairs = self._pair(names, tensors)
        self._check_dtypes(pairs)
        self._check_base(pairs)
        weights: dict[tuple[int, str], ModuleWeights] = {}
        for (layer, module), pair in pairs.items():
            path = _path(prefix, layer, module)
            bound = self._weights(path, pair, max_rank)
            for member, part in self._members(module, bound):
                if (layer, member) in weights:
                    self._fail(
                        f"tensor {quoted(part.lora_b.name)}: layer {layer} has {member} twice,"
                        " fused and alone",
                        "duplicate",
                        part.lora_b.name,
                    )
                weights[layer, member] = part
        self._check_declared(prefix, pairs, weights)
        self.notes = tuple(
            f"{field}: {quoted(key)} matches no adapted module"
            for field, key in self._unused_patterns(prefix, pairs)
        )
        return weights

    def unknown(self, entry: TensorEntry) -> AdapterError:
        """The refusal of a tensor that is no LoRA factor of a known module."""
        base = self._geometry
        rows = entry.shape[0] if len(entry.shape) == 2 else 0
        vocabulary = "embed_tokens" in entry.name or "lm_head" in entry.name
        if vocabulary and entry.shape[1:] == (base.hidden_size,) and rows != base.vocab_size:
            return AdapterError(
                f"{self._where}: tensor {quoted(entry.name)}: shape {list(entry.shape)}, the base"
                f" has {[base.vocab_size, base.hidden_size]}: tokens were added in training, which"
                " is not supported",
                reason="vocabulary",
                field=entry.name,
            )
        return self._unknown(entry.name, "")

    def _unknown(self, name: str, lead: str) -> AdapterError:
        what = next((what for part, what in _UNSUPPORTED if part in name), "an unknown tensor")
        return AdapterError(
            f"{self._where}: {lead}tensor {quoted(name)}: {what}, which is not supported; expected"
            f" names such as {_EXAMPLE}",
            reason="unsupported_tensor",
            field=name,
        )

    def _fail(self, message: str, reason: str, field: str = "") -> NoReturn:
        raise AdapterError(f"{self._where}: {message}", reason=reason, field=field)

    def _check_modules_to_save(self, others: list[TensorEntry]) -> None:
        saved = self._config.modules_to_save
        if saved:
            size = format_size(sum(entry.nbytes for entry in others))
            self._fail(
                f"modules_to_save: found {quoted(list(saved))} ({size} of whole layers): replacing"
                " base layers is not supported",
                "unsupported",
                "modules_to_save",
            )

    def _check_forms(self, names: Mapping[str, _Name]) -> str:
        """All names share one prefix and one adapter segment; gives the prefix of module paths."""
        forms = {parsed.form: name for name, parsed in names.items()}
        if len(forms) > 1:
            one, other, *_ = forms.values()
            self._fail(
                f"tensor {quoted(other)}: named in another form than {quoted(one)}; one file, one"
                " form",
                "mixed_names",
                other,
            )
        prefix = next(iter(forms))[0]
        while prefix.startswith("base_model.model."):
            prefix = prefix.removeprefix("base_model.model.")
        return prefix or "model."

    def _pair(self, names: Mapping[str, _Name], tensors: Mapping[str, TensorEntry]) -> _Pairs:
        pairs: _Pairs = {}
        for name, parsed in names.items():
            pairs.setdefault((parsed.layer, parsed.module), {})[parsed.matrix] = tensors[name]
        for pair in pairs.values():
            if len(pair) != 2:
                matrix, entry = next(iter(pair.items()))
                other = "B" if matrix == "A" else "A"
                self._fail(
                    f"tensor {quoted(entry.name)}: has no lora_{other} beside it",
                    "unpaired",
                    entry.name,
                )
        return pairs

    def _check_dtypes(self, pairs: _Pairs) -> None:
        for pair in pairs.values():
            for entry in pair.values():
                if entry.nbytes == 0:
                    self._fail(
                        f"tensor {quoted(entry.name)}: empty, shape {list(entry.shape)}; most"
                        " likely saved from ZeRO-3 without gathering the weights",
                        "empty",
                        entry.name,
                    )
                if entry.dtype not in FLOAT_DTYPES:
                    self._fail(
                        f"tensor {quoted(entry.name)}: dtype {entry.dtype}, expected one of "
                        + ", ".join(FLOAT_DTYPES),
                        "dtype",
                        entry.name,
                    )

    def _check_base(self, pairs: _Pairs) -> None:
        """Layers and sizes are this base's; the error gives the first mismatch and their count."""
        mismatches: list[tuple[str, str]] = []
        for (layer, module), pair in pairs.items():
            d_in, d_out = self._shapes[module]
            for entry, axis, size in ((pair["A"], 1, d_in), (pair["B"], 0, d_out)):
                found = self._mismatch(layer, entry, axis, size)
                if found:
                    mismatches.append((entry.name, found))
        if mismatches:
            name, found = mismatches[0]
            self._fail(
                f"tensor {quoted(name)}: {found}; {len(mismatches)} of {2 * len(pairs)} tensors do"
                " not fit: made for another base?",
                "base_mismatch",
                name,
            )

    def _mismatch(self, layer: int, entry: TensorEntry, axis: int, size: int) -> str:
        """How `entry` differs from the base; empty where it does not."""
        layers = self._geometry.num_layers
        if layer >= layers:
            return f"layer {layer}, the base has {layers} layers (0 to {layers - 1})"
        if len(entry.shape) != 2:
            return f"shape {list(entry.shape)}, expected two dimensions"
        if entry.shape[axis] != size:
            wanted = [entry.shape[0], size] if axis else [size, entry.shape[1]]
            return f"shape {list(entry.shape)}, the base needs {wanted}"
        return ""

    def _weights(self, path: str, pair: dict[str, TensorEntry], max_rank: int) -> ModuleWeights:
        a, b = pair["A"], pair["B"]
        rank = a.shape[0]
        if b.shape[1] != rank:
            self._fail(
                f"tensor {quoted(b.name)}: rank {b.shape[1]}, its lora_A has rank {rank}",
                "rank",
                b.name,
            )
        if rank > max_rank:
            self._fail(
                f"tensor {quoted(a.name)}: rank {rank}, the limit max_lora_rank is {max_rank}",
                "rank",
                a.name,
            )
        declared = self._config.rank_of(path)
        if declared != rank:
            self._fail(
                f"tensor {quoted(a.name)}: rank {rank}, the config (r, rank_pattern) says"
                f" {declared}",
                "rank",
                a.name,
            )
        return ModuleWeights(a, b, rank, self._config.scaling_of(path, rank))

    def _members(self, module: str, bound: ModuleWeights) -> Iterator[tuple[str, ModuleWeights]]:
        """A fused module's parts: A is shared, B is cut by the base's row counts."""
        if module not in FUSED:
            yield module, bound
            return
        b, row = bound.lora_b, 0
        row_bytes = b.nbytes // b.shape[0]
        for member in FUSED[module]:
            rows = self._shapes[member][1]
            part = TensorEntry(
                b.name, b.file, b.dtype, (rows, bound.rank), b.offset + row * row_bytes,
                rows * row_bytes,
            )  # fmt: skip
            yield member, ModuleWeights(bound.lora_a, part, bound.rank, bound.scaling)
            row += rows

    def _check_declared(
        self,
        prefix: str,
        pairs: _Pairs,
        weights: Mapping[tuple[int, str], ModuleWeights],
    ) -> None:
        """The modules with tensors are exactly those that the config targets."""
        targets = self._config.targets
        for path in ("lm_head", f"{prefix}embed_tokens"):
            if targets(path):
                self._fail(
                    f"target_modules: {path}: LoRA on embeddings and output head is not supported",
                    "unsupported",
                    "target_modules",
                )
        for (layer, module), pair in pairs.items():
            path = _path(prefix, layer, module)
            if not targets(path):
                name = pair["A"].name
                self._fail(
                    f"tensor {quoted(name)}: target_modules, exclude_modules and"
                    f" layers_to_transform leave {path} out",
                    "not_declared",
                    name,
                )
        declared = [
            path
            for layer in range(self._geometry.num_layers)
            for module in _BLOCKS
            if module not in FUSED
            and targets(path := _path(prefix, layer, module))
            and (layer, module) not in weights
        ]
        if declared:
            self._fail(
                f"target_modules: {declared[0]} is declared but has no tensors;"
                f" {len(declared)} modules are missing, {len(weights)} are there",
                "missing_tensors",
                "target_modules",
            )

    def _unused_patterns(self, prefix: str, pairs: _Pairs) -> Iterator[tuple[str, str]]:
        """Keys of rank_pattern and alpha_pattern that PEFT would warn of."""
        config = self._config
        for field, keys in (
            ("rank_pattern", config.rank_pattern),
            ("alpha_pattern", config.alpha_pattern),
        ):
            for key in keys:
                paths = (_path(prefix, layer, module) for layer, module in pairs)
                if not any(matches_key(key, path) for path in paths):
                    yield field, key


# A fleet's adapters share their names, so taking names apart is paid for once.
@lru_cache(maxsize=65536)
def _path(prefix: str, layer: int, module: str) -> str:
    return f"{prefix}layers.{layer}.{_BLOCKS[module]}.{module}"


@lru_cache(maxsize=65536)
def _parse(name: str) -> _Name | None:
    match = _NAME.fullmatch(name)
    if match is None or _BLOCKS.get(match["module"]) != match["block"]:
        return None
    return _Name(
        match["prefix"], int(match["layer"]), match["module"], match["matrix"],
        match["adapter"] or "",
    )  # fmt: skip

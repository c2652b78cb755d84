"""Lands every tensor of an adapter file on a module of the base, or refuses the adapter.

A tensor that is skipped in silence is an adapter that answers partly as the base, so there are only
two outcomes: all tensors used and all modules that the config declares present, or an error that
names tensor, found and expected.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

from multilora_cli.adapters.module_pattern import matches_key
from multilora_cli.adapters.peft_config import AdapterConfig
from multilora_cli.adapters.refusal import Refusal
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.tensor_names import (
    BLOCKS,
    EDGES,
    EXAMPLE,
    FUSED,
    EdgeName,
    Part,
    TensorName,
    module_path,
    parse_edge_name,
    parse_name,
)
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry

# What an unknown tensor most likely is, by a part of its name.
_UNSUPPORTED = (
    ("lora_magnitude_vector", "a DoRA magnitude of a module that is not adapted"),
    ("trainable_tokens", "rows of tokens of a module other than embedding and head"),
    ("lm_head", "an output head that modules_to_save does not name and that is not the base's"),
    ("embed_tokens", "an embedding that modules_to_save does not name and that is not the base's"),
    ("modules_to_save", "a saved module (modules_to_save)"),
    (".bias", "a trained bias of a module that is not served with one"),
    ("lora_", "LoRA on a module that this base does not have"),
)


class ModuleWeights(NamedTuple):
    """The adapter of one projection in one layer; scaling is alpha / r (or alpha / sqrt(r))."""

    lora_a: TensorEntry  # [rank, d_in]
    lora_b: TensorEntry  # [d_out, rank]
    rank: int
    scaling: float
    magnitude: TensorEntry | None = None  # [d_out], DoRA
    lora_bias: TensorEntry | None = None  # [d_out], added to B A x before scaling


@dataclass(frozen=True)
class BoundTensors:
    """All tensors of one file by (layer, module), fused modules split."""

    weights: Mapping[tuple[int, str], ModuleWeights]
    biases: Mapping[tuple[int, str], TensorEntry]  # [d_out], in place of the base's own


_T = TypeVar("_T")
_Key = tuple[int, str]
_Parts = dict[_Key, dict[Part, TensorEntry]]


class SplitTensors(NamedTuple):
    """The tensors of one file by where they belong."""

    names: dict[str, TensorName]  # of projections
    edges: dict[str, EdgeName]  # of the embedding and the head
    others: tuple[TensorEntry, ...]


class Coverage:
    """Binds the tensors of one adapter to a base, or refuses it."""

    def __init__(self, config: AdapterConfig, geometry: ModelGeometry, refusal: Refusal) -> None:
        self._config = config
        self._geometry = geometry
        self._refusal = refusal
        self.notes: tuple[str, ...] = ()  # for people, after `bind`
        self._shapes = dict(geometry.module_shapes)
        for fused, members in FUSED.items():
            d_in = self._shapes[members[0]][0]
            self._shapes[fused] = (d_in, sum(self._shapes[m][1] for m in members))

    def split(self, tensors: Mapping[str, TensorEntry]) -> SplitTensors:
        """Tensors by where they belong, with their parsed names. Raises AdapterError."""
        if not tensors:
            self._refusal.adapter(
                "holds no tensors: an empty save, as ZeRO-3 leaves behind", "empty"
            )
        names: dict[str, TensorName] = {}
        edges: dict[str, EdgeName] = {}
        others: list[TensorEntry] = []
        for name, entry in tensors.items():
            parsed = parse_name(name)
            edge = parse_edge_name(name) if parsed is None else None
            if parsed is not None:
                names[name] = parsed
            elif edge is not None and (edge.part != "weight" or self._is_saved(edge.module)):
                edges[name] = edge
            else:
                others.append(entry)
        if not names and not edges:
            name = others[0].name
            raise AdapterError(
                f"{self._refusal.where}: none of {len(others):,} tensors belongs to this base; the"
                f" first is tensor {quoted(name)}: {_unsupported(name)}",
                reason="unsupported_tensor",
                field=name,
            )
        return SplitTensors(names, edges, tuple(others))

    def _is_saved(self, module: str) -> bool:
        """Whether a whole matrix under the module's own name replaces the base's."""
        saved = {name.rpartition(".")[2] for name in self._config.modules_to_save}
        is_tied = self._config.ensure_weight_tying and self._geometry.tie_word_embeddings
        return module in saved or (is_tied and not saved.isdisjoint(EDGES))

    def bind(
        self, names: Mapping[str, TensorName], tensors: Mapping[str, TensorEntry], max_rank: int
    ) -> BoundTensors:
        """What every adapted (layer, module) has. Raises AdapterError."""
        prefix = self._check_forms(names) if names else "model."
        parts: _Parts = {}
        for name, parsed in names.items():
            parts.setdefault((parsed.layer, parsed.module), {})[parsed.part] = tensors[name]
        self._check_dtypes(parts)
        self._check_base(parts)
        adapted = {key: found for key, found in parts.items() if found.keys() - {"bias"}}
        weights: dict[_Key, ModuleWeights] = {}
        for (layer, module), found in adapted.items():
            bound = self._weights(module_path(prefix, layer, module), found, max_rank)
            for member, part in self._members(module, bound):
                self._enter(weights, (layer, member), part, part.lora_b)
        biases: dict[_Key, TensorEntry] = {}
        for (layer, module), found in parts.items():
            if "bias" in found:
                for member, entry in self._cut(module, found["bias"]):
                    self._enter(biases, (layer, member), entry, entry)
        self._check_declared(prefix, adapted, weights)
        notes = self._check_biases(weights, biases)
        self.notes = (
            *notes,
            *(
                f"{field}: {quoted(key)} matches no adapted module"
                for field, key in self._unused_patterns(prefix, adapted)
            ),
        )
        return BoundTensors(weights, biases)

    def refuse_unknown(self, entry: TensorEntry) -> NoReturn:
        """Refuse a tensor that is no LoRA factor of a known module."""
        base = self._geometry
        rows = entry.shape[0] if len(entry.shape) == 2 else 0
        vocabulary = "embed_tokens" in entry.name or "lm_head" in entry.name
        if vocabulary and entry.shape[1:] == (base.hidden_size,) and rows != base.vocab_size:
            self._refusal.tensor(
                entry.name,
                f"shape {list(entry.shape)}, the base has {[base.vocab_size, base.hidden_size]}:"
                " tokens were added in training, which is not supported",
                "vocabulary",
            )
        self._refusal.tensor(entry.name, _unsupported(entry.name), "unsupported_tensor")

    def _check_forms(self, names: Mapping[str, TensorName]) -> str:
        """All names share one prefix and one adapter segment; gives the prefix of module paths."""
        forms = {parsed.form: name for name, parsed in names.items() if parsed.part != "bias"}
        forms = forms or {parsed.form: name for name, parsed in names.items()}
        if len(forms) > 1:
            one, other, *_ = forms.values()
            self._refusal.tensor(
                other,
                f"named in another form than {quoted(one)}; one file, one form",
                "mixed_names",
            )
        prefix = next(iter(forms))[0]
        for name, parsed in names.items():
            if parsed.prefix != prefix:
                self._refusal.tensor(
                    name, "its path begins otherwise than those of the factors", "mixed_names"
                )
        while prefix.startswith("base_model.model."):
            prefix = prefix.removeprefix("base_model.model.")
        return prefix or "model."

    def _check_dtypes(self, parts: _Parts) -> None:
        for found in parts.values():
            for entry in found.values():
                if entry.nbytes == 0:
                    self._refusal.tensor(
                        entry.name,
                        f"empty, shape {list(entry.shape)}; most"
                        " likely saved from ZeRO-3 without gathering the weights",
                        "empty",
                    )
                self._refusal.check_dtype(entry)

    def _check_base(self, parts: _Parts) -> None:
        """Layers and sizes are this base's; the error gives the first mismatch and their count."""
        mismatches: list[tuple[str, str]] = []
        for (layer, module), found in parts.items():
            for part, entry in found.items():
                problem = self._mismatch(layer, module, part, entry)
                if problem:
                    mismatches.append((entry.name, problem))
        if mismatches:
            name, problem = mismatches[0]
            self._refusal.tensor(
                name,
                f"{problem}; {len(mismatches)} of"
                f" {sum(map(len, parts.values()))} tensors do not fit: made for another base?",
                "base_mismatch",
            )

    def _mismatch(self, layer: int, module: str, part: Part, entry: TensorEntry) -> str:
        """How `entry` differs from the base; empty where it does not."""
        layers = self._geometry.num_layers
        if layer >= layers:
            return f"layer {layer}, the base has {layers} layers (0 to {layers - 1})"
        d_in, d_out = self._shapes[module]
        shape = list(entry.shape)
        if part not in ("A", "B"):
            if part == "bias" and not self._has_bias(module):
                return "the base has no bias there"
            return "" if shape == [d_out] else f"shape {shape}, the base needs {[d_out]}"
        if len(shape) != 2:
            return f"shape {shape}, expected two dimensions"
        wanted = [shape[0], d_in] if part == "A" else [d_out, shape[1]]
        return "" if shape == wanted else f"shape {shape}, the base needs {wanted}"

    def _has_bias(self, module: str) -> bool:
        return FUSED.get(module, (module,))[0] in self._geometry.biased_modules

    def _weights(
        self, path: str, found: Mapping[Part, TensorEntry], max_rank: int
    ) -> ModuleWeights:
        self._check_parts(path, found)
        a, b = found["A"], found["B"]
        rank = a.shape[0]
        if b.shape[1] != rank:
            self._refusal.tensor(b.name, f"rank {b.shape[1]}, its lora_A has rank {rank}", "rank")
        if rank > max_rank:
            self._refusal.tensor(
                a.name, f"rank {rank}, the limit max_lora_rank is {max_rank}", "rank"
            )
        declared = self._config.rank_of(path)
        if declared != rank:
            self._refusal.tensor(
                a.name, f"rank {rank}, the config (r, rank_pattern) says {declared}", "rank"
            )
        scaling = self._config.scaling_of(path, rank)
        return ModuleWeights(a, b, rank, scaling, found.get("magnitude"), found.get("lora_bias"))

    def _check_parts(self, path: str, found: Mapping[Part, TensorEntry]) -> None:
        """Both factors are there, and what the config says goes with them."""
        self._refusal.check_pair(found)
        expected: tuple[tuple[Part, str, bool, str], ...] = (
            ("magnitude", "use_dora", self._config.use_dora, "lora_magnitude_vector"),
            ("lora_bias", "lora_bias", self._config.lora_bias, "lora_B.bias"),
        )
        for part, field, wanted, tensor in expected:
            if wanted and part not in found:
                self._refusal.field(field, f"{path} has no {tensor}", "missing_tensors")
            if part in found and not wanted:
                name = found[part].name
                self._refusal.tensor(name, f"the config does not say {field}: true", "not_declared")

    def _enter(self, target: dict[_Key, _T], key: _Key, value: _T, entry: TensorEntry) -> None:
        """Put `value` at `key`; a module may not come fused and alone."""
        if key in target:
            self._refusal.tensor(
                entry.name, f"layer {key[0]} has {key[1]} twice, fused and alone", "duplicate"
            )
        target[key] = value

    def _members(self, module: str, bound: ModuleWeights) -> Iterator[tuple[str, ModuleWeights]]:
        """A fused module's parts: A is shared, the rest is cut by the base's row counts."""
        rows = dict(self._cut(module, bound.lora_b))
        magnitudes = dict(self._cut(module, bound.magnitude)) if bound.magnitude else {}
        biases = dict(self._cut(module, bound.lora_bias)) if bound.lora_bias else {}
        for member, lora_b in rows.items():
            yield (
                member,
                bound._replace(
                    lora_b=lora_b, magnitude=magnitudes.get(member), lora_bias=biases.get(member)
                ),
            )

    def _cut(self, module: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
        """`entry` [d_out, ...] by the modules whose rows it holds."""
        row = 0
        for member in FUSED.get(module, (module,)):
            rows = self._shapes[member][1]
            yield member, entry.rows(row, row + rows)
            row += rows

    def _check_biases(
        self, weights: Mapping[_Key, ModuleWeights], biases: Mapping[_Key, TensorEntry]
    ) -> tuple[str, ...]:
        """Biases are those that `bias` declares, all of them; gives notes."""
        mode, geometry = self._config.bias, self._geometry
        layers, biased = range(geometry.num_layers), geometry.biased_modules
        wanted = {(layer, module) for layer in layers for module in biased}
        if mode != "all":
            wanted = {key for key in wanted if mode == "lora_only" and key in weights}
        for key, entry in biases.items():
            if key not in wanted:
                self._refusal.tensor(
                    entry.name,
                    f"a trained bias, which the config's bias: {mode} leaves out",
                    "not_declared",
                )
        if biases and wanted - biases.keys():
            layer, module = min(wanted - biases.keys())
            self._refusal.field(
                "bias",
                f"{mode} is declared but layer {layer} {module} has no bias; {len(biases)} of"
                f" {len(wanted)} are there",
                "missing_tensors",
            )
        if wanted and not biases:  # older versions of PEFT saved none
            return (f"bias: {mode} is declared but none is stored: the base's are used",)
        return ()

    def _check_declared(
        self,
        prefix: str,
        adapted: _Parts,
        weights: Mapping[_Key, ModuleWeights],
    ) -> None:
        """The modules with tensors are exactly those that the config targets."""
        targets = self._config.targets
        for (layer, module), found in adapted.items():
            path = module_path(prefix, layer, module)
            if not targets(path):
                name = found["A"].name
                self._refusal.tensor(
                    name,
                    f"target_modules, exclude_modules and layers_to_transform leave {path} out",
                    "not_declared",
                )
        declared = [
            path
            for layer in range(self._geometry.num_layers)
            for module in BLOCKS
            if module not in FUSED
            and targets(path := module_path(prefix, layer, module))
            and (layer, module) not in weights
        ]
        if declared:
            self._refusal.field(
                "target_modules",
                f"{declared[0]} is declared but has no tensors;"
                f" {len(declared)} modules are missing, {len(weights)} are there",
                "missing_tensors",
            )

    def _unused_patterns(self, prefix: str, adapted: _Parts) -> Iterator[tuple[str, str]]:
        """Keys of rank_pattern and alpha_pattern that PEFT would warn of."""
        config = self._config
        for field, keys in (
            ("rank_pattern", config.rank_pattern),
            ("alpha_pattern", config.alpha_pattern),
        ):
            for key in keys:
                paths = ["lm_head", "model.embed_tokens"]
                paths += (module_path(prefix, *module) for module in adapted)
                if not any(matches_key(key, path) for path in paths):
                    yield field, key


def _unsupported(name: str) -> str:
    """What is wrong with a tensor that belongs to no module that is served."""
    what = next((what for part, what in _UNSUPPORTED if part in name), "an unknown tensor")
    return f"{what}, which is not supported; expected names such as {EXAMPLE}"

"""Reads an adapter folder as PEFT writes it: headers and config only, no weights, no torch."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multilora_cli.adapters.coverage import BoundTensors, Coverage, ModuleWeights
from multilora_cli.adapters.edges import EdgeBinder, Edges
from multilora_cli.adapters.module_pattern import PatternError
from multilora_cli.adapters.peft_config import (
    CONFIG_BYTES_MAX,
    CONFIG_NAME,
    AdapterConfig,
    parse_config,
)
from multilora_cli.adapters.refusal import Refusal
from multilora_cli.adapters.safetensors_header import (
    FileIdentity,
    SafetensorsError,
    SafetensorsHeader,
    TensorEntry,
    open_file,
    read_header,
    read_json,
)
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.tensor_names import EDGES
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import MODULES, NO_EXTRAS, VECTOR_ITEMSIZE, Extras, VectorKind

NO_EDGES = Edges()
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"

BIN_NAME = "adapter_model.bin"
SHARD = re.compile(r"adapter_model-\d{1,6}-of-\d{1,6}\.safetensors")
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file('
    "{k: v.contiguous() for k, v in"
    " torch.load('adapter_model.bin', map_location='cpu', weights_only=True).items()},"
    " 'adapter_model.safetensors')\""
)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter whose config and headers were read and fit the base; no weight was read yet."""

    folder: Path
    config: AdapterConfig
    tensors: Mapping[str, TensorEntry]  # by the name in the file
    weights: Mapping[tuple[int, str], ModuleWeights]  # by (layer, module), fused ones split
    files: tuple[FileIdentity, ...]  # the config, then the weight files by name
    notes: tuple[str, ...]
    # Replace the base's own, by (layer, module).
    biases: Mapping[tuple[int, str], TensorEntry] = field(default_factory=dict)
    edges: Edges = NO_EDGES  # of the embedding and the head
    extras: Extras = NO_EXTRAS  # what its image holds beside the factors
    num_vector_elements: int = 0  # numbers in all vectors of `extras`

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        """True rank by (layer, module)."""
        return {key: weights.rank for key, weights in self.weights.items()}

    @property
    def scalings(self) -> dict[tuple[int, str], float]:
        """alpha / r, or alpha / sqrt(r), by (layer, module)."""
        return {key: weights.scaling for key, weights in self.weights.items()}

    @property
    def base_model_name(self) -> str | None:
        """The base the config names, if it names one."""
        return self.config.base_model_name

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        ranks = [weights.rank for weights in self.weights.values()]
        return max([*ranks, *(weights.rank for weights in self.edges.lora.values())], default=0)

    @property
    def modules(self) -> tuple[str, ...]:
        """The kinds of projections that are adapted, in the base's order."""
        present: set[str] = {module for _, module in self.weights}
        present.update(self.edges.lora, self.edges.saved, self.edges.token_rows)
        return tuple(module for module in (*MODULES, *EDGES) if module in present)

    @property
    def num_weights(self) -> int:
        """Numbers in all factors, and in whole matrices of embedding and head."""
        factors = sum(
            w.rank * (w.lora_a.shape[1] + w.lora_b.shape[0]) for w in self.weights.values()
        )
        return factors + sum(rows * length for _, rows, length in self.extras.matrices)

    def num_bytes(self, itemsize: int) -> int:
        """What the adapter costs when its factors take `itemsize` bytes each, rounding aside."""
        return self.num_weights * itemsize + self.num_vector_elements * VECTOR_ITEMSIZE


def read_adapter(
    folder: Path, geometry: ModelGeometry, *, max_rank: int, base_folder: Path | None = None
) -> AdapterFile:
    """The adapter in `folder`, checked against a base of `geometry`. Raises AdapterError.

    Args:
        folder: holds adapter_config.json and *.safetensors, or exactly one child that does.
        geometry: the base's shape.
        max_rank: larger ranks are refused.
        base_folder: where the base's own weights lie. Copies of them that PEFT put beside the
            factors are accepted only when they can be compared.
    """
    folder, notes = _adapter_folder(folder.expanduser().absolute())
    with _as_adapter_error(folder):
        with open_file(folder / CONFIG_NAME) as file:
            if file.identity.size > CONFIG_BYTES_MAX:
                raise AdapterError(
                    f"{folder / CONFIG_NAME}: {file.identity.size:,} bytes, the limit is"
                    f" {CONFIG_BYTES_MAX:,}"
                )
            raw = file.read(0, file.identity.size)
            file.check_unchanged()
            identity = file.identity
        config = parse_config(raw, str(folder / CONFIG_NAME))
        headers, file_notes = _read_headers(folder)
        tensors = _merged(headers)
        refusal = Refusal(str(folder))
        coverage = Coverage(config, geometry, refusal)
        split = coverage.split(tensors)
        copies = _check_others(coverage, split.others, geometry, base_folder)
        edges = EdgeBinder(config, geometry, refusal).bind(split.edges, tensors, max_rank)
        bound = coverage.bind(split.names, tensors, max_rank)
    extras, shapes = _extras(bound, edges, geometry), geometry.module_shapes
    return AdapterFile(
        folder=folder,
        config=config,
        tensors=tensors,
        weights=bound.weights,
        biases=bound.biases,
        edges=edges,
        extras=extras,
        num_vector_elements=sum(shapes[module][1] for _, module, _ in extras.vectors),
        files=(identity, *(header.identity for header in headers)),
        notes=(*notes, *config.notes, *file_notes, *copies, *coverage.notes),
    )


@contextmanager
def _as_adapter_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorsError as error:
        raise AdapterError(error.message, reason=error.reason, field=error.tensor) from None
    except PatternError as error:
        raise AdapterError(f"{folder / CONFIG_NAME}: a pattern {error}", reason="pattern") from None


def _adapter_folder(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """`folder`, or its only child that holds an adapter (PEFT saves named adapters there)."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except FileNotFoundError:
        raise AdapterError(f"{folder}: no such folder", reason="missing") from None
    except NotADirectoryError:
        raise AdapterError(
            f"{folder}: is a file, expected a folder with {CONFIG_NAME}", reason="not_a_folder"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder}: not readable: {error}", reason="unreadable") from None
    if CONFIG_NAME in entries:
        return folder, ()
    children = sorted(
        name
        for name, entry in entries.items()
        if entry.is_dir(follow_symlinks=False) and (folder / name / CONFIG_NAME).exists()
    )
    if len(children) == 1:
        return folder / children[0], (f"read from the only adapter inside, {children[0]}",)
    if children:
        raise AdapterError(
            f"{folder}: no {CONFIG_NAME}, but several adapters inside: "
            + ", ".join(map(quoted, children[:10])),
            reason="ambiguous",
        )
    hint = None
    if "config.json" in entries:
        hint = "this looks like a base model; an adapter is what PEFT's save_pretrained writes"
    raise AdapterError(
        f"{folder}: no {CONFIG_NAME}; found "
        + (", ".join(quoted(name) for name in sorted(entries)[:10]) or "an empty folder"),
        reason="missing",
        hint=hint or f"expected PEFT's format: {CONFIG_NAME} and {WEIGHTS_NAME}",
    )


def _read_headers(folder: Path) -> tuple[tuple[SafetensorsHeader, ...], tuple[str, ...]]:
    """The headers of the one weight file, or of all shards that the index lists."""
    names = set(os.listdir(folder))
    shards = sorted(name for name in names if SHARD.fullmatch(name))
    notes = []
    if BIN_NAME in names:
        notes.append(f"{BIN_NAME} is ignored, {WEIGHTS_NAME} is read")
    if WEIGHTS_NAME in names:
        if INDEX_NAME in names or shards:
            notes.append(f"shards are ignored, {WEIGHTS_NAME} is read")
        return (read_header(folder / WEIGHTS_NAME),), tuple(notes)
    if INDEX_NAME in names:
        return _read_shards(folder), tuple(notes)
    if shards:
        raise AdapterError(f"{folder}: {len(shards)} shards but no {INDEX_NAME}", reason="missing")
    if BIN_NAME in names:
        raise AdapterError(
            f"{folder / BIN_NAME}: a pickle can run code when it is read; expected {WEIGHTS_NAME}",
            reason="pickle",
            hint=f"if you trust the file, convert it once in its folder: {_CONVERT}",
        )
    raise AdapterError(
        f"{folder}: no weights: looked for {WEIGHTS_NAME} and {INDEX_NAME}", reason="missing"
    )


def _read_shards(folder: Path) -> tuple[SafetensorsHeader, ...]:
    path = folder / INDEX_NAME
    index: Any = read_json(path)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(
        isinstance(name, str) and SHARD.fullmatch(name) for name in where.values()
    ):
        raise AdapterError(
            f"{path}: weight_map: expected an object of tensor names and shard file names",
            reason="index",
            field="weight_map",
        )
    headers = tuple(read_header(folder / name) for name in sorted(set(where.values())))
    for header in headers:
        file_name = header.identity.path.name
        for name in header.tensors.keys() | {n for n, f in where.items() if f == file_name}:
            if where.get(name) != file_name or name not in header.tensors:
                raise AdapterError(
                    f"{path}: tensor {quoted(name)}: index and {file_name} disagree",
                    reason="index",
                    field=name,
                )
    return headers


def _merged(headers: tuple[SafetensorsHeader, ...]) -> Mapping[str, TensorEntry]:
    if len(headers) == 1:
        return headers[0].tensors
    return {name: entry for header in headers for name, entry in header.tensors.items()}


def _extras(bound: BoundTensors, edges: Edges, geometry: ModelGeometry) -> Extras:
    """The vectors that the tensors come down to: y = scale * (W x + b + B A x) + shift.

    DoRA scales W x + B A x but not the base's bias, so where there is one a shift sets it right.
    """
    vectors: set[tuple[int, str, VectorKind]] = {(*key, "shift") for key in bound.biases}
    for key, weights in bound.weights.items():
        if weights.magnitude is not None:
            vectors.add((*key, "scale"))
            if key[1] in geometry.biased_modules:
                vectors.add((*key, "shift"))
        if weights.lora_bias is not None:
            vectors.add((*key, "shift"))
    return Extras(frozenset(vectors), edges.matrices)


def _check_others(
    coverage: Coverage,
    others: tuple[TensorEntry, ...],
    geometry: ModelGeometry,
    base_folder: Path | None,
) -> tuple[str, ...]:
    """Tensors beside the factors are copies of the base's own, bit for bit, or refused."""
    if not others:
        return ()
    changed = others[0]
    if base_folder is not None and not any(base_folder.glob("*.safetensors")):
        # A plan needs no weights. Whoever serves the adapter has them, and compares.
        wanted = (geometry.vocab_size, geometry.hidden_size)
        if all(_is_copy_by_name(entry, wanted) for entry in others):
            return (f"{len(others)} copies of base tensors: not compared, {base_folder} has none",)
    elif base_folder is not None:
        from multilora_cli.adapters.base_copies import check_base_copies  # needs NumPy; rare

        different = check_base_copies(others, base_folder, geometry.tie_word_embeddings)
        if different is None:
            return (f"{len(others)} copies of base tensors are ignored",)
        changed = different
    coverage.refuse_unknown(changed)


def _is_copy_by_name(entry: TensorEntry, shape: tuple[int, int]) -> bool:
    """Whether PEFT says that this is the base's own embedding or head, beside the factors on it."""
    end = entry.name.endswith(("embed_tokens.base_layer.weight", "lm_head.base_layer.weight"))
    return end and entry.shape == shape

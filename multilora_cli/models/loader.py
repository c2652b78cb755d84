"""Fills a decoder from safetensors files, or with random numbers.

Each tensor is copied straight to its place in the packed weights; quantised linears are packed
group by group while the decoder is built.
"""

from pathlib import Path
from typing import Literal

import torch

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError
from multilora_cli.layers.linear import DenseWeight, Weight
from multilora_cli.models.checkpoint import Checkpoint, open_checkpoint
from multilora_cli.models.decoder import Decoder, LinearSource
from multilora_cli.models.quantized import (
    QuantisedLinears,
    RandomTensors,
    base_quantization,
    placed,
    storage_notes,
)
from multilora_cli.models.quantized_tensors import (
    StoredLinears,
    find_linears,
    foreign_hint,
    outline_linears,
)
from multilora_cli.models.tensor_reader import FLOAT_DTYPES, TensorReader
from multilora_cli.progress import Report, silent
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.quantization import Quantization

LoadFormat = Literal["auto", "dummy"]

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def load_decoder(
    folder: Path,
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    report: Report = silent,
    *,
    load_format: LoadFormat = "auto",
    quantization: Quantization | None = None,
) -> Decoder:
    """The decoder of the base in `folder`, on `device` in `dtype`.

    `quantization` is what `base_quantization` and `placed` give; None: that of the checkpoint.
    Raises ModelError when a tensor is missing, unexpected, of another shape or dtype, cut short,
    or not finite (in `dtype`). `dummy`: finite random weights, no file but config.json.
    """
    dummy = load_format == "dummy"
    if quantization is None:
        quantization = base_quantization(folder, geometry, "auto", from_files=not dummy)
        quantization = placed(quantization, device, dtype)
    if dummy:
        stored = outline_linears(geometry, quantization)
        linears = QuantisedLinears(stored, geometry, dtype, RandomTensors(geometry, device))
        decoder = Decoder(geometry, dtype, device, linears)
        fill_with_random(decoder, report)
    else:
        checkpoint = open_checkpoint(folder)
        stored = find_linears(folder, checkpoint, geometry, quantization)
        check_tensors(folder, checkpoint, geometry, stored)
        with TensorReader(checkpoint, device, report) as reader:
            linears = QuantisedLinears(stored, geometry, dtype, reader.read)
            decoder = Decoder(geometry, dtype, device, linears)
            _copy_all(checkpoint, decoder, reader, stored.names - stored.unused)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what packing took beside the weights belongs to the pool
    decoder.notes = storage_notes(stored)
    return decoder


def check_tensors(
    folder: Path, checkpoint: Checkpoint, geometry: ModelGeometry, stored: StoredLinears
) -> None:
    """Raise ModelError unless every tensor that is not in `stored` has its place, and fits it."""
    outline = Decoder(geometry, torch.float32, torch.device("meta"), _without_memory(stored))
    _check_names(folder, checkpoint, outline, stored)
    _check_entries(checkpoint, outline)


def _without_memory(stored: StoredLinears) -> LinearSource:
    """Places without memory for a decoder that only says which other tensors it expects."""

    def weight(layer: int, group: str) -> Weight | None:
        if not stored.covers(layer, group):
            return None
        return DenseWeight.empty(0, 0, torch.float32, torch.device("meta"))

    return weight


def fill_with_random(decoder: Decoder, report: Report, seed: int = 0) -> None:
    """Random weights that keep activations near unit size: norms 1, matrices of rms 1/sqrt(in)."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    total = decoder.weight_bytes
    done = sum(weight.nbytes for weight in decoder.quantised)
    for name, tensor in decoder.tensors.items():
        if tensor.ndim == 2:
            bound = (3 / tensor.shape[1]) ** 0.5
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        done += tensor.nbytes
        report("weights", done, total)


def _is_ignored(name: str) -> bool:
    """Buffers that older exporters saved and that follow from the config."""
    return name.endswith(".rotary_emb.inv_freq")


def _check_names(
    folder: Path, checkpoint: Checkpoint, outline: Decoder, stored: StoredLinears
) -> None:
    """Every tensor of the checkpoint has a place, and every place a tensor."""
    geometry, expected = outline.geometry, set(outline.tensors)
    found = {entry.name for entry in checkpoint.entries() if not _is_ignored(entry.name)}
    found -= stored.names
    if geometry.tie_word_embeddings:
        found.discard(_HEAD)
    if expected - found:
        raise ModelError(
            f"{folder}: {_listed(expected - found)} missing of {len(expected)} tensors",
            hint=foreign_hint(found - expected),
        )
    if found - expected:
        raise ModelError(
            f"{folder}: {_listed(found - expected)} not expected in a {geometry.family} model with"
            " this config.json",
            hint=foreign_hint(found - expected),
        )


def _listed(names: set[str]) -> str:
    """Up to three names and how many more."""
    shown = ", ".join(quoted(name) for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _check_entries(checkpoint: Checkpoint, decoder: Decoder) -> None:
    """Shapes and dtypes, before a byte of data is read."""
    for entry in checkpoint.entries():
        target = _target(entry, decoder)
        if target is None:
            continue
        where = f"{entry.file}: tensor {quoted(entry.name)}"
        if entry.shape != tuple(target.shape):
            raise ModelError(
                f"{where}: found shape {list(entry.shape)}, expected {list(target.shape)}"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{where}: found dtype {entry.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
            )


def _target(entry: TensorEntry, decoder: Decoder) -> torch.Tensor | None:
    """Where the tensor belongs; the copy of a tied embedding is compared with the embedding."""
    if entry.name == _HEAD and decoder.geometry.tie_word_embeddings:
        return decoder.tensors[_EMBEDDING]
    return decoder.tensors.get(entry.name)


def _copy_all(
    checkpoint: Checkpoint, decoder: Decoder, reader: TensorReader, done: frozenset[str]
) -> None:
    """Copy what is not `done`; the tied head's duplicate comes last, with its original there."""
    duplicate: TensorEntry | None = None
    for entry in checkpoint.entries():
        if entry.name == _HEAD and decoder.geometry.tie_word_embeddings:
            duplicate = entry
        elif (target := _target(entry, decoder)) is not None:
            reader.copy(entry, target)
        elif entry.name not in done:
            reader.skip(entry)
    if duplicate is not None:
        head = torch.empty_like(decoder.tensors[_EMBEDDING])
        reader.copy(duplicate, head)
        if not torch.equal(head, decoder.tensors[_EMBEDDING]):
            raise ModelError(
                f"{duplicate.file}: tensor {_HEAD!r} differs from {_EMBEDDING!r}, although"
                " config.json says tie_word_embeddings"
            )
    reader.check_finite()

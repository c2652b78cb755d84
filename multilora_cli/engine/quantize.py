"""Makes FP8 checkpoints, and what every quantised checkpoint needs: see quantize_awq for AWQ.

FP8 is written in compressed-tensors' format (float-quantized, a scale per output channel, dynamic
activations), with the numbers that `base.quantization: fp8` gives at load. Other servers and
transformers read it too.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import BadInput, ModelError
from multilora_cli.layers.fp8 import quantise_at_load
from multilora_cli.models.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from multilora_cli.models.loader import check_tensors
from multilora_cli.models.quantized import base_quantization
from multilora_cli.models.quantized_tensors import find_linears
from multilora_cli.models.tensor_reader import TensorReader
from multilora_cli.progress import Report
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.quantization import FP8

_CPU = torch.device("cpu")
# What a model folder holds beside weights: config, tokenizer, template, licence.
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")
_SCHEME: dict[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None,
    "actorder": None,
}  # fmt: skip
_FP8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _SCHEME | {"strategy": "channel", "dynamic": False},
            "input_activations": _SCHEME | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


@dataclass(frozen=True)
class Quantised:
    """A checkpoint that was written, and what it weighs."""

    output: Path
    storage: str  # in words
    source_bytes: int
    output_bytes: int


def quantise_fp8(source: Path, output: Path, report: Report) -> Quantised:
    """Write the 16-bit base in `source` as FP8 to the new folder `output`. Raises MloraError."""
    geometry = sixteen_bit(source)
    checkpoint = open_checkpoint(source)
    linears = find_linears(source, checkpoint, geometry, replace(FP8, at_load=True))
    check_tensors(source, checkpoint, geometry, linears)
    names = {part["weight"].name for part in linears.parts.values()}
    with new_folder(output) as folder:
        with TensorReader(checkpoint, _CPU, report) as reader:
            index = dict(_write_shards(checkpoint, reader, names, folder))
        if (source / INDEX_NAME).exists():
            _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": index})
        _write_config(source, folder)
        copy_small_files(source, folder)
        return finished(checkpoint, geometry, folder, output)


def sixteen_bit(source: Path) -> ModelGeometry:
    """The geometry of a base that is not quantised yet. Raises ModelError."""
    geometry = read_geometry(source)
    if geometry.quantization is not None:
        method = geometry.quantization.get("quant_method")
        raise ModelError(
            f"{source / 'config.json'}: quantization_config: found {method!r:.40}, expected none",
            hint="quantise the 16-bit checkpoint: rounding twice loses more",
        )
    return geometry


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that becomes it at the end, or disappears on failure.

    Raises BadInput where `output` holds something, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BadInput(f"--output: {output} exists and is not an empty folder")
    partial = output.absolute().parent / f".{output.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        # safetensors makes files that only their owner reads; these are to be served, and copied.
        for file in partial.iterdir():
            if file.is_file():
                file.chmod(partial.stat().st_mode & 0o666)
        partial.replace(output)
    except OSError as error:
        raise BadInput(f"--output: {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    checkpoint: Checkpoint, reader: TensorReader, names: set[str], folder: Path
) -> Iterator[tuple[str, str]]:
    """Every file with its linears in FP8; yields tensor and file names. Holds a file at a time."""
    for path, header in checkpoint.headers.items():
        tensors: dict[str, torch.Tensor] = {}
        for entry in sorted(header.tensors.values(), key=lambda entry: entry.offset):
            tensor = reader.read(entry)
            tensors |= _to_fp8(entry, tensor) if entry.name in names else {entry.name: tensor}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        yield from ((name, path.name) for name in tensors)


def _to_fp8(entry: TensorEntry, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{entry.file}: tensor {quoted(entry.name)}: not finite")
    weight = quantise_at_load(tensor)
    return {entry.name: weight.q, f"{entry.name}_scale": weight.scale[:, None].contiguous()}


def _write_config(source: Path, folder: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", config | {"quantization_config": _FP8_CONFIG})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_small_files(source: Path, folder: Path) -> None:
    """Tokenizer, template and the like, unless they are there already."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _SMALL_SUFFIXES and file.name != INDEX_NAME and file.is_file()
        if wanted and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def finished(
    checkpoint: Checkpoint, geometry: ModelGeometry, folder: Path, output: Path
) -> Quantised:
    """What was written, read back: every tensor found and checked as when serving.

    Raises ModelError.
    """
    written, stored_geometry = open_checkpoint(folder), read_geometry(folder)
    if stored_geometry.module_shapes != geometry.module_shapes:
        raise ModelError(f"{folder}: the quantised model has another shape than its source")
    quantization = base_quantization(folder, stored_geometry, "auto")
    return Quantised(output, quantization.describe(), checkpoint.nbytes, written.nbytes)

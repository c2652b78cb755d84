"""Fills a decoder from safetensors files, or with random numbers.

Each tensor is copied straight to its place in the packed weights: on a CPU the file is read into
that memory itself, for a GPU through two page-locked buffers in turn, so that reading overlaps
copying and the host never holds more than the buffers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from multilora_cli.adapters.safetensors_header import OpenFile, TensorEntry, open_file
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError
from multilora_cli.models.checkpoint import Checkpoint, Report, model_errors, open_checkpoint
from multilora_cli.models.decoder import Decoder
from multilora_cli.sizing.geometry import ModelGeometry

LoadFormat = Literal["auto", "dummy"]

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_BUFFER_BYTES = 32 * 2**20
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def load_decoder(
    folder: Path,
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    progress: Report | None = None,
    *,
    load_format: LoadFormat = "auto",
) -> Decoder:
    """The decoder of the base in `folder`, on `device` in `dtype`.

    Raises ModelError when a tensor is missing, unexpected, of another shape, not a float, cut
    short, or not finite (in `dtype`). `dummy`: finite random weights, no file but config.json.
    """
    if geometry.quantization is not None and load_format != "dummy":
        method = str(geometry.quantization.get("quant_method", "unknown"))
        raise ModelError(
            f"{folder}: quantization_config: quant_method {quoted(method)}: quantised bases are"
            " not served yet",
            hint="serve the 16-bit checkpoint of this model",
        )
    report = progress or (lambda phase, done, total: None)
    if load_format == "dummy":
        dummy = Decoder(geometry, dtype, device)
        fill_with_random(dummy, report)
        return dummy
    checkpoint = open_checkpoint(folder)
    outline = Decoder(geometry, dtype, torch.device("meta"))  # shapes without memory
    _check_names(folder, checkpoint, outline)
    _check_entries(checkpoint, outline)
    decoder = Decoder(geometry, dtype, device)
    _copy_all(folder, checkpoint, decoder, report)
    return decoder


def fill_with_random(decoder: Decoder, report: Report, seed: int = 0) -> None:
    """Random weights that keep activations near unit size: norms 1, matrices of rms 1/sqrt(in)."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    done, total = 0, decoder.weight_bytes
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


def _check_names(folder: Path, checkpoint: Checkpoint, outline: Decoder) -> None:
    """Every tensor of the checkpoint has a place, and every place a tensor."""
    geometry, expected = outline.geometry, set(outline.tensors)
    found = {entry.name for entry in checkpoint.entries() if not _is_ignored(entry.name)}
    if geometry.tie_word_embeddings:
        found.discard(_HEAD)
    if expected - found:
        raise ModelError(
            f"{folder}: {_listed(expected - found)} missing of {len(expected)} tensors"
        )
    if found - expected:
        raise ModelError(
            f"{folder}: {_listed(found - expected)} not expected in a {geometry.family} model with"
            " this config.json"
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
        if entry.dtype not in _DTYPES:
            raise ModelError(
                f"{where}: found dtype {entry.dtype}, expected one of {', '.join(_DTYPES)}"
            )


def _target(entry: TensorEntry, decoder: Decoder) -> torch.Tensor | None:
    """Where the tensor belongs; the copy of a tied embedding is compared with the embedding."""
    if entry.name == _HEAD and decoder.geometry.tie_word_embeddings:
        return decoder.tensors[_EMBEDDING]
    return decoder.tensors.get(entry.name)


def _copy_all(folder: Path, checkpoint: Checkpoint, decoder: Decoder, report: Report) -> None:
    """Read every file once; the tied head's duplicate comes last, when its original is there."""
    copier = _Copier(decoder.device)
    done, total = 0, checkpoint.nbytes
    duplicate: TensorEntry | None = None
    for path, header in checkpoint.headers.items():
        with model_errors(), open_file(path, follow_symlinks=True) as file:
            if file.identity.key != header.identity.key:
                raise ModelError(f"{path}: changed while it was read")
            for entry in sorted(header.tensors.values(), key=lambda entry: entry.offset):
                if entry.name == _HEAD and decoder.geometry.tie_word_embeddings:
                    duplicate = entry
                elif (target := _target(entry, decoder)) is not None:
                    copier.copy(file, entry, target)
                done += entry.nbytes
                report("weights", done, total)
            file.check_unchanged()
    if duplicate is not None:
        _check_duplicate(duplicate, decoder)
    copier.check_finite()


def _check_duplicate(entry: TensorEntry, decoder: Decoder) -> None:
    """The saved lm_head of a tied model must be the embedding, or the model is not tied."""
    embedding = decoder.tensors[_EMBEDDING]
    head = torch.empty_like(embedding)
    copier = _Copier(decoder.device)
    with model_errors(), open_file(entry.file, follow_symlinks=True) as file:
        copier.copy(file, entry, head)
    if not torch.equal(head, embedding):
        raise ModelError(
            f"{entry.file}: tensor {_HEAD!r} differs from {_EMBEDDING!r}, although config.json"
            " says tie_word_embeddings"
        )


class _Copier:
    """Copies tensors from files to their places and remembers the extremes of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        self._extremes: list[tuple[TensorEntry, torch.Tensor]] = []

    def copy(self, file: OpenFile, entry: TensorEntry, target: torch.Tensor) -> None:
        """Fill `target`, contiguous, with the tensor, converted to its dtype."""
        flat, dtype = target.view(-1), _DTYPES[entry.dtype]
        for start, stop in _chunks(flat.numel(), _BUFFER_BYTES // dtype.itemsize):
            part = flat[start:stop]
            offset = entry.offset + start * dtype.itemsize
            if self._device.type == "cpu" and dtype == target.dtype:
                file.read_into(offset, part.view(torch.uint8).numpy().data)
            else:
                self._copy_through_buffer(file, offset, part, dtype)
            self._extremes.append((entry, torch.stack(torch.aminmax(part))))

    def check_finite(self) -> None:
        """Raise ModelError naming the first tensor that holds NaN or infinity."""
        if not self._extremes:
            return
        finite = torch.stack([pair for _, pair in self._extremes]).isfinite().all(-1)
        if not bool(finite.all()):
            entry, pair = self._extremes[int((~finite).nonzero()[0, 0])]
            dtype = str(pair.dtype).removeprefix("torch.")
            raise ModelError(
                f"{entry.file}: tensor {quoted(entry.name)}: not finite in {dtype} (stored as"
                f" {entry.dtype})",
                hint="serve it as bfloat16" if pair.dtype == torch.float16 else None,
            )

    def _copy_through_buffer(
        self, file: OpenFile, offset: int, part: torch.Tensor, dtype: torch.dtype
    ) -> None:
        buffer = self._next_buffer()[: part.numel() * dtype.itemsize]
        file.read_into(offset, buffer.numpy().data)
        if self._device.type == "cpu":
            part.copy_(buffer.view(dtype))
            return
        part.copy_(buffer.view(dtype).to(self._device, non_blocking=True))
        self._events[self._turn].record()

    def _next_buffer(self) -> torch.Tensor:
        """A host buffer whose last copy is over."""
        if self._device.type == "cpu":
            if not self._buffers:
                self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8)]
            return self._buffers[0]
        if not self._buffers:
            self._buffers = [
                torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 1 - self._turn
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield start, min(start + size, count)

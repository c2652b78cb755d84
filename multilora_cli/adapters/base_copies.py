"""Compares tensors that an adapter file repeats from its base with the base's own.

PEFT writes whole embeddings and heads beside the factors in some saves. Where they equal the base
they mean nothing; where they differ, ignoring them would answer with the wrong weights.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from multilora_cli.adapters.safetensors_header import (
    Limits,
    TensorEntry,
    open_file,
    read_header,
)

_WRAPPERS = re.compile(r"(?:base_model\.model\.)+")
_CHUNK_BYTES = 8 * 2**20
_BASE_LIMITS = Limits(file_bytes=None)
_ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2}


def check_base_copies(
    entries: Iterable[TensorEntry], base_folder: Path, tied: bool
) -> TensorEntry | None:
    """The first of `entries` that is not a copy of a base tensor; None when all are.

    Values are compared, so a copy in another float dtype counts while it is exact.
    """
    base: dict[str, TensorEntry] = {}
    for path in sorted(base_folder.glob("*.safetensors")):
        base.update(read_header(path, _BASE_LIMITS, follow_symlinks=True).tensors)
    for entry in entries:
        name = _WRAPPERS.sub("", entry.name, count=1).replace(".base_layer.", ".")
        if tied and name == "lm_head.weight" and name not in base:
            name = "model.embed_tokens.weight"
        own = base.get(name)
        if own is None or own.shape != entry.shape or not _equal(entry, own):
            return entry
    return None


def _equal(entry: TensorEntry, own: TensorEntry) -> bool:
    """Whether both tensors hold the same numbers, read in chunks of the same elements."""
    if entry.dtype not in _ITEMSIZES or own.dtype not in _ITEMSIZES:
        return False
    one, other = _ITEMSIZES[entry.dtype], _ITEMSIZES[own.dtype]
    count, step = entry.nbytes // one, _CHUNK_BYTES // 4
    with open_file(entry.file) as mine, open_file(own.file, follow_symlinks=True) as theirs:
        for start in range(0, count, step):
            size = min(step, count - start)
            a = mine.read(entry.offset + start * one, size * one)
            b = theirs.read(own.offset + start * other, size * other)
            if entry.dtype == own.dtype and a == b:
                continue
            if not np.array_equal(_float32(a, entry.dtype), _float32(b, own.dtype)):
                return False
        mine.check_unchanged()
    return True


def _float32(raw: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32)

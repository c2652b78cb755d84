"""Quantised checkpoints as others read them: AWQ by hand from its documented layout."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

# Where column 8c + j of eight lies in a word, from the least significant nibble.
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, columns / 8] of AutoAWQ's GEMM layout: 0 to 15, [rows, columns]."""
    parts = [(words >> (4 * nibble)) & 0xF for nibble in _NIBBLE]
    return torch.stack(parts, dim=-1).flatten(1)


def awq_by_hand(folder: Path) -> Any:
    """A float32 transformers model with the weights of an AWQ checkpoint: W = ((q - z) s)^T."""
    config = json.loads((folder / "config.json").read_text())
    group = config.pop("quantization_config")["group_size"]
    stored = load_file(folder / "model.safetensors")
    tensors = {name: t.float() for name, t in stored.items() if not name.endswith("qweight")}
    for name, words in stored.items():
        if name.endswith(".qweight"):
            stem = name.removesuffix("qweight")
            zeros = unpacked(stored[stem + "qzeros"]).repeat_interleave(group, 0)
            scales = tensors.pop(stem + "scales").repeat_interleave(group, 0)
            tensors.pop(stem + "qzeros")
            tensors[stem + "weight"] = ((unpacked(words) - zeros) * scales).t().contiguous()
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class.from_dict(config)).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model

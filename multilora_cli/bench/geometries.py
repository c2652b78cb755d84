"""Shapes of well-known models by name, as the config.json that a speed test needs of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multilora_cli.errors import BadInput

# Hidden size, inner size, layers, heads, KV heads, vocabulary, RoPE base, positions.
_LLAMA: Mapping[str, tuple[int, int, int, int, int, int, float, int]] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 10000.0, 4096),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, 10000.0, 4096),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, 500000.0, 8192),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256, 500000.0, 8192),
    "tiny": (128, 256, 2, 4, 2, 1024, 10000.0, 2048),
}
NAMES = tuple(_LLAMA)
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def named_config(name: str) -> dict[str, Any]:
    """The config.json of a shape. Raises BadInput for an unknown name."""
    if name not in _LLAMA:
        raise BadInput(
            f"--model {name}: neither a folder with a config.json nor a known shape",
            hint=f"known: {', '.join(NAMES)}",
        )
    hidden, inner, layers, heads, kv_heads, vocabulary, theta, positions = _LLAMA[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def config_folder(model: str, quantization: str, scratch: Path) -> Path:
    """A folder with the config.json of `model`: a folder, its config.json, or a shape's name.

    What has no folder with that config yet is written below `scratch`: a named shape, and a
    16-bit shape that is to be AWQ, which only a checkpoint's config can say. Raises BadInput.
    """
    path = Path(model).expanduser()
    folder = path.parent if path.name == "config.json" and path.is_file() else path
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if quantization != "awq" or config.get("quantization_config"):
            return folder
    else:
        config = named_config(model)
    if quantization == "awq":
        config["quantization_config"] = _AWQ
    folder = scratch / f"{path.name}-{quantization}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder

"""Writes a base with random weights as files, so that a start can be measured with its loading.

    python tools/random_base.py FOLDER --model llama-3-8b
    mlora bench --offline --model FOLDER --load-format auto --batch 1 --settings base

A folder with config.json and safetensors of about 4 GB each, in bf16, named as Llama's are.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from multilora_cli.bench.geometries import named_config
from multilora_cli.sizing.geometry import ModelGeometry, projection_name, read_geometry

SHARD_BYTES = 4 * 2**30


def shapes(geometry: ModelGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in the order in which they are written."""
    width = geometry.hidden_size
    yield "model.embed_tokens.weight", (geometry.vocab_size, width)
    for layer in range(geometry.num_layers):
        for module, (d_in, d_out) in geometry.module_shapes.items():
            yield f"{projection_name(layer, module)}.weight", (d_out, d_in)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", (width,)
    yield "model.norm.weight", (width,)
    if not geometry.tie_word_embeddings:
        yield "lm_head.weight", (geometry.vocab_size, width)


def write(folder: Path, model: str, device: str) -> None:
    """The base of that shape. Raises BadInput for a name that no shape has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(named_config(model)), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def finish() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes(read_geometry(folder)):
        tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if len(shape) == 2:
            tensor.normal_(std=shape[1] ** -0.5, generator=generator)
        shard[name] = tensor.cpu()
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            finish()
    finish()
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    write(given.folder, given.model, given.device)


if __name__ == "__main__":
    main()

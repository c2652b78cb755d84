"""PEFT as the oracle of the adapter tests, and small tools to edit adapter folders."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from multilora_cli.adapters.image import build_image
from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.models.base_rows import BaseRows
from multilora_cli.models.loader import load_decoder
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_kernels.layout import ImagePlan, page_bytes, plan_image
from tests.signature import load_adapted

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Deltas = dict[tuple[int, str], Tensor]


def read(folder: Path, base: Path, max_rank: int = 512, **options: Any) -> AdapterFile:
    """`read_adapter` on the base in the folder `base`."""
    return read_adapter(folder, read_geometry(base), max_rank=max_rank, **options)


def plan_for(
    adapter: AdapterFile, geometry: ModelGeometry, dtype: torch.dtype = torch.float32
) -> ImagePlan:
    """The image plan of an adapter in pages of the model's own size."""
    size = page_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, dtype.itemsize)
    shapes = geometry.module_shapes
    return plan_image(adapter.ranks, shapes, size, dtype.itemsize, adapter.extras)


def base_rows(base: Path) -> BaseRows:
    """The weights of the base in a folder, for DoRA and trained biases."""
    return BaseRows(load_decoder(base, read_geometry(base), torch.device("cpu"), torch.float32))


def built(
    adapter: AdapterFile,
    plan: ImagePlan,
    dtype: torch.dtype = torch.float32,
    base: BaseRows | None = None,
) -> Tensor:
    """The image, built over memory full of 0xFF (NaN in every dtype), between others' pages."""
    slab = torch.full((1 + plan.num_pages + 1, plan.page_bytes), 255, dtype=torch.uint8)
    out = slab[1:-1]
    build_image(adapter, plan, dtype, out, base=base)
    assert bool((slab[0] == 255).all() and (slab[-1] == 255).all()), "pages of others are written"
    return out


def unpacked(
    plan: ImagePlan, image: Tensor, geometry: ModelGeometry, dtype: torch.dtype = torch.float32
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """A [r', d_in] and s * B [d_out, r'] of every module, r' padded, in float64, block by block."""
    matrices: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for block in plan.blocks:
        key = (block.layer, block.module)
        d_in, d_out = geometry.module_shapes[block.module]
        rank = -(-plan.ranks[key] // 16) * 16
        zeros = torch.zeros(rank, d_in).double(), torch.zeros(d_out, rank).double()
        a, b = matrices.setdefault(key, zeros)
        nbytes = block.rank_width * block.length * dtype.itemsize
        values = image[block.page, block.offset : block.offset + nbytes].view(dtype).double()
        ranks = slice(block.rank_start, block.rank_start + block.rank_width)
        span = slice(block.start, block.start + block.length)
        if block.matrix == "a":
            a[ranks, span] = values.view(block.rank_width, block.length)
        else:
            b[span, ranks] = values.view(block.length, block.rank_width)
    return matrices


def our_deltas(folder: Path, base: Path, dtype: torch.dtype = torch.float32) -> Deltas:
    """s * B @ A of every module, reconstructed from the image that the kernels read."""
    adapter, geometry = read(folder, base), read_geometry(base)
    plan = plan_for(adapter, geometry, dtype)
    image = built(adapter, plan, dtype)
    return {key: b @ a for key, (a, b) in unpacked(plan, image, geometry, dtype).items()}


def peft_deltas(folder: Path, base: Path) -> Deltas:
    """The same from PEFT, loading the very folder that we read; zero deltas left out."""
    model = load_adapted(base, folder)
    deltas: Deltas = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and module.lora_A:
            layer = int(name.split("layers.")[1].split(".")[0])
            delta = module.get_delta_weight("default").double()
            if bool(delta.any()):
                deltas[layer, name.rpartition(".")[2]] = delta
    return deltas


def assert_equals_peft(folder: Path, base: Path, oracle: Path | None = None) -> Deltas:
    """Our deltas of `folder` equal PEFT's of `oracle` (default: the same folder), key for key."""
    ours, theirs = our_deltas(folder, base), peft_deltas(oracle or folder, base)
    assert theirs, "the oracle holds no delta: the test would pass on the base"
    assert ours.keys() == theirs.keys()
    for key, delta in theirs.items():
        scale = float(delta.abs().max())
        difference = float((ours[key] - delta).abs().max())
        assert difference <= 1e-5 * max(scale, 1.0), (key, difference, scale)
    return ours


# ---------------------------------------------------------------- editing folders


def copy_of(folder: Path, target: Path) -> Path:
    """A copy of an adapter folder to edit."""
    shutil.copytree(folder, target)
    return target


def edit_config(folder: Path, *remove: str, **changes: Any) -> Path:
    """Remove fields of adapter_config.json and set others."""
    path = folder / CONFIG
    config = json.loads(path.read_text())
    for field in remove:
        config.pop(field, None)
    path.write_text(json.dumps(config | changes))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """Rewrite the weight file with what `edit` makes of its tensors."""
    path = folder / WEIGHTS
    tensors = {name: tensor.contiguous() for name, tensor in edit(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> Path:
    """Rewrite the weight file with other names."""
    return edit_tensors(folder, lambda tensors: {rename(n): t for n, t in tensors.items()})


def first(tensors: Mapping[str, Tensor], part: str) -> str:
    """The first name, in alphabetical order, that contains `part`."""
    return next(name for name in sorted(tensors) if part in name)


def aged(path: Path) -> Path:
    """Set the file's time back, so that readers need not wait for it to settle."""
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path

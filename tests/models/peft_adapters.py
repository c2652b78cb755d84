"""Adapters made and computed by PEFT itself: folders on disk and their reference logits."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from multilora_cli.adapters.image import build_image
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.models.base_rows import BaseRows
from multilora_kernels.layout import plan_image
from tests.models.harness import PagedRunner

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Ranks 4 to 64, every module, both scalings, patterns; the order is that of the slots.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 16, "lora_alpha": 16, "target_modules": ["o_proj", "down_proj", "up_proj"]},
    {
        "r": 24,
        "lora_alpha": 30,
        "target_modules": ALL,
        "rank_pattern": {"k_proj": 9, "layers.0.mlp.gate_proj": 40},
        "alpha_pattern": {"down_proj": 5},
    },
    {"r": 64, "lora_alpha": 32, "target_modules": ALL, "layers_to_transform": [1]},
)


def make_adapters(
    model: Any, folder: Path, configs: Sequence[dict[str, Any]] = CONFIGS, size: float = 1.0
) -> list[Path]:
    """Save one random PEFT adapter per config; `size` is the rms of B relative to that of A."""
    folders = []
    for index, config in enumerate(configs):
        torch.manual_seed(100 + index)
        with warnings.catch_warnings():
            # Of what a merge would lose, and of biases that it takes for damaged factors.
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(
                copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **config)
            )
            with torch.no_grad():
                for name, parameter in wrapped.named_parameters():
                    _randomise(name, parameter, config, size)
            folders.append(folder / f"adapter-{index + 1}")
            wrapped.save_pretrained(folders[-1])
    return folders


def _randomise(name: str, parameter: torch.Tensor, config: dict[str, Any], size: float) -> None:
    """What was trained becomes random: far from where PEFT starts it."""
    if "magnitude" in name:
        parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    elif name.endswith("bias"):  # of lora_B, or the base's own where it is trained
        if "lora_" in name or config.get("bias", "none") != "none":
            parameter.normal_(0.0, 0.5)
    elif "modules_to_save" in name:
        parameter.add_(torch.empty_like(parameter).normal_(0.0, parameter.shape[1] ** -0.5))
    elif "trainable_tokens_delta" in name:  # the rows themselves
        parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    elif "lora_embedding" in name:
        scale = size if "_B" in name else 1.0
        parameter.normal_(0.0, scale * min(parameter.shape) ** -0.5)
    elif "lora_" in name:
        scale = size if "lora_B" in name else 1.0
        parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5)


@torch.no_grad()
def peft_logits(
    model: Any, folders: Sequence[Path], prompts: Sequence[tuple[int, list[int]]]
) -> list[torch.Tensor]:
    """PEFT's logits of (slot, prompt) pairs, each prompt alone; slot 0 is the bare model."""
    # A model of its own for every adapter: PEFT puts trained biases into the base that all share.
    models: list[Any] = [model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for folder in folders:
            models.append(peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval())
    return [models[slot](torch.tensor([prompt])).logits[0].float() for slot, prompt in prompts]


def load_adapters(
    runner: PagedRunner,
    folders: Sequence[Path],
    max_rank: int = 64,
    base_folder: Path | None = None,
) -> None:
    """Read the folders as the server does and make them hot in slots 1, 2, 3 ..."""
    decoder = runner.decoder
    for slot, folder in enumerate(folders, start=1):
        adapter = read_adapter(folder, decoder.geometry, max_rank=max_rank, base_folder=base_folder)
        plan = plan_image(
            adapter.ranks,
            decoder.geometry.module_shapes,
            runner.pool.shape[1],
            decoder.dtype.itemsize,
            adapter.extras,
        )
        image = torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
        build_image(adapter, plan, decoder.dtype, image, base=BaseRows(decoder))
        runner.load_adapter(slot, plan, image)

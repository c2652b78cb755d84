"""Tiny random models of every family, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from multilora_cli.models.decoder import Decoder
from multilora_cli.models.loader import load_decoder
from multilora_cli.sizing.geometry import read_geometry

VOCAB = 211
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_model(family: str, seed: int = 0, gain: float = 1.3, **changes: Any) -> Any:
    """A transformers model in fp32 whose every parameter matters: norms and biases random too.

    `gain` scales the matrices: above 1 small errors grow from layer to layer.
    """
    config_class, model_class = _CLASSES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5)
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """`model` in `folder`, safetensors."""
    model.save_pretrained(folder, **options)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Our decoder of the model in `folder`."""
    return load_decoder(folder, read_geometry(folder), torch.device(device), dtype)


@torch.no_grad()
def reference_logits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits [T, vocab] of each prompt on its own."""
    return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]

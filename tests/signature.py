"""Models and adapters for tests, built in a temporary folder: F1, F2 and F3 of the case list.

F1  `tiny_base` and `peft_adapter`: random weights, for comparing numbers.
F2  `signature_base` and `signature_adapter`: one layer; the base counts up, adapter k repeats
    token k + 1 for ever. Greedy text tells whose weights answered and who wrote the cache.
    `deep_base` and `deep_adapter`: three layers and all seven projections chained, so that
    losing any projection, layer, rank tile, block of a tile or page makes the text the base's.
F3  `byte_tokenizer`: one token a byte, exact counts, U+FFFD for a lone byte.

Everything is deterministic; nothing is downloaded.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

BOS = 256
EOS = 257
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = SEVEN[:4]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# ---------------------------------------------------------------- F3, byte tokenizer


def byte_tokenizer(path: Path, vocab_size: int = 384, *, add_bos: bool = False) -> Path:
    """Write F3 into `path`: ids 0..255 are bytes, 256 <s>, 257 </s>, the rest <u258> and so on."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<s>": BOS, "</s>": EOS}
    vocab |= {f"<u{i}>": i for i in range(258, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")]
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(path)
    return path


# ---------------------------------------------------------------- F1, tiny random models

_FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_config(family: str = "llama", **overrides: Any) -> PretrainedConfig:
    """The F1 geometry of `family`; `overrides` are fields of its transformers config."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    if family == "qwen3":
        fields["head_dim"] = 16
    if family == "mistral":
        fields["sliding_window"] = None
    return _FAMILIES[family](**(fields | overrides))


def tiny_base(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random base of `family` (llama, mistral, qwen2, qwen3) as a Hugging Face folder.

    Norm weights and biases are random too: transformers starts them at one and zero, which would
    hide a decoder that forgets them.
    """
    torch.manual_seed(seed)
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                start = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(start + 0.2 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(path)
    if tokenizer:
        byte_tokenizer(path, config.vocab_size)
    return path


def load_base(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model of a folder in `dtype`, ready for inference."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def load_adapted(
    base_path: Path, adapter_path: Path, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The oracle: PEFT loading the very folder that the engine gets."""
    model = PeftModel.from_pretrained(
        load_base(base_path, dtype), adapter_path, autocast_adapter_dtype=False
    )
    for parameter in model.parameters():  # not model.to: it would round rope's frequencies too
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def peft_adapter(
    base_path: Path,
    path: Path,
    *,
    seed: int = 1,
    b_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **lora_kwargs: Any,
) -> Path:
    """Write an adapter made by PEFT on `base_path`; `lora_kwargs` are fields of LoraConfig.

    Defaults: r 8, alpha 2 r (a scale of 1 hides scaling bugs), q_proj and v_proj. B is random, a
    DoRA magnitude is moved off its start (where DoRA equals plain LoRA), `init_lora_weights` is
    saved as true so that a key missed at reload shows as the base, and the folder is checked to
    reload as the model in memory.
    """
    rank = int(lora_kwargs.setdefault("r", 8))
    lora_kwargs.setdefault("lora_alpha", 2 * rank)
    lora_kwargs.setdefault("target_modules", ["q_proj", "v_proj"])
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **lora_kwargs)
    model = get_peft_model(load_base(base_path), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.mul_(b_scale)
            if "lora_magnitude_vector" in name:
                parameter.mul_(0.5 + 1.5 * torch.rand(parameter.shape))
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(parameter.to(dtype))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(path)
    if dtype != torch.float32:
        _recast(path / "adapter_model.safetensors", dtype)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected, got = model(ids).logits, load_adapted(base_path, path)(ids).logits
    assert torch.allclose(expected, got, atol=1e-5), "PEFT reloads another adapter than it saved"
    return path


def _recast(file: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file)


# ---------------------------------------------------------------- F2, signature model

SIGNATURES = 192
_H2 = 384  # hidden and vocabulary of F2: a multiple of 128 for INT4 groups


def _save_base(model: LlamaForCausalLM, path: Path, dtype: torch.dtype, vocab_size: int) -> Path:
    model.to(dtype).save_pretrained(path)
    return byte_tokenizer(path, vocab_size)


def signature_base(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the F2 base: its greedy text is last token + 1, + 2, ... whatever the prompt."""
    config = LlamaConfig(
        hidden_size=_H2,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_H2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    head = _H2 // 4
    with torch.no_grad():
        layer = model.model.layers[0]
        attention = layer.self_attn
        for name in ATTENTION:
            getattr(attention, name).weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        output = attention.o_proj.weight
        output[:head, :head] = torch.eye(head)  # KV group 0 writes tokens 0..95
        output[head : 2 * head, 2 * head : 3 * head] = torch.eye(head)  # group 1: 96..191
        model.model.embed_tokens.weight.copy_(torch.eye(_H2))
        model.lm_head.weight.copy_(torch.roll(torch.eye(_H2), 1, 0))
    return _save_base(model, path, dtype, _H2)


def signature_adapter(
    path: Path, signature: int, *, r: int = 4, alpha: int | None = None, row: int = 0
) -> Path:
    """Write the F2 adapter for `signature` < 192: its text is token `signature` + 1 repeated.

    `row` is the rank row that carries it; lora_B is divided by alpha / r, so any scale gives the
    same text when it is honoured.
    """
    assert 0 <= signature < SIGNATURES and -r <= row < r
    alpha = r if alpha is None else alpha
    a, b = torch.zeros(r, _H2), torch.zeros(2 * _H2 // 4, r)
    a[row] = 1.0
    b[signature, row] = 3 / _H2**0.5 * r / alpha
    return _save_adapter(path, {(0, "v_proj"): (a, b)}, r, alpha)


def _save_adapter(
    path: Path,
    weights: dict[tuple[int, str], tuple[Tensor, Tensor]],
    r: int,
    alpha: int,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """`weights` maps (layer, module) to A [r, in] and B [out, r]."""
    tensors = {}
    for (layer, module), (a, b) in weights.items():
        block = "self_attn" if module in ATTENTION else "mlp"
        prefix = f"base_model.model.model.layers.{layer}.{block}.{module}"
        tensors[f"{prefix}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"{prefix}.lora_B.weight"] = b.to(dtype).contiguous()
    modules = sorted({module for _, module in weights})
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


# ---------------------------------------------------------------- F2 deepened
#
# The residual stream carries named features, each a +-1 column of a Hadamard matrix, so that every
# feature is spread over all 512 dimensions and a block lost anywhere weakens it. One chain runs
# through all 21 projections of an adapter; each link passes the next one on only at full strength:
#
#   q, k    the base looks away from <s> with a score of 112; the adapter's 128 on <s> must beat
#           it (softmax decides: 7/8 of the score already loses)
#   v, o    copy "this is <s>" into the feature a[l] of the position that looks at <s>
#   gate    silu(z) - silu(z - 12), z = 128 a[l] - 112: closed when a quarter of a[l] is missing,
#           12 within 3 % for z in 8..20, so that rounding does not add up
#   up,down multiply by s[l-1], write s[l], in the last layer token k itself with 1.04 times the
#           base's own vote: a quarter missing leaves the base ahead
#
# Which v channel, MLP pattern and features a[l], s[l] are used depends on k % 32 through a
# bijection of each layer's own: projections of adapters whose k % 32 differ never fit together.

DEEP_LAYERS = 3
DEEP_HIDDEN = 512
DEEP_VOCAB = 320
DEEP_KEYS = 32
_HEADS, _KV_HEADS, _HEAD, _MLP = 4, 2, 32, 128
_CONST = DEEP_VOCAB
_SCORE, _DECOY, _VOTE = 128.0, 112.0, 1.04
_GAIN, _CLOSED, _STEP = 128.0, 112.0, 12.0
# Pairs (i, i + 16) of a head that rope turns by less than 0.03 rad over 1024 positions.
_DECOY_DIMS = [*range(6, 11), *range(22, 27)]
_SCORE_DIMS = [*range(11, 16), *range(27, 32)]


def _hadamard(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def _features() -> Tensor:
    """[512, 512] of +-1; column j is how the residual stream spells feature j."""
    rows = torch.randperm(DEEP_HIDDEN, generator=torch.Generator().manual_seed(7))
    return _hadamard(DEEP_HIDDEN)[rows]


def _read(features: Tensor, *columns: int) -> Tensor:
    """A row of a weight that reads the sum of some features: [512]."""
    return features[:, list(columns)].sum(1) / DEEP_HIDDEN


def _key(signature: int, layer: int, salt: int) -> int:
    return (signature * (2 * layer + 3) + 5 * layer + salt) % DEEP_KEYS


@dataclass(frozen=True)
class _Names:
    """Features that the adapter for one signature uses in one layer."""

    attended: int
    previous: int
    written: int
    channel: int
    pattern: int


def _names(signature: int, layer: int) -> _Names:
    def feature(kind: int, at: int) -> int:
        return _CONST + 1 + DEEP_KEYS * (2 * at + kind) + _key(signature, at, kind)

    last = layer == DEEP_LAYERS - 1
    return _Names(
        attended=feature(0, layer),
        previous=feature(1, layer - 1) if layer else _CONST,
        written=signature if last else feature(1, layer),
        channel=_key(signature, layer, 11),
        pattern=_key(signature, layer, 13),
    )


def deep_base(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the deepened F2 base: greedy text is last token + 1, + 2, ...; prompts start with <s>.

    Without an adapter every layer adds nothing. The tokenizer adds <s> by itself.
    """
    config = LlamaConfig(
        hidden_size=DEEP_HIDDEN,
        intermediate_size=_MLP,
        num_hidden_layers=DEEP_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD,
        vocab_size=DEEP_VOCAB,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).float().eval()
    features = _features()
    decoy = torch.zeros(_HEAD, 1)
    decoy[_DECOY_DIMS] = (_DECOY * _HEAD**0.5 / len(_DECOY_DIMS)) ** 0.5
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_((features[:, :DEEP_VOCAB] + features[:, [_CONST]]).T)
        # <s> is a token like others; 64 spreads the logits, a step of one vote is about 25.
        successors = torch.roll(torch.arange(DEEP_VOCAB), 1)
        model.lm_head.weight.copy_(64 * features[:, successors].T / DEEP_HIDDEN)
        for index, layer in enumerate(model.model.layers):
            for module in SEVEN:
                _projection(layer, module).weight.zero_()
            # With an adapter at work the stream holds 2 features, then 2 more after each layer.
            layer.input_layernorm.weight.fill_((2 + 2 * index) ** 0.5)
            layer.post_attention_layernorm.weight.fill_((3 + 2 * index) ** 0.5)
            constant = _read(features, _CONST)
            layer.self_attn.q_proj.weight.copy_(decoy.repeat(_HEADS, 1) * constant)
            elsewhere = constant - _read(features, BOS)
            layer.self_attn.k_proj.weight.copy_(decoy.repeat(_KV_HEADS, 1) * elsewhere)
            closed = torch.full((_MLP, 1), -_CLOSED)
            closed[1::2] -= _STEP
            layer.mlp.gate_proj.weight.copy_(closed * constant)
    model.to(dtype).save_pretrained(path)
    return byte_tokenizer(path, DEEP_VOCAB, add_bos=True)


def _projection(layer: torch.nn.Module, module: str) -> torch.nn.Linear:
    block = layer.self_attn if module in ATTENTION else layer.mlp
    projection = getattr(block, module)
    assert isinstance(projection, torch.nn.Linear)
    return projection


def _deep_vectors(signature: int, layer: int, features: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Per module the one row a [in] and column b [out] that the chain needs."""
    names = _names(signature, layer)
    score = torch.zeros(_HEAD)
    score[_SCORE_DIMS] = (_SCORE * _HEAD**0.5 / len(_SCORE_DIMS)) ** 0.5
    channel = _hadamard(_HEAD)[:, names.channel]
    pattern = _hadamard(_MLP)[:, names.pattern]
    constant, anchor = _read(features, _CONST), _read(features, BOS)
    vote = _VOTE if layer == DEEP_LAYERS - 1 else 1.0
    steps = pattern.clone()  # odd channels hold the silu that is taken away
    steps[1::2] *= -1
    return {
        "q_proj": (constant, score.repeat(_HEADS)),
        "k_proj": (anchor, score.repeat(_KV_HEADS)),
        "v_proj": (anchor, channel.repeat(_KV_HEADS)),
        "o_proj": (
            channel.repeat(_HEADS) / (_HEADS * _HEAD),
            features[:, names.attended],
        ),
        "gate_proj": (_read(features, names.attended), torch.full((_MLP,), _GAIN)),
        "up_proj": (_read(features, names.previous), pattern),
        "down_proj": (steps / (_MLP // 2), features[:, names.written] * (vote / _STEP)),
    }


def deep_rows(r: int) -> list[int]:
    """Rank rows that carry the signature: the last row of up to four tiles of 16, always r - 1."""
    tiles = (r + 15) // 16
    chosen = sorted({round(i * (tiles - 1) / 3) for i in range(4)}) if tiles > 1 else [0]
    return [min(16 * tile + 15, r - 1) for tile in chosen]


def deep_adapter(
    path: Path,
    signature: int,
    *,
    r: int = 16,
    alpha: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the deepened F2 adapter: token `signature` + 1 repeated, for prompts [<s>, ...] >= 2.

    All 21 projections and, up to r 64, every tile of 16 ranks are needed (above, four tiles,
    the last among them); the signature lies in each tile's last row.
    """
    assert 0 <= signature < SIGNATURES
    alpha = 2 * r if alpha is None else alpha
    features, rows = _features(), deep_rows(r)
    shares = {1: [1.0], 2: [0.5] * 2, 3: [0.25, 0.25, 0.5], 4: [0.25] * 4}[len(rows)]
    weights = {}
    for layer in range(DEEP_LAYERS):
        for module, (row, column) in _deep_vectors(signature, layer, features).items():
            a, b = torch.zeros(r, len(row)), torch.zeros(len(column), r)
            for index, share in zip(rows, shares, strict=True):
                a[index] = row
                b[:, index] = column * (share * r / alpha)
            weights[layer, module] = (a, b)
    return _save_adapter(path, weights, r, alpha, dtype)


# ---------------------------------------------------------------- oracles


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation without a cache: the plainest oracle there is."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def adapter_config(path: Path) -> dict[str, Any]:
    """The adapter_config.json of a folder."""
    config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return config

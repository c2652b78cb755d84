"""The fixtures are what they claim to be, measured with transformers and PEFT alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from tests.signature import (
    BOS,
    DEEP_LAYERS,
    EOS,
    SEVEN,
    adapter_config,
    byte_tokenizer,
    deep_adapter,
    deep_base,
    deep_rows,
    greedy,
    load_adapted,
    load_base,
    peft_adapter,
    signature_adapter,
    signature_base,
    tiny_base,
)

PROMPT = [BOS, *b"nine tokens or a few more"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def f2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signature_base(tmp_path_factory.mktemp("f2") / "base")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_base(tmp_path_factory.mktemp("deep") / "base")


def test_f2_base_counts_up(f2: Path) -> None:
    assert greedy(load_base(f2), [5, 9, 40], 4) == [41, 42, 43, 44]


@pytest.mark.parametrize("signature", [0, 20, 95, 96, 150, 191])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_adapter_repeats_its_signature(
    f2: Path, tmp_path: Path, signature: int, dtype: torch.dtype
) -> None:
    path = signature_adapter(tmp_path, signature, r=8, alpha=16, row=-1)
    model = load_adapted(f2, path, dtype)
    assert greedy(model, PROMPT, 3) == [signature + 1] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deep_base_counts_up(deep: Path, dtype: torch.dtype) -> None:
    assert greedy(load_base(deep, dtype), [BOS, 9, 40], 3) == [41, 42, 43]


@pytest.mark.parametrize("r", [1, 16, 40, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deep_adapter_repeats_its_signature(
    deep: Path, tmp_path: Path, r: int, dtype: torch.dtype
) -> None:
    signature = (37 * r) % 192
    model = load_adapted(deep, deep_adapter(tmp_path, signature, r=r, dtype=dtype), dtype)
    assert greedy(model, PROMPT, 3) == [signature + 1] * 3
    assert greedy(model, [BOS, 70], 2) == [signature + 1] * 2
    long = [BOS, *((7 * i) % 250 for i in range(1000))]
    assert greedy(model, long, 1) == [signature + 1]


def _without(model: PreTrainedModel, layer: int, module: str, rows: slice) -> list[int]:
    """The first tokens when some rank rows of one projection are lost."""
    name = next(n for n, _ in model.named_modules() if n.endswith(f"{layer}.self_attn"))
    block = name if module in SEVEN[:4] else name.replace("self_attn", "mlp")
    b = model.get_parameter(f"{block}.{module}.lora_B.default.weight")
    kept = b.detach().clone()
    with torch.no_grad():
        b[:, rows] = 0
        text = greedy(model, PROMPT, 1)
        b.copy_(kept)
    return text


@pytest.mark.parametrize("r", [24, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deep_adapter_needs_every_projection_and_tile(
    deep: Path, tmp_path: Path, r: int, dtype: torch.dtype
) -> None:
    model = load_adapted(deep, deep_adapter(tmp_path, 150, r=r, dtype=dtype), dtype)
    counted = [PROMPT[-1] + 1]
    tiles = [slice(i, min(i + 16, r)) for i in range(0, r, 16)]
    lost = [slice(0, r), slice(r - 1, r), *tiles]
    for layer in range(DEEP_LAYERS):
        for module in SEVEN:
            for rows in lost:
                assert _without(model, layer, module, rows) == counted, (layer, module, rows)
    assert greedy(model, PROMPT, 1) == [151]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deep_adapter_needs_every_block_of_a_tile(
    deep: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A quarter of the long side of any A or B is about what one page holds of a tile."""
    model = load_adapted(deep, deep_adapter(tmp_path, 33, r=16, dtype=dtype), dtype)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        kept = parameter.detach().clone()
        axis = 1 if "lora_A" in name else 0
        for part in range(4):
            with torch.no_grad():
                parameter.chunk(4, axis)[part].zero_()
                text = greedy(model, PROMPT, 1)
                parameter.copy_(kept)
            assert text == [PROMPT[-1] + 1], (name, part)


def test_deep_adapters_do_not_fit_together(deep: Path, tmp_path: Path) -> None:
    """Any projection of any layer taken from another adapter breaks the chain."""
    model = load_adapted(deep, deep_adapter(tmp_path / "a", 10, r=16))
    other = load_file(deep_adapter(tmp_path / "b", 77, r=16) / "adapter_model.safetensors")
    changed = 0
    for name, tensor in other.items():
        parameter = model.get_parameter(name.replace(".weight", ".default.weight"))
        kept = parameter.detach().clone()
        if torch.equal(kept, tensor):
            continue  # q, k and A of v look for <s>, B of gate is constant: the same in all
        changed += 1
        with torch.no_grad():
            parameter.copy_(tensor)
            text = greedy(model, PROMPT, 1)
            parameter.copy_(kept)
        expected = 78 if name.endswith("2.mlp.down_proj.lora_B.weight") else PROMPT[-1] + 1
        assert text == [expected], name
    assert changed == 3 * 8 - 1  # A of up in the first layer reads the constant


def test_deep_signature_lies_in_the_last_row_of_each_tile() -> None:
    assert [deep_rows(r) for r in (4, 16, 24, 64)] == [[3], [15], [15, 23], [15, 31, 47, 63]]
    assert deep_rows(128)[-1] == 127 and len(deep_rows(128)) == 4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny_bases_load_and_use_every_tensor(tmp_path: Path, family: str) -> None:
    model = load_base(tiny_base(tmp_path, family))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                continue  # adds the same to every score but for rope: little to see
            parameter.mul_(1.5)
            assert not torch.allclose(model(ids).logits, before, atol=1e-6), name
            parameter.div_(1.5)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == EOS


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
        {"use_dora": True},
        {"layers_to_transform": [1], "target_modules": list(SEVEN)},
    ],
    ids=["plain", "patterns", "rslora", "dora", "one layer"],
)
def test_peft_adapters_differ_from_the_base(tmp_path: Path, lora: dict[str, object]) -> None:
    base = tiny_base(tmp_path / "base")
    path = peft_adapter(base, tmp_path / "adapter", **lora)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        change = (load_adapted(base, path)(ids).logits - load_base(base)(ids).logits).abs().max()
    assert change > 0.1
    assert adapter_config(path)["init_lora_weights"] is True


def test_byte_tokenizer_counts_bytes(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "plain"))
    text = "naïve 🙂 <text>\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode(list("🙂".encode())[:1]) == "�"
    assert tokenizer("</s>")["input_ids"] == [EOS]
    with_bos = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "bos", add_bos=True))
    assert with_bos("ab")["input_ids"] == [BOS, *b"ab"]
    chat = with_bos.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert chat == [BOS, *b"<user>hi\n<assistant>"]

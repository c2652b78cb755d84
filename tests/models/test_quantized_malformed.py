"""Quantised checkpoints that are wrong: refused with file, tensor, found and expected."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.errors import ModelError
from tests.models import tiny
from tests.models.quantized_kit import (
    KINDS,
    WIDE,
    edit_config,
    edit_tensors,
    quantise_checkpoint,
)

Q = "model.layers.1.self_attn.q_proj."
DOWN = "model.layers.0.mlp.down_proj."
Tensors = dict[str, torch.Tensor]
USED = ("awq-128", "w4a16-asymmetric-32", "fp8-static", "fp8-block", "fbgemm")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good checkpoint a format."""
    folders = {}
    for name in USED:
        folders[name] = tmp_path_factory.mktemp(name) / "base"
        model = tiny.make_model("llama", seed=2, **WIDE)
        quantise_checkpoint(model, folders[name], KINDS[name])
        tiny.load(folders[name])
    return folders


def refusal(folder: Path) -> str:
    """What is said, hint included."""
    with pytest.raises(ModelError) as caught:
        tiny.load(folder)
    return f"{caught.value.message}\n{caught.value.hint}"


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: how(tensors[name])})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def poke(name: str, value: float) -> Callable[[Tensors], object]:
    """One element, far inside."""
    return lambda tensors: tensors[name].view(-1).__setitem__(-1, value)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous()


TENSORS: dict[str, tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = {
    "no scales": ("awq-128", drop(Q + "scales"),
        (Q + "scales", "missing", "F16 or BF16 or F32 [2, 256]")),
    "no zeros": ("awq-128", drop(Q + "qzeros"), (Q + "qzeros", "missing")),
    "no words": ("awq-128", drop(Q + "qweight"), (Q + "qweight", "missing")),
    "zeros of another group": ("awq-128", change(Q + "qzeros", lambda t: t.repeat(2, 1)),
        (Q + "qzeros", "found I32 [4, 32]", "expected I32 [2, 32]")),
    "GPTQ's words": ("awq-128", put(Q + "qweight", torch.zeros(32, 256, dtype=torch.int32)),
        (Q + "qweight", "found I32 [32, 256]", "expected I32 [256, 32]")),
    "8 bits": ("awq-128", put(Q + "qweight", torch.zeros(256, 64, dtype=torch.int32)),
        (Q + "qweight", "found I32 [256, 64]", "expected I32 [256, 32]")),
    "3 bits": ("awq-128", put(Q + "qweight", torch.zeros(256, 24, dtype=torch.int32)),
        (Q + "qweight", "found I32 [256, 24]", "expected I32 [256, 32]")),
    "swapped words": ("awq-128", change(DOWN + "qweight", transposed),
        (DOWN + "qweight", "found I32 [32, 384]", "expected I32 [384, 32]")),
    "truncated words": ("awq-128", change(DOWN + "qweight", lambda t: t[:-1]),
        (DOWN + "qweight", "found I32 [383, 32]", "expected I32 [384, 32]")),
    "int64 words": ("awq-128", change(Q + "qweight", lambda t: t.long()),
        (Q + "qweight", "found I64", "expected I32")),
    "fp64 scales": ("awq-128", change(Q + "scales", lambda t: t.double()),
        (Q + "scales", "found F64", "expected F16 or BF16 or F32")),
    "NaN scale": ("awq-128", poke(Q + "scales", float("nan")), (Q + "scales", "not finite")),
    "infinite scale": ("awq-128", poke(DOWN + "scales", float("inf")),
        (DOWN + "scales", "not finite")),
    "act-order": ("awq-128", put(Q + "g_idx", torch.zeros(256, dtype=torch.int32)),
        (Q + "g_idx", "not expected", "act-order")),
    "bitsandbytes": ("awq-128", put(Q + "SCB", torch.zeros(256)), (Q + "SCB", "bitsandbytes")),
    "words and weight": ("awq-128", put(Q + "weight", torch.zeros(256, 256)),
        (Q + "weight", "not expected")),
    "quantised head": ("awq-128", put("lm_head.qweight", torch.zeros(8, 8, dtype=torch.int32)),
        ("lm_head.qweight", "leave it in 16 bits")),
    "unknown tensor": ("awq-128", put(Q + "extra", torch.zeros(3)), (Q + "extra", "not expected")),
    "no shape": ("w4a16-asymmetric-32", drop(Q + "weight_shape"), (Q + "weight_shape", "missing")),
    "wrong shape": ("w4a16-asymmetric-32", put(DOWN + "weight_shape", torch.tensor([384, 256])),
        (DOWN + "weight_shape", "found [384, 256]", "expected [256, 384]")),
    "no zero point": ("w4a16-asymmetric-32", drop(Q + "weight_zero_point"),
        (Q + "weight_zero_point", "missing", "I32 [32, 8]")),
    "unpacked zero point": ("w4a16-asymmetric-32",
        put(Q + "weight_zero_point", torch.zeros(256, 8, dtype=torch.int8)),
        (Q + "weight_zero_point", "found I8 [256, 8]", "expected I32 [32, 8]")),
    "transposed scale": ("w4a16-asymmetric-32", change(Q + "weight_scale", transposed),
        (Q + "weight_scale", "found BF16 [8, 256]", "[256, 8]")),
    "g_idx": ("w4a16-asymmetric-32", put(Q + "weight_g_idx", torch.zeros(256, dtype=torch.int32)),
        (Q + "weight_g_idx", "act-order")),
    "no input scale": ("fp8-static", drop(Q + "input_scale"), (Q + "input_scale", "missing")),
    "zero input scale": ("fp8-static", put(Q + "input_scale", torch.tensor(0.0)),
        (Q + "input_scale", "found 0", "positive")),
    "NaN input scale": ("fp8-static", put(Q + "input_scale", torch.tensor(float("nan"))),
        (Q + "input_scale", "not finite")),
    "input scale by channel": ("fp8-static", put(Q + "input_scale", torch.ones(256)),
        (Q + "input_scale", "found F32 [256]")),
    "no weight scale": ("fp8-static", drop(Q + "weight_scale"), (Q + "weight_scale", "missing")),
    "e5m2": ("fp8-static", change(Q + "weight", lambda t: t.float().to(torch.float8_e5m2)),
        (Q + "weight", "found F8_E5M2", "expected F8_E4M3")),
    "int8": ("fp8-static", change(Q + "weight", lambda t: t.float().to(torch.int8)),
        (Q + "weight", "found I8", "expected F8_E4M3")),
    "scaled bf16": ("fp8-static", change(Q + "weight", lambda t: t.bfloat16()),
        (Q + "weight", "found BF16", "expected F8_E4M3")),
    "NaN weight": ("fp8-static", lambda tensors: tensors[Q + "weight"].view(torch.uint8)
        .view(-1).__setitem__(77, 0xFF), (Q + "weight", "holds NaN")),
    "swapped FP8": ("fp8-static", change(DOWN + "weight", transposed),
        (DOWN + "weight", "found F8_E4M3 [384, 256]", "expected F8_E4M3 [256, 384]")),
    "nvfp4": ("fp8-static", put(Q + "weight_scale_2", torch.ones(1)),
        (Q + "weight_scale_2", "nvfp4")),
    "channel scales for blocks": ("fp8-block", put(Q + "weight_scale_inv", torch.ones(256, 1)),
        (Q + "weight_scale_inv", "found F32 [256, 1]", "[2, 2]")),
    "transposed blocks": ("fp8-block", change(DOWN + "weight_scale_inv", transposed),
        (DOWN + "weight_scale_inv", "found F32 [3, 2]", "[2, 3]")),
    "blocks of 64": ("fp8-block", put(Q + "weight_scale_inv", torch.ones(4, 4)),
        (Q + "weight_scale_inv", "found F32 [4, 4]", "[2, 2]")),
    "E8M0 NaN": ("fp8-block", put(Q + "weight_scale_inv",
        torch.full((2, 2), 0xFF, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        (Q + "weight_scale_inv", "not finite")),
    "scales along inputs": ("fbgemm", put(Q + "weight_scale", torch.ones(1, 256)),
        (Q + "weight_scale", "found F32 [1, 256]", "[256, 1]")),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(pristine: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Each names its tensor, and file where there is one, with what was found and expected."""
    kind, damage, words = TENSORS[name]
    folder = Path(shutil.copytree(pristine[kind], tmp_path / "base"))
    edit_tensors(folder, damage)
    message = refusal(folder)
    for word in (*words, str(folder)):
        assert word in message


CONFIGS: dict[str, tuple[str, Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "group of 64": ("awq-128", lambda q: q.update(group_size=64),
        ("qzeros", "found I32 [2, 32]", "expected I32 [4, 32]")),
    "group of the column": ("awq-128", lambda q: q.update(group_size=-1),
        ("qzeros", "expected I32 [1, 32]")),
    "group of 128": ("w4a16-asymmetric-32",
        lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=128),
        ("weight_scale", "found BF16 [256, 8]", "[256, 2]")),
    "awq said to be FP8": ("awq-128", lambda q: q.update(quant_method="fp8"),
        ("weight", "missing")),
    "FP8 said to be awq": ("fp8-block", lambda q: q.update(quant_method="awq", bits=4),
        ("qweight", "missing")),
    "blocks said to be none": ("fp8-block", lambda q: q.update(weight_block_size=None),
        ("weight_scale_inv", "found F32")),
    "dynamic said to be static": ("fbgemm",
        lambda q: q.update(quant_method="fp8", activation_scheme="static"), ("input_scale",)),
    "static said to be dynamic": ("fp8-static", lambda q: q.update(activation_scheme="dynamic"),
        ("input_scale", "not expected")),
    "symmetric with zero points": ("w4a16-asymmetric-32",
        lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=True),
        ("weight_zero_point", "not expected")),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_the_tensors(
    pristine: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """The files contradict quantization_config."""
    kind, damage, words = CONFIGS[name]
    folder = Path(shutil.copytree(pristine[kind], tmp_path / "base"))
    edit_config(folder, lambda config: damage(config["quantization_config"]))
    message = refusal(folder)
    for word in (*words, str(folder)):
        assert word in message


def test_no_quantization_config(pristine: dict[str, Path], tmp_path: Path) -> None:
    """Quantised tensors that nothing explains."""
    for kind in USED:
        folder = Path(shutil.copytree(pristine[kind], tmp_path / kind))
        edit_config(folder, lambda config: config.pop("quantization_config"))
        message = refusal(folder)
        assert "no quantization_config" in message or "F8_E4M3, expected one of BF16" in message


def test_a_quantization_config_that_nothing_follows(tmp_path: Path) -> None:
    """A 16-bit checkpoint that says it is AWQ."""
    folder = tiny.save_model(tiny.make_model("llama"), tmp_path)
    edit_config(folder, lambda c: c.update(quantization_config=KINDS["awq-128"].config))
    assert "no linear layer is stored so" in refusal(folder)


def test_a_group_that_does_not_divide_the_inputs(tmp_path: Path) -> None:
    """The module, its inputs, and which sizes to try."""
    model = tiny.make_model("llama", num_hidden_layers=1)
    folder = tmp_path / "base"
    quantise_checkpoint(model, folder, KINDS["awq-column"])
    edit_config(folder, lambda c: c["quantization_config"].update(group_size=64))
    edit_tensors(folder, lambda t: None)
    message = refusal(folder)
    assert "down_proj: group_size 64 does not divide its 96 inputs" in message


@pytest.mark.parametrize("kind", USED)
@pytest.mark.parametrize("keep", [0, 5, 8, 200, 0.5, 0.9, -1])
def test_truncated_files(pristine: dict[str, Path], tmp_path: Path, kind: str, keep: float) -> None:
    """Cut anywhere: a clean error that names the file."""
    folder = Path(shutil.copytree(pristine[kind], tmp_path / "base"))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert str(path) in refusal(folder)


def test_overflow_of_float16(pristine: dict[str, Path], tmp_path: Path) -> None:
    """A scale that is finite, with weights that are not: the way out is bfloat16."""
    folder = Path(shutil.copytree(pristine["fbgemm"], tmp_path / "base"))
    edit_tensors(folder, change(Q + "weight_scale", lambda t: torch.full_like(t, 1e4)))
    tiny.load(folder, torch.bfloat16)
    with pytest.raises(ModelError, match="q_proj: not finite in float16") as caught:
        tiny.load(folder, torch.float16)
    assert caught.value.hint == "serve it as bfloat16"

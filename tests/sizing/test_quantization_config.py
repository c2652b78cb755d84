"""quantization_config: every format that is read, and the rest refused by name with the way out."""

import copy
from typing import Any

import pytest

from multilora_cli.errors import ModelError
from multilora_cli.sizing.quantization import (
    AWQ,
    FP8,
    NONE,
    Quantization,
    choose_quantization,
)
from multilora_cli.sizing.quantization_config import read_quantization

AWQ_CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128,
                              "zero_point": True, "version": "gemm"}  # fmt: skip
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [128, 128]}  # fmt: skip
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                        "symmetric": True, "dynamic": False, "actorder": None},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                  "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def changed(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """`config` with fields of the scheme (weights__x, group__x) or of itself replaced."""
    config = copy.deepcopy(config)
    for name, value in fields.items():
        group = config.get("config_groups", {}).get("group_0", {})
        if name.startswith("weights__"):
            group["weights"][name.removeprefix("weights__")] = value
        elif name.startswith("group__"):
            group[name.removeprefix("group__")] = value
        else:
            config[name] = value
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ_CONFIG, AWQ),
        (changed(AWQ_CONFIG, version="GEMM", modules_to_not_convert=["lm_head"]),
         Quantization("awq", ignored=("lm_head",))),
        (changed(AWQ_CONFIG, zero_point=False), Quantization("awq", zero_point=False)),
        ({"quant_method": "fp8"}, Quantization("fp8", granularity="tensor")),
        (changed(BLOCKS, modules_to_not_convert=["a"], ignored_layers=["b"]),
         Quantization("fp8", granularity="block", ignored=("a", "b"))),
        ({"quant_method": "fp8", "activation_scheme": "static"},
         Quantization("fp8", granularity="tensor", activations="static")),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200},
         Quantization("fp8", upper_bound=1200.0)),
        (W4A16, Quantization("awq", zero_point=False, layout="compressed", ignored=("lm_head",))),
        (changed(W4A16, weights__strategy="channel", weights__group_size=None,
                 weights__actorder="weight"),
         Quantization("awq", -1, zero_point=False, layout="compressed", ignored=("lm_head",))),
        (W8A8, Quantization("fp8", ignored=("lm_head",))),
        (changed(W8A8, weights__strategy="tensor", sparsity_config={"format": "dense"},
                 group__input_activations={"num_bits": 8, "type": "float", "strategy": "tensor",
                                           "dynamic": False}),
         Quantization("fp8", granularity="tensor", activations="static", ignored=("lm_head",))),
        (changed(W8A8, group__input_activations=None, group__targets=["re:.*mlp.*"]),
         Quantization("fp8", activations="none", ignored=("lm_head",), targets=("re:.*mlp.*",))),
    ],
)  # fmt: skip
def test_formats_that_are_read(config: dict[str, Any], expected: Quantization) -> None:
    assert read_quantization(config, "config.json") == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, None),
        ({"bits": 4}, "quant_method: found None"),
        ({"quant_method": "gptq", "desc_act": True}, "mlora quantize --to awq"),
        ({"quant_method": "bitsandbytes"}, "serve the 16-bit model"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "mxfp4"}, "4-bit floats"),
        ({"quant_method": "torchao"}, "found 'torchao', expected awq, fp8, fbgemm_fp8"),
        ({"quant_method": "auto-round"}, "auto_awq"),
        ({"quant_method": ["awq"]}, "quant_method"),
        (changed(AWQ_CONFIG, bits=3), "bits: found 3, expected 4"),
        (changed(AWQ_CONFIG, bits=8), "bits: found 8, expected 4"),
        (changed(AWQ_CONFIG, bits="4"), "bits: found '4'"),
        (changed(AWQ_CONFIG, bits=True), "bits: found True"),
        (changed(AWQ_CONFIG, version="gemv"), "found 'gemv', expected 'gemm'"),
        (changed(AWQ_CONFIG, version="gemv_fast"), "found 'gemv_fast'"),
        (changed(AWQ_CONFIG, version="marlin"), "found 'marlin'"),
        (changed(AWQ_CONFIG, version=None), "version: found None"),
        (changed(AWQ_CONFIG, group_size=0), "group_size: found 0"),
        (changed(AWQ_CONFIG, group_size=[128]), "group_size"),
        (changed(AWQ_CONFIG, group_size=128.0), "group_size: found 128.0"),
        (changed(AWQ_CONFIG, zero_point="yes"), "zero_point"),
        (changed(AWQ_CONFIG, desc_act=True), "act-order"),
        (changed(AWQ_CONFIG, modules_to_not_convert="lm_head"), "modules_to_not_convert"),
        (changed(AWQ_CONFIG, modules_to_not_convert=[1]), "modules_to_not_convert"),
        (changed(AWQ_CONFIG, modules_to_not_convert=["x"] * 20_001), "at most 20000"),
        (changed(BLOCKS, fmt="e5m2"), "fmt: found 'e5m2'"),
        (changed(BLOCKS, weight_block_size=[64, 128]), "weight_block_size"),
        (changed(BLOCKS, weight_block_size=128), "weight_block_size"),
        (changed(BLOCKS, activation_scheme="static"), "beside weight_block_size"),
        (changed(BLOCKS, activation_scheme="token"), "activation_scheme: found 'token'"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": float("nan")}, "found nan"),
        (changed(W4A16, weights__num_bits=8), "int' of 8"),
        (changed(W4A16, weights__actorder="group"), "act-order"),
        (changed(W4A16, weights__strategy="tensor_group"), "strategy"),
        (changed(W4A16, format="marlin-24"), "format: found 'marlin-24'"),
        (changed(W4A16, group__weights=None), "weights: found None"),
        (changed(W4A16, group__input_activations={"num_bits": 8}), "input_activations"),
        (changed(W4A16, group__output_activations={"num_bits": 8}), "output_activations"),
        (changed(W4A16, config_groups={"a": {}, "b": {}}), "found 2 groups, expected one"),
        (changed(W4A16, config_groups=[1]), "found 0 groups"),
        (changed(W4A16, transform_config={"R1": {"type": "hadamard"}}), "transform_config"),
        (changed(W4A16, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed(W8A8, weights__num_bits=4), "float' of 4"),
        (changed(W8A8, format="nvfp4-pack-quantized", weights__num_bits=4), "nvfp4"),
        (changed(W8A8, weights__strategy="block"), "block_structure: found None"),
        (changed(W8A8, weights__symmetric=False), "symmetric"),
        (changed(W8A8, group__input_activations={"type": "int", "num_bits": 8}), "float of 8 bits"),
        (changed(W8A8, group__input_activations={"type": "float", "num_bits": 8, "dynamic": False,
                                                 "strategy": "token"}), "static activations"),
        (changed(W8A8, ignore=["re:(a+)+$"]), "none of a group"),
        (changed(W8A8, ignore=["re:" + ".*a" * 5]), "at most 4 repeats"),
        (changed(W8A8, ignore=["re:[z-a]"]), "ignore"),
        (changed(W8A8, ignore=["re:" + "a" * 300]), "ignore"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert read_quantization(config, "config.json") == NONE
        return
    with pytest.raises(ModelError) as caught:
        read_quantization(config, "m/config.json")
    assert caught.value.message.startswith("m/config.json: quantization_config")
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("ignored", "targets", "covered"),
    [
        ((), (), True),
        (("lm_head",), (), True),
        (("down_proj",), (), False),
        (("model.layers.1",), (), False),
        (("model.layers.10", "layers.11"), (), True),
        (("mlp",), (), False),
        (("mlp.down",), (), True),  # Qwen's router is mlp.gate, not mlp.gate_proj
        (("model.layers.1.mlp.down_proj",), (), False),
        (("re:.*down_proj",), (), False),
        (("re:down_proj",), (), True),  # patterns start at the beginning
        ((r"re:model\.layers\.[01]\.mlp\..*",), (), False),
        (("re:.*self_attn.*", "re:.*(gate|up)_proj$"), (), True),
        ((), ("re:.*self_attn.*",), False),
        ((), ("re:.*mlp.*",), True),
    ],
)
def test_which_modules_are_quantised(
    ignored: tuple[str, ...], targets: tuple[str, ...], covered: bool
) -> None:
    quantization = Quantization("awq", ignored=ignored, targets=targets)
    assert quantization.covers("model.layers.1.mlp.down_proj") is covered


def test_what_lies_on_a_device() -> None:
    """A CPU and float32 hold weights dequantised; FP8 needs tensor cores that know it."""

    def on(q: Quantization, gpu: bool = True, has_fp8: bool = True, itemsize: int = 2) -> str:
        return q.on(gpu=gpu, has_fp8=has_fp8, itemsize=itemsize).placement

    assert on(AWQ) == on(AWQ, has_fp8=False) == on(FP8) == "packed"
    assert on(FP8, has_fp8=False) == on(Quantization("fp8", activations="none")) == "weight_only"
    assert on(AWQ, gpu=False) == on(FP8, itemsize=4) == "dense"
    assert on(choose_quantization("none", AWQ, "m")) == "dense"
    assert choose_quantization("fp8", NONE, "m").at_load
    assert choose_quantization("auto", AWQ, "m") == choose_quantization("awq", AWQ, "m") == AWQ

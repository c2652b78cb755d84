"""Quantised bytes, cards and lower bounds against computed reference figures."""

import pytest

from multilora_cli.errors import BadInput, ModelError
from multilora_cli.sizing.bound import (
    break_even,
    decode_bound,
    load_seconds,
    prefill_seconds,
)
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import geometry_from_config
from multilora_cli.sizing.hardware import GPUS, find_gpu, match_gpu
from multilora_cli.sizing.quantization import AWQ, FP8, NONE, Quantization
from multilora_cli.sizing.quantization_config import read_quantization

LLAMA3_8B = geometry_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16",
    },
    "config.json",
)  # fmt: skip
QKVO, ALL = 27_262_976, 83_886_080


@pytest.mark.parametrize(("quantization", "resident_gb"), [(NONE, 16.06), (FP8, 9.08), (AWQ, 5.81)])
def test_resident_bytes_of_a_quantised_8b(quantization: Quantization, resident_gb: float) -> None:
    total = base_bytes(LLAMA3_8B, 2, quantization).total
    assert total / 1e9 == pytest.approx(resident_gb, abs=0.01)


@pytest.mark.parametrize(
    ("quantization", "adapter", "expected"),
    [(NONE, QKVO, 550), (NONE, ALL, 179), (FP8, ALL, 96), (AWQ, QKVO, 175), (AWQ, ALL, 57)],
)
def test_break_even(quantization: Quantization, adapter: int, expected: int) -> None:
    found = break_even(base_bytes(LLAMA3_8B, 2, quantization), adapter)
    assert found == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("quantization", "gpu", "batch", "adapter", "milliseconds"),
    [
        (AWQ, "h200", 1, 0, 1.14),
        (AWQ, "h200", 64, 0, 3.09),
        (AWQ, "h200", 64, ALL, 4.33),
        (NONE, "h200", 64, QKVO, 5.89),
        (FP8, "h200", 32, ALL, 3.49),
        (AWQ, "rtx-4090", 16, QKVO, 7.89),
    ],
)
def test_decode_bound(
    quantization: Quantization, gpu: str, batch: int, adapter: int, milliseconds: float
) -> None:
    base = base_bytes(LLAMA3_8B, 2, quantization)
    adapters = [adapter] * batch if adapter else []
    bound = decode_bound(base, 131_072, [1024] * batch, adapters, find_gpu(gpu))
    assert bound.seconds * 1000 == pytest.approx(milliseconds, rel=0.01)


def test_prefill_and_load_times() -> None:
    h200 = find_gpu("h200")
    assert prefill_seconds(LLAMA3_8B, 1024, h200, fp8=False) == pytest.approx(0.0246, rel=0.02)
    half = prefill_seconds(LLAMA3_8B, 1024, h200, fp8=True)
    assert half == pytest.approx(0.0123, rel=0.02)
    assert load_seconds(QKVO, find_gpu("rtx-4090")) * 1000 == pytest.approx(1.09, rel=0.01)


@pytest.mark.parametrize("name", ["RTX_4090", "nvidia geforce rtx 4090", "4090", "rtx-4090"])
def test_cards_in_any_spelling(name: str) -> None:
    assert find_gpu(name).key == "rtx-4090"


def test_unknown_card_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean rtx-4090"):
        find_gpu("rtx-4099")
    with pytest.raises(BadInput) as caught:  # nothing is near: no guess
        find_gpu("nope")
    assert "did you mean" not in caught.value.message and "rtx-4090" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("driver", "memory", "key"),
    [
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 40536, "a100-40"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
    ],
)
def test_cards_by_the_drivers_name(driver: str, memory: int, key: str) -> None:
    gpu = match_gpu(driver, memory)
    assert (gpu.key, gpu.memory_mib) == (key, memory)


def test_every_card_has_its_source_and_sane_figures() -> None:
    assert len({gpu.key for gpu in GPUS}) == len(GPUS) >= 14
    for gpu in GPUS:
        assert gpu.source and gpu.memory_mib > 20_000
        assert gpu.fp8_tflops is None or gpu.fp8_tflops == pytest.approx(
            2 * gpu.bf16_tflops, rel=0.05
        )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, NONE),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, Quantization("awq", 64)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, Quantization("awq", -1)),
        ({"quant_method": "fbgemm_fp8"}, FP8),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            Quantization("fp8", granularity="block"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"type": "int", "num_bits": 4, "strategy": "group",
                                    "group_size": 128, "symmetric": True}
                    }
                },
            },
            Quantization("awq", 128, zero_point=False, layout="compressed"),
        ),
    ],
)  # fmt: skip
def test_quantization_configs(config, expected: Quantization) -> None:
    assert read_quantization(config, "config.json") == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "awq", "bits": 3}, "bits: found 3"),
        ({"quant_method": "awq", "group_size": 48}, "group_size: found 48"),
        ({"quant_method": "awq", "version": "gemv"}, "found 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "found 0 groups"),
    ],
)
def test_unread_formats_are_refused_by_name(config, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_quantization(config, "config.json")

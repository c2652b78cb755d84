"""Rotary frequencies against transformers, and the lengths they are defined for."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from multilora_cli.layers.rotary import (
    Rotary,
    inverse_frequencies,
)
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config
from multilora_kernels.rope_store_kv import rotate_ref

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn with all fields": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}


def configs(variant: str, **changes: Any) -> tuple[Any, ModelGeometry]:
    """transformers' config and our geometry of the same model."""
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 10000.0, **VARIANTS[variant]},
        architectures=["LlamaForCausalLM"],
        **changes,
    )
    return config, geometry_from_config(config.to_dict(), "config.json")


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_equal_transformers(variant: str) -> None:
    """Frequencies, scale of cos and sin, and a rotation at far positions."""
    config, geometry = configs(variant)
    theirs = LlamaRotaryEmbedding(config)
    found = inverse_frequencies(geometry.rope, geometry.head_dim)
    assert torch.allclose(found, theirs.inv_freq, rtol=2e-6, atol=0)
    rotary = Rotary(geometry.rope, geometry.head_dim, torch.device("cpu"))
    assert rotary.scale == pytest.approx(theirs.attention_scaling)
    positions = torch.tensor([0, 1, 7, 100, 1000])
    q, k = torch.randn(2, 5, 3, 128, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    ours = rotate_ref(q, *rotary.tables(positions)), rotate_ref(k, *rotary.tables(positions))
    for left, right in zip(ours, expected, strict=True):
        assert torch.allclose(left, right[0], atol=2e-3)
    assert torch.allclose(ours[0][:3], expected[0][0, :3], atol=1e-5)


def test_rotation_depends_on_distance_alone() -> None:
    """q at p and k at p - d have the product they have at d and 0; norms are kept."""
    _, geometry = configs("default")
    rotary = Rotary(geometry.rope, geometry.head_dim, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 128, generator=torch.Generator().manual_seed(1))

    def product(p: int, distance: int) -> float:
        at_p = rotate_ref(q, *rotary.tables(torch.tensor([p])))
        before = rotate_ref(k, *rotary.tables(torch.tensor([p - distance])))
        return float((at_p * before).sum())

    assert product(5, 5) == pytest.approx(product(905, 5), abs=1e-3)
    assert product(5, 5) != pytest.approx(product(905, 9), abs=1e-1)
    turned = rotate_ref(q, *rotary.tables(torch.tensor([4321])))
    assert float(turned.norm()) == pytest.approx(float(q.norm()), rel=1e-5)


def test_bf16_is_rotated_in_fp32() -> None:
    """One rounding at the end, so that far positions do not lose their angle."""
    _, geometry = configs("default")
    tables = Rotary(geometry.rope, geometry.head_dim, torch.device("cpu")).tables(
        torch.tensor([100_001])
    )
    q = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    turned = rotate_ref(q, *tables)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate_ref(q.float(), *tables).bfloat16())


def test_dynamic_does_not_depend_on_the_batch() -> None:
    """Within the trained length it is the default, as in transformers."""
    _, geometry = configs("dynamic")
    _, default = configs("default")
    default_theta = torch.equal(
        inverse_frequencies(geometry.rope, 128),
        1.0 / 10000.0 ** (torch.arange(0, 128, 2).float() / 128),
    )
    assert default_theta and geometry.rope.theta != default.rope.theta

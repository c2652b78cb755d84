"""Bases and adapters shared by the adapter tests; tests edit copies."""

from pathlib import Path

import pytest

from tests.signature import SEVEN, peft_adapter, tiny_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F1: a tiny random Llama, hidden 64, two layers."""
    return tiny_base(tmp_path_factory.mktemp("base"), tokenizer=False)


@pytest.fixture(scope="session")
def seven(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on all seven projections: r 4, alpha 8."""
    path = tmp_path_factory.mktemp("seven")
    return peft_adapter(base, path, r=4, lora_alpha=8, target_modules=list(SEVEN))


@pytest.fixture(scope="session")
def attention(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on q_proj and v_proj: r 8, alpha 16."""
    return peft_adapter(base, tmp_path_factory.mktemp("attention"), seed=3)

"""Norms, weights and heads on their own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from multilora_cli.layers.embedding import Embedding, Head
from multilora_cli.layers.linear import DenseWeight
from multilora_cli.layers.norm import RMSNorm

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_rounds_as_transformers(dtype: torch.dtype) -> None:
    """Bit by bit: the statistic in fp32, the cast before the weight."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 3, 64, generator=generator) * 5).to(dtype)
    ours, theirs = RMSNorm(64, 1e-5, dtype, CPU), LlamaRMSNorm(64, 1e-5).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)
    ours.weight.copy_(weight)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours(x[:, 1:2]), theirs(x[:, 1:2]))  # strided, as packed q is


def test_dense_weight() -> None:
    """matmul multiplies by the transposed matrix that dequantise gives."""
    weight = DenseWeight.empty(6, 4, torch.float32, CPU)
    weight.tensor.copy_(torch.arange(24.0).view(6, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(weight.matmul(x), x @ weight.dequantise().T)
    assert weight.nbytes == 96


def test_a_tied_head_shares_the_table() -> None:
    """No second copy: what is written to the embedding is what the head multiplies by."""
    embedding = Embedding(10, 4, torch.bfloat16, CPU)
    embedding.weight.copy_(torch.eye(10, 4))
    logits = Head.tied(embedding)(embedding(torch.tensor([2])))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]

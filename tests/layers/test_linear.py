"""Norms, weights and heads on their own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from multilora_cli.layers.embedding import Embedding, Head
from multilora_cli.layers.linear import DenseWeight
from multilora_cli.layers.norm import RMSNorm
from multilora_kernels.fp8_quant import RowScaling, quantise_rows
from multilora_kernels.rows import Rows, gated_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_rounds_as_transformers(dtype: torch.dtype) -> None:
    """Bit by bit: the statistic in fp32, the cast before the weight."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 64, generator=generator) * 5).to(dtype)
    ours, theirs = RMSNorm(64, 1e-5, dtype, CPU), LlamaRMSNorm(64, 1e-5).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)
    ours.weight.copy_(weight)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        residual = torch.randn(7, 64, generator=generator).to(dtype)
        expected = theirs(residual + x)
        rows = ours(x, residual)
        assert torch.equal(rows.x, expected) and rows.fp8 is None
        assert rows.x is x
        assert torch.equal(theirs(residual), expected)  # the stream holds the sum


def test_dense_weight() -> None:
    """matmul multiplies by the transposed matrix that dequantise gives."""
    weight = DenseWeight.empty(6, 4, torch.float32, CPU)
    weight.tensor.copy_(torch.arange(24.0).view(6, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(weight.matmul(Rows(x)), x @ weight.dequantise().T)
    assert weight.nbytes == 96


def test_a_tied_head_shares_the_table() -> None:
    """No second copy: what is written to the embedding is what the head multiplies by."""
    embedding = Embedding(10, 4, torch.bfloat16, CPU)
    embedding.weight.copy_(torch.eye(10, 4))
    logits = Head(embedding.weight)(embedding(torch.tensor([2]), None), None)
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("group", [0, 128])
def test_rows_are_quantised_as_the_next_weight_asks(group: int) -> None:
    """By the norm and by SwiGLU, beside what they give without it."""
    generator = torch.Generator().manual_seed(2)
    scaling = RowScaling(group, upper_bound=2.0)
    norm = RMSNorm(256, 1e-5, torch.float32, CPU)
    x, residual = torch.randn(2, 4, 256, generator=generator)
    for plain, rows in (
        (norm(x.clone(), residual.clone()), norm(x.clone(), residual.clone(), scaling)),
        (gated_rows(x, None), gated_rows(x, scaling)),
    ):
        assert plain.fp8 is None and rows.fp8 is not None
        assert torch.equal(rows.x, plain.x)
        q, scale = quantise_rows(plain.x, scaling)
        assert torch.equal(rows.fp8[0].float(), q.float()) and torch.equal(rows.fp8[1], scale)

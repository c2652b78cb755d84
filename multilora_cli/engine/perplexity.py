"""How well a base predicts a text: exp of the mean negative log-probability of its tokens."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from multilora_cli.engine.device_memory import choose_device, choose_dtype, choose_kv_dtype
from multilora_cli.errors import BadInput
from multilora_cli.layers.context import StepContext
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.loader import load_decoder
from multilora_cli.progress import Report
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.pages import kv_page_bytes, pages_for_tokens
from multilora_kernels.attention_batch import AttentionBatch

WINDOW = 512  # tokens: each is predicted from those before it in its window
# Logits are taken in slices: 128 rows of a vocabulary of 128k are 67 MB in float32.
_ROWS = 128


def base_perplexity(
    folder: Path,
    tokens: Sequence[int],
    report: Report,
    kv_cache_dtype: str = "auto",
) -> float:
    """The perplexity of the base in `folder`, loaded as it would be served. Raises MloraError.

    `kv_cache_dtype` is auto or fp8, as in a fleet file.
    """
    geometry, device = read_geometry(folder), choose_device("auto")
    if len(tokens) < 2 or max(tokens) >= geometry.vocab_size:
        raise BadInput(f"the text has {len(tokens)} tokens of this model, expected at least 2")
    decoder = load_decoder(folder, geometry, device, choose_dtype("auto", device), report)
    return perplexity(decoder, tokens, report, choose_kv_dtype(kv_cache_dtype, decoder.dtype))


@torch.inference_mode()
def perplexity(
    decoder: Decoder,
    tokens: Sequence[int],
    report: Report,
    kv_dtype: torch.dtype,
) -> float:
    """exp of the mean negative log-probability of `tokens`, in windows of `WINDOW`.

    K and V go through the pool in `kv_dtype`, also within a window.
    """
    pool = torch.zeros(
        pages_for_tokens(WINDOW),
        kv_page_bytes(decoder.geometry, kv_dtype.itemsize),
        dtype=torch.uint8,
        device=decoder.device,
    )
    loss, count = 0.0, 0
    for start in range(0, len(tokens) - 1, WINDOW):
        window = torch.tensor(tokens[start : start + WINDOW + 1], device=decoder.device)
        hidden = _hidden(decoder, window[:-1], pool, kv_dtype)
        for row in range(0, len(hidden), _ROWS):
            logits = decoder.logits(hidden[row : row + _ROWS])
            targets = window[row + 1 : row + 1 + len(logits)]
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(hidden)
        report("text", count, len(tokens) - 1)
    return math.exp(loss / count)


def _hidden(
    decoder: Decoder, ids: torch.Tensor, pool: torch.Tensor, kv_dtype: torch.dtype
) -> torch.Tensor:
    """Hidden states of one sequence from its start."""
    size, device = len(ids), ids.device
    pages = pages_for_tokens(size)
    positions = torch.arange(size, device=device)
    attention = AttentionBatch(
        query_start=torch.tensor([0, size], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([size], dtype=torch.int32, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        num_decodes=int(size == 1),
        max_query_len=size,
        max_seq_len=size,
    )
    ctx = StepContext(pool, positions, attention, kv_dtype=kv_dtype)
    return decoder.forward(ids, positions, ctx)

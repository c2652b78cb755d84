"""Perplexity against transformers' own log-probabilities."""

import math
from pathlib import Path

import pytest
import torch

from multilora_cli.engine.perplexity import WINDOW, base_perplexity
from multilora_cli.errors import BadInput
from tests.models import tiny
from tests.models.harness import random_prompts


@pytest.mark.parametrize("length", [2, 40, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 200])
def test_mean_of_every_token(tmp_path: Path, length: int) -> None:
    """Whole windows, a window of one token, a rest; each token counts once."""
    model = tiny.make_model("llama", max_position_embeddings=2048)
    folder = tiny.save_model(model, tmp_path)
    tokens = random_prompts([length], tiny.VOCAB, seed=length)[0]
    losses = []
    for start in range(0, length - 1, WINDOW):
        window = torch.tensor(tokens[start : start + WINDOW + 1])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    expected = math.exp(float(torch.cat(losses).mean()))
    assert len(torch.cat(losses)) == length - 1
    done: list[tuple[str, int, int]] = []
    found = base_perplexity(folder, tokens, lambda *report: done.append(report))
    assert found == pytest.approx(expected, rel=1e-4)
    assert done[-1] == ("text", length - 1, length - 1)


def test_a_kv_cache_in_fp8(tmp_path: Path) -> None:
    """Rounded keys and values move it, a little."""
    model = tiny.make_model("llama", gain=0.7)
    folder = tiny.save_model(model, tmp_path)
    tokens = random_prompts([200], tiny.VOCAB)[0]
    plain, rounded = (
        base_perplexity(folder, tokens, lambda *report: None, kv) for kv in ("auto", "fp8")
    )
    assert 1e-6 < abs(rounded / plain - 1) < 0.05


def test_too_short_a_text(tmp_path: Path) -> None:
    folder = tiny.save_model(tiny.make_model("llama"), tmp_path)
    with pytest.raises(BadInput, match="1 tokens"):
        base_perplexity(folder, [5], lambda *report: None)

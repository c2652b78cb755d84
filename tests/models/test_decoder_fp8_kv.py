"""KV in FP8 through whole models: transformers with a cache that rounds as ours does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from multilora_kernels.kv_pages import FP8, to_kv
from tests.models import tiny
from tests.models.harness import (
    Chunker,
    PagedRunner,
    Row,
    chunks_of,
    log_probability_gap,
    one_by_one,
    prefill_then_decode,
    random_prompts,
    whole,
)

LENGTHS = [1, 17, 50]


class RoundedCache(DynamicCache):
    """Keys and values are e4m3 from the moment they are kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' own, of rounded states."""
        kept = (to_kv(states, FP8).to(states.dtype) for states in (key_states, value_states))
        return super().update(*kept, *rest, **named)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "chunker", [whole, one_by_one, chunks_of(7), prefill_then_decode(9)], ids=lambda c: c.__name__
)
def test_transformers_with_a_rounded_cache(tmp_path: Path, family: str, chunker: Chunker) -> None:
    """However a prompt is cut: what a token reads was rounded when it was written."""
    model = tiny.make_model(family)
    decoder = tiny.load(tiny.save_model(model, tmp_path))
    prompts = random_prompts(LENGTHS, tiny.VOCAB)
    ours = PagedRunner(decoder, kv_dtype=FP8).run([Row(p) for p in prompts], chunker)
    plain = PagedRunner(decoder).run([Row(p) for p in prompts], chunker)
    for prompt, logits, unrounded in zip(prompts, ours, plain, strict=True):
        with torch.no_grad():
            cache = RoundedCache(config=model.config)
            expected = model(torch.tensor([prompt]), past_key_values=cache).logits[0]
        # A key on the border of two codes may fall to either side by a bit of its rotation.
        # A key on the border of two codes may fall to either side by a bit of its rotation; none
        # of these does.
        assert log_probability_gap(logits, expected) < 1e-3
        assert log_probability_gap(logits, unrounded) > 0.1

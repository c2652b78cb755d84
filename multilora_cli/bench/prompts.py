"""Prompts of an exact length that no prefix cache has seen.

Token ids need no tokenizer at all, so an adapter's name never has to be one. They are drawn from
a range that every common vocabulary has as ordinary words; text and chat repeat short words of
one token each and leave the exact count to the server's usage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

PromptStyle = Literal["ids", "text", "chat"]
PATHS: Mapping[PromptStyle, str] = {
    "ids": "/v1/completions",
    "text": "/v1/completions",
    "chat": "/v1/chat/completions",
}

# Llama 2, 3 and Qwen keep bytes and special tokens outside of 300 to 999.
ID_RANGE = (300, 1000)
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with",
    "they", "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what",
    "all", "were", "when", "we", "there",
)  # fmt: skip


@dataclass(frozen=True)
class PromptMaker:
    """Bodies of requests; the same seed, draw, salt and index make the same prompt."""

    style: PromptStyle = "ids"
    seed: int = 0
    draw: int = 0  # of a run: what another run with this seed left in a server's cache is no prefix
    ignore_eos: bool = True
    id_range: tuple[int, int] = ID_RANGE  # upper bound exclusive

    def body(
        self, model: str, input_tokens: int, output_tokens: int, key: tuple[int, int]
    ) -> Mapping[str, Any]:
        """The body of one request; `key` (salt of the pass, index) makes its prompt its own."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
            # What comes after the end is mostly special tokens: without text, no chunk would
            # say that they came.
            body["skip_special_tokens"] = False
        rng = np.random.Generator(
            np.random.PCG64([self.seed, *key, *([self.draw] if self.draw else [])])
        )
        if self.style == "ids":
            body["prompt"] = rng.integers(*self.id_range, size=input_tokens).tolist()
            return body
        text = " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), size=input_tokens))
        if self.style == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        return body

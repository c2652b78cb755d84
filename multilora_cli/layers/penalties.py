"""Changes to single logits: bias, suppressed tokens, and penalties for what was said before.

In this order, before the temperature:

logit_bias          x += bias
suppressed          x = -inf            stop ids while a sequence is shorter than min_tokens
repetition_penalty  x / r for x > 0, x * r otherwise       tokens of the prompt or the output
frequency_penalty   x -= f * count                         tokens of the output
presence_penalty    x -= p                                 tokens of the output
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SparseLogits:
    """(row, token, value) triples to add to the logits; -inf suppresses."""

    rows: torch.Tensor  # int64 [N]
    tokens: torch.Tensor  # int64 [N]
    values: torch.Tensor  # float32 [N]

    def add_to(self, logits: torch.Tensor) -> None:
        """Add in place to float32 [R, V]; repeated pairs add up."""
        logits.index_put_((self.rows, self.tokens), self.values, accumulate=True)


@dataclass(frozen=True)
class Penalties:
    """The penalised rows and their histories, flattened: one entry per token that was said."""

    rows: torch.Tensor  # int64 [P]
    repetition: torch.Tensor  # float32 [P, 1]
    frequency: torch.Tensor  # float32 [P, 1]
    presence: torch.Tensor  # float32 [P, 1]
    prompt: tuple[torch.Tensor, torch.Tensor]  # int64 [N]: index into rows, token
    output: tuple[torch.Tensor, torch.Tensor]

    def apply_to(self, logits: torch.Tensor) -> None:
        """Penalise in place float32 [R, V]."""
        x = logits[self.rows]
        counts = torch.zeros_like(x)
        counts.index_put_(self.output, counts.new_ones(1), accumulate=True)
        seen = counts > 0
        seen_anywhere = seen.clone()
        seen_anywhere[self.prompt] = True
        repeated = torch.where(x > 0, x / self.repetition, x * self.repetition)
        x = torch.where(seen_anywhere, repeated, x)
        x -= self.frequency * counts
        x -= self.presence * seen
        logits[self.rows] = x

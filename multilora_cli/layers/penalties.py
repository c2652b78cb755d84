"""Changes to single logits: bias, suppressed tokens, and penalties for what was said before.

In this order, before the temperature:

logit_bias          x += bias
suppressed          x = -inf            stop ids while a sequence is shorter than min_tokens
penalties           multilora_kernels.penalise
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
        """Add in place to contiguous float32 [R, V]; repeated pairs add up.

        A pair occurs at most twice, a bias and a suppression, so no order of sums shows.
        """
        logits.view(-1).index_add_(0, self.rows * logits.shape[1] + self.tokens, self.values)

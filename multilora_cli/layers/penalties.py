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
    """Values to add to single logits; -inf suppresses."""

    places: torch.Tensor  # int64 [N], row * V + token
    values: torch.Tensor  # float32 [N]

    def add_to(self, logits: torch.Tensor) -> None:
        """Add in place to contiguous float32 [R, V]; equal places add up.

        A place occurs at most twice, with a bias and a suppression: no order of sums shows.
        """
        logits.view(-1).index_add_(0, self.places, self.values)

"""Token embedding and the head that turns hidden states into logits, adapters written in."""

import torch
import torch.nn.functional as F

from multilora_cli.layers.context import RowAdapters
from multilora_kernels.bf16_gemv import bf16_gemv
from multilora_kernels.edge_lora import embed_lora, head_lora


class Embedding:
    """Rows of a [vocab, hidden] table by token id."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab, hidden, dtype=dtype, device=device)

    def __call__(self, token_ids: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """token_ids int64 [T] in [0, vocab); returns [T, hidden]."""
        x = F.embedding(token_ids, self.weight)
        if adapters is not None and adapters.segments.has_adapters:
            embed_lora(x, token_ids, adapters.pool, adapters.table, adapters.segments)
        return x


class Head:
    """Logits of hidden states; a tied head is given the embedding table itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        """`weight` is [vocab, hidden] in the compute dtype."""
        self.weight = weight

    def __call__(
        self,
        hidden: torch.Tensor,
        adapters: RowAdapters | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [R, hidden]; returns float32 [R, vocab], in `out` where it is given."""
        logits = bf16_gemv(hidden, self.weight, torch.float32, out)
        if adapters is not None and adapters.segments.has_adapters:
            head_lora(logits, hidden, adapters.pool, adapters.table, adapters.segments)
        return logits

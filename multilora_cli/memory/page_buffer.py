"""The bytes of the pool on the device."""

from collections.abc import Sequence

import torch

_POISON = 0xFF  # all ones is NaN in bf16, fp16, fp32 and fp8 e4m3


class PageBuffer:
    """The device tensor `pages`, uint8 [num_pages, page_bytes]."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        # Never read before it is written, and not touched here: a CPU pays for pages it uses.
        self.pages = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.pages.numel()

    def poison_all(self) -> None:
        """Fill the whole pool with NaN, page 0 included."""
        self.pages.fill_(_POISON)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill `pages` with NaN before anybody else may write them."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.pages.device)
        self.pages.index_fill_(0, index, _POISON)
        if self.pages.is_cuda:  # a debug run: the copy stream must not overtake this
            torch.cuda.current_stream(self.pages.device).synchronize()

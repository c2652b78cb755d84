"""Copies of warm images into pool pages, beside the running steps."""

from collections.abc import Sequence

import torch

from multilora_cli.adapters.hot_tier import Image
from multilora_cli.engine.fence import Fence, Passed, StreamFence


class PageCopier:
    """Copies page by page: on a CPU at once, on CUDA on a stream of its own.

    The pages come from the free list, so no launched step reads them any more and the copy stream
    waits for nobody. The caller holds the image until the copy is done.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None
        if pool.is_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def start(self, image: Image, pages: Sequence[int]) -> Fence:
        """Start the copy of image page i to pool page pages[i]."""
        if self._stream is None:
            self._pool[torch.tensor(pages)] = image.pages
            return Passed()
        with torch.cuda.stream(self._stream):
            for start, length in _runs(pages):
                target = self._pool[pages[start] : pages[start] + length]
                target.copy_(image.pages[start : start + length], non_blocking=True)
        return StreamFence(self._stream)


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(index, length) of every run of neighbouring pages: one copy each."""
    runs: list[tuple[int, int]] = []
    for index, page in enumerate(pages):
        if runs and page == pages[index - 1] + 1:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs

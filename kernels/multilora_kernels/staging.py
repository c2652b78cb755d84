"""Host to device copies in stream order, through two pinned buffers used in turn."""

import numpy as np
import numpy.typing as npt
import torch


class Staging:
    """Uploads small host arrays so that the source may change as soon as `upload` returns.

    On a CUDA device a copy is asynchronous; a pinned buffer is refilled only after the copy that
    read it two uploads ago has finished. On a CPU it is a plain copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def upload(self, destination: torch.Tensor, source: npt.NDArray[np.generic]) -> None:
        """Copy `source` to the contiguous tensor `destination` of as many bytes."""
        flat = torch.from_numpy(np.ascontiguousarray(source).reshape(-1).view(np.uint8))
        target = destination.view(-1).view(torch.uint8)
        assert target.numel() == flat.numel()
        if not self._is_cuda:
            target.copy_(flat)
            return
        self._turn ^= 1
        pinned = self._pinned(flat.numel())
        pinned.copy_(flat)
        target.copy_(pinned, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(destination.device))
        self._copied[self._turn] = event

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        """The buffer whose turn it is, once its last copy is done, at least `num_bytes` long."""
        last = self._copied[self._turn]
        if last is not None:
            last.synchronize()
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < num_bytes:
            size = 1 << max(12, (num_bytes - 1).bit_length())
            # One that is made in inference mode could not be written outside of it, and uploads are
            # made in both.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._buffers[self._turn] = buffer
        return buffer[:num_bytes]

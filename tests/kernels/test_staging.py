"""Uploads through page-locked buffers, without a device: what is pinned there is plain memory."""

from typing import Any

import numpy as np
import pytest
import torch

from multilora_kernels import staging
from multilora_kernels.staging import Staging


class _Torch:
    """What staging asks of torch, for tensors on a CPU."""

    class cuda:
        """Events that have always passed."""

        class Event:
            def record(self, stream: object) -> None: ...
            def synchronize(self) -> None: ...

        @staticmethod
        def current_stream(device: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(size, **options)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Staging:
    monkeypatch.setattr(staging, "torch", _Torch())
    found = Staging(torch.device("cpu"))
    found._is_cuda = True
    return found


@pytest.mark.parametrize("modes", [(True, True, False, False), (False, False, True, True)])
def test_uploads_within_inference_mode_and_outside(
    pinned: Staging, modes: tuple[bool, ...]
) -> None:
    """A start runs its steps in inference mode, and adapters come between steps."""
    target = torch.zeros(3, dtype=torch.int64)
    for number, mode in enumerate(modes):
        values = np.arange(number, number + 3)
        with torch.inference_mode(mode):
            pinned.upload(target, values)
        assert target.tolist() == values.tolist()

"""An H200 that is only described: tensors without memory, and Triton told what it compiles for.

Whatever decides which kernels are launched and how they are specialised runs as on a device. None
is launched: `Launches` counts what would have been compiled, and keeps it from being.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from multilora_kernels import segments
from multilora_kernels.launch import H200, force_chip

DEVICE = torch.device("meta")


class _Driver:
    """What Triton asks about the device."""

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def described_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Kernels are chosen and compiled for an H200, launched on tensors of device "meta"."""
    monkeypatch.setattr(driver, "_active", _Driver())
    monkeypatch.setattr(segments, "_chip", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    force_chip(H200)
    yield DEVICE
    force_chip(None)


@contextmanager
def launches() -> Iterator[Counter[tuple[str, str]]]:
    """Counts the launches of every kernel that was not compiled before, by name and what it is
    specialised for. None of them is compiled or run."""
    found: Counter[tuple[str, str]] = Counter()

    def count(*, key: str, fn: Any, **_: object) -> bool:
        found[fn.name, key] += 1
        return True

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = count
        yield found

"""Which kernel tests run where: Triton's interpreter, plain CPU, or a device.

Triton reads TRITON_INTERPRET when it is imported, so tests marked `interpreter` run only in a
process that has it set (test_interpreter.py starts one per file), and nothing else runs there.
"""

import os

import pytest
import torch

from tests.kernels.checked_interpreter import check_launches, poison_memory

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    check_launches()
    poison_memory()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this process cannot run; skip device tests where there is no device."""
    here = [item for item in items if "tests/kernels/" in item.path.as_posix()]
    other = [
        item for item in here if (item.get_closest_marker("interpreter") is None) == INTERPRETED
    ]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]
    if not torch.cuda.is_available():
        for item in here:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

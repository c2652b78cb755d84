"""Servers on the deepened signature fleet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import RANKS, Served, start
from tests.signature import deep_adapter, deep_base


@pytest.fixture(scope="session")
def signature_fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet of deepened signature adapters; `{name}`'s answer is its own token repeated."""
    folder = tmp_path_factory.mktemp("fleet")
    deep_base(folder / "base")
    for index, (name, rank) in enumerate(RANKS.items()):
        deep_adapter(folder / "adapters" / name, 10 + index, r=rank)
    deep_adapter(folder / "spare" / "other", 90, r=16)
    fleet = folder / "fleet.yaml"
    fleet.write_text(
        "base: {model: ./base, name: counter, dtype: float32}\n"
        "memory: {device: cpu, device_bytes: 64MiB}\n"
        "limits: {max_num_seqs: 64, max_num_batched_tokens: 512}\n"
        "adapters: [{folder: ./adapters/*}]\n"
        "server: {port: 0, adapter_roots: [., ./adapters, ./spare], state_file: off}\n"
    )
    return fleet


@pytest.fixture
def served(signature_fleet: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of its own for one test, freed pages poisoned with NaN."""
    server = start(signature_fleet, "--poison", log=tmp_path / "log")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def shared(signature_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as they found it."""
    server = start(signature_fleet, "--poison", log=tmp_path_factory.mktemp("log") / "log")
    yield server
    assert server.stop() == 0, server.log.read_text()

"""Bases and adapters that the engine's tests share, built once a session."""

from pathlib import Path

import pytest

from multilora_cli.engine.messages import AdapterRef
from tests.engine.engine_kit import adapter_ref
from tests.signature import peft_adapter, signature_adapter, signature_base, tiny_base


class SignatureFleet:
    """The F2 base and adapters by signature; adapter k says k + 1 for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = signature_base(folder / "base")
        self._refs: dict[tuple[int, int], AdapterRef] = {}

    def adapter(self, signature: int, r: int = 4) -> AdapterRef:
        """The reference of one signature, of rank `r`."""
        if (signature, r) not in self._refs:
            folder = signature_adapter(self.folder / f"s{signature}-{r}", signature, r=r)
            self._refs[signature, r] = adapter_ref(self.base, folder, f"s{signature}")
        return self._refs[signature, r]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SignatureFleet:
    """F2."""
    return SignatureFleet(tmp_path_factory.mktemp("signature"))


class TinyFleet:
    """F1: a random base and adapters made by PEFT."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny_base(folder / "base", max_position_embeddings=4096)
        self.adapters = [
            adapter_ref(
                self.base,
                peft_adapter(self.base, folder / f"a{seed}", seed=seed, **how),
                f"a{seed}",
            )
            for seed, how in enumerate(
                (
                    {"r": 8, "target_modules": ["q_proj", "v_proj"]},
                    {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
                    {"r": 20, "target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj"]},
                )
            )
        ]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFleet:
    """F1."""
    return TinyFleet(tmp_path_factory.mktemp("tiny"))

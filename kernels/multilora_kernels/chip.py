"""What a launch choice may depend on: the chip, and tuned tables stored as data. Torch-free.

A launch choice is a pure function of shapes and a `Chip`; nothing is tuned while serving.
`tuned/<chip>.json` holds what `python -m multilora_kernels.bench --tune` measured on that chip.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

# Shared memory a block may use, bytes (CUDA programming guide, compute-capability table).
_SHARED_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}


@dataclass(frozen=True)
class Chip:
    """One kind of GPU, as far as a launch choice needs to know it."""

    name: str  # as the driver spells it, "NVIDIA H200"
    sm: int  # compute capability, 90 for 9.0
    num_sms: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory one block may use, in bytes; the smallest known where the chip is not."""
        return _SHARED_BYTES.get(self.sm, min(_SHARED_BYTES.values()))

    @property
    def has_pdl(self) -> bool:
        """Whether programmatic dependent launch exists (Hopper and newer)."""
        return self.sm >= 90

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores multiply FP8 (Ada and newer)."""
        return self.sm >= 89

    @property
    def key(self) -> str:
        """File name of this chip's tuned table."""
        return self.name.lower().removeprefix("nvidia ").replace(" ", "-")


# The stand-in for a card that is not here: its limits, so that its launch choices can be tested.
RTX_4090 = Chip("NVIDIA GeForce RTX 4090", 89, 128)
H200 = Chip("NVIDIA H200", 90, 132)


@lru_cache(maxsize=64)
def tuned_table(chip: Chip, op: str) -> dict[str, Any]:
    """The tuned entries of `op` on `chip`, shape key to choice; empty where nothing was tuned."""
    path = resources.files("multilora_kernels").joinpath(f"tuned/{chip.key}.json")
    if not path.is_file():
        return {}
    table: dict[str, Any] = json.loads(path.read_text())
    entries: dict[str, Any] = table.get(op, {})
    return entries

"""What a launch choice may depend on: the chip, and tuned tables stored as data.

A launch choice is a pure function of shapes and a `Chip`; nothing is tuned while serving.
`tuned/<chip>.json` holds what `python -m multilora_kernels.bench --tune` measured on that chip.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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

_forced: list[Chip] = []


def force_chip(chip: Chip | None) -> None:
    """Make every launch choice for `chip` instead of the device's own; None undoes it.

    Exists for tests and benchmarks that run one card's choices on another.
    """
    _forced.clear()
    chip_of.cache_clear()
    if chip is not None:
        _forced.append(chip)


@lru_cache(maxsize=16)
def chip_of(device_index: int) -> Chip:
    """The chip of CUDA device `device_index` (or the forced one)."""
    if _forced:
        return _forced[0]
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    return Chip(
        properties.name, properties.major * 10 + properties.minor, properties.multi_processor_count
    )


def chip_for(device: "torch.device") -> Chip:
    """The chip launches on `device` are chosen for; a small one for the interpreter's CPU."""
    return Chip("", 80, 4) if device.type == "cpu" else chip_of(device.index or 0)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes 4 us a call on the host, once or twice a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, a positive integer."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=64)
def tuned_table(chip: Chip, op: str) -> dict[str, Any]:
    """The tuned entries of `op` on `chip`, shape key to choice; empty where nothing was tuned."""
    path = resources.files("multilora_kernels").joinpath(f"tuned/{chip.key}.json")
    if not path.is_file():
        return {}
    table: dict[str, Any] = json.loads(path.read_text())
    entries: dict[str, Any] = table.get(op, {})
    return entries

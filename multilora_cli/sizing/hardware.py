"""Cards as data: memory, bandwidth, matrix rates, bus. Every figure with where it is from.

Rates are dense (no sparsity) with FP32 accumulation. Memory is what the driver reports, in MiB,
which is less than the box says.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from multilora_cli.errors import BadInput
from multilora_kernels.chip import Chip

# What a card's datasheet bandwidth yields in a streaming read: 4.3 of 4.8 TB/s on an H200 and
# 0.93 of 1.008 TB/s on an RTX 4090; 0.9 where nothing was measured.
_ACHIEVED = {"h200": 0.896, "h100-sxm": 0.896, "rtx-4090": 0.923}
_DEFAULT_ACHIEVED = 0.9

# Pinned host-to-device copies of 64 MiB and more, bytes/s: measured 55.2e9 on PCIe 5 x16 and
# 25e9 on PCIe 4 x16.
_PCIE_BYTES_S = {3: 12.5e9, 4: 25e9, 5: 55e9}


@dataclass(frozen=True)
class Gpu:
    """One kind of card."""

    key: str  # as --gpu spells it
    name: str
    memory_mib: int  # as the driver reports it
    bandwidth_gb_s: float  # datasheet, 1e9 bytes/s
    bf16_tflops: float  # dense
    fp8_tflops: float | None  # dense; None: the tensor cores have no FP8
    pcie: Literal[3, 4, 5]
    sm: int
    num_sms: int  # multiprocessors
    source: str

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return self.memory_mib * 2**20

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply in FP8."""
        return self.fp8_tflops is not None

    @property
    def read_bytes_s(self) -> float:
        """What a streaming read reaches, bytes/s."""
        return self.bandwidth_gb_s * 1e9 * _ACHIEVED.get(self.key, _DEFAULT_ACHIEVED)

    @property
    def chip(self) -> Chip:
        """As the kernels' launch choices know it."""
        return Chip(f"NVIDIA {self.name}", self.sm, self.num_sms)

    @property
    def pcie_bytes_s(self) -> float:
        """What a large pinned copy from host to device reaches, bytes/s."""
        return _PCIE_BYTES_S[self.pcie]


_SHEET = "NVIDIA {} datasheet; memory as the driver reports it"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, table 'full specifications'"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
GPUS: tuple[Gpu, ...] = (
    Gpu("rtx-3090", "GeForce RTX 3090", 24576, 936, 71, None, 4, 86, 82,
        "NVIDIA Ampere GA102 whitepaper, appendix A"),
    Gpu("rtx-4090", "GeForce RTX 4090", 24564, 1008, 165.2, 330.3, 4, 89, 128, _ADA),
    Gpu("rtx-5090", "GeForce RTX 5090", 32607, 1792, 209.5, 419, 5, 120, 170, _BLACKWELL),
    Gpu("a10", "A10", 23028, 600, 125, None, 4, 86, 72, _SHEET.format("A10")),
    Gpu("l4", "L4", 23034, 300, 121, 242.5, 4, 89, 58, _SHEET.format("L4")),
    Gpu("l40s", "L40S", 46068, 864, 362, 733, 4, 89, 142, _SHEET.format("L40S")),
    Gpu("a100-40", "A100 40GB", 40960, 1555, 312, None, 4, 80, 108, _SHEET.format("A100")),
    Gpu("a100-80", "A100 80GB SXM", 81920, 2039, 312, None, 4, 80, 108, _SHEET.format("A100")),
    Gpu("h100-sxm", "H100 SXM", 81559, 3350, 989, 1979, 5, 90, 132, _SHEET.format("H100")),
    Gpu("h100-pcie", "H100 PCIe", 81559, 2000, 756, 1513, 5, 90, 114, _SHEET.format("H100")),
    Gpu("h200", "H200", 143771, 4800, 989, 1979, 5, 90, 132, _SHEET.format("H200")),
    Gpu("b200", "B200", 183359, 8000, 2250, 4500, 5, 100, 148, _SHEET.format("HGX B200")),
    Gpu("rtx-6000-ada", "RTX 6000 Ada", 49140, 960, 364.2, 728.5, 4, 89, 142,
        _SHEET.format("RTX 6000 Ada")),
    Gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell", 97887, 1792, 503.8, 1007.6, 5, 120, 188,
        _SHEET.format("RTX PRO 6000 Blackwell")),
)  # fmt: skip
_ALIASES = {"h100": "h100-sxm", "a100": "a100-80", "4090": "rtx-4090", "3090": "rtx-3090",
            "5090": "rtx-5090", "rtx-6000-blackwell": "rtx-pro-6000"}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The card called `name` in any common spelling. Raises BadInput with the nearest name."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    for prefix in ("nvidia-", "geforce-"):
        key = key.removeprefix(prefix)
    key = _ALIASES.get(key, key)
    for gpu in GPUS:
        if gpu.key == key:
            return gpu
    near = difflib.get_close_matches(key, [gpu.key for gpu in GPUS], n=1, cutoff=0.6)
    known = ", ".join(gpu.key for gpu in GPUS)
    raise BadInput(
        f"--gpu {name}: not a known card" + (f"; did you mean {near[0]}?" if near else ""),
        hint=f"known: {known}; or give --gpu-memory and the nearest card",
    )


def local_cards() -> list[tuple[str, int]]:
    """Name and memory (MiB) of every card here, by NVML; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_described(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _described(index: int) -> tuple[str, int]:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return name.decode() if isinstance(name, bytes) else str(name), memory // 2**20


def local_card() -> tuple[str, int] | None:
    """Name and memory (MiB) of the first card here; None where there is none."""
    return next(iter(local_cards()), None)


def local_gpu() -> Gpu | None:
    """The table's card for the first one in this machine. Raises BadInput where it is unknown."""
    found = local_card()
    return None if found is None else match_gpu(*found)


def rated_gpu(device: str) -> Gpu | None:
    """This machine's card for what runs on `device`; None on a CPU, and for a card whose rates are
    not in the table."""
    try:
        return None if device == "cpu" else local_gpu()
    except BadInput:
        return None


def match_gpu(name: str, memory_mib: int) -> Gpu:
    """The table's card for a driver's `name`, with the memory found. Raises BadInput."""
    text = name.lower().replace("-", " ")
    known = [gpu for gpu in GPUS if all(word in text for word in gpu.key.split("-")[:2])]
    known = known or [gpu for gpu in GPUS if gpu.key.split("-")[0] in text.split()]
    if not known:
        raise BadInput(
            f"the card in this machine, {name!r}, is not in the table",
            hint="name the nearest one: --gpu NAME --gpu-memory SIZE",
        )
    nearest = min(known, key=lambda gpu: abs(gpu.memory_mib - memory_mib))
    return replace(nearest, memory_mib=memory_mib)

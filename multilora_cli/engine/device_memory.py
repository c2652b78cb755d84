"""How much of the device the engine takes, and how it is cut: the numbers of sizing/budget."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from multilora_cli.engine.config import EngineConfig
from multilora_cli.errors import BadInput, Refused
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.sizing.budget import MemoryPlan, PromptStep
from multilora_cli.sizing.device import StepSizes, cut_device
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.host_memory import cpu_pool_bytes, free_host_bytes
from multilora_cli.sizing.quantization import Quantization
from multilora_cli.units import format_size
from multilora_kernels.kv_pages import FP8
from multilora_kernels.launch import chip_of

_log = logging.getLogger(__name__)
_CUDA_MARGIN = 256 * 2**20  # the context grows by 234 MiB once kernels are loaded (budget)
_DRIVER = Path("/proc/driver/nvidia/version")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Allocation:
    """What will be allocated. `max_blocks` is the adapter table's capacity."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    plan: MemoryPlan
    max_blocks: int
    quantization: Quantization  # of the base's linears, as they lie on the device
    graph_rows: tuple[int, ...]  # decode steps that are captured; none on a CPU
    prompt_steps: tuple[PromptStep, ...]  # and steps with prompts
    most_rows: int  # token rows of the largest step, a captured one's spare rows included


def choose_device(name: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda:N`. Raises BadInput.

    `auto` is never a silent CPU: a driver that torch cannot use is an error.
    """
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda:0")
    if name == "auto":
        if _DRIVER.exists():
            driver = " ".join(_DRIVER.read_text().splitlines()[0].split()[-5:])
            raise BadInput(
                f"memory.device: torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use"
                f" the NVIDIA device of this machine; its driver is {driver}",
                hint="install a torch wheel for that driver, or set memory.device: cpu",
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"memory.device: found {name!r:.40}, expected auto, cpu or cuda:N") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise BadInput(
            f"memory.device: {name}: torch {torch.__version__} (CUDA {torch.version.cuda}) finds"
            " no CUDA device",
            hint="check the driver with nvidia-smi, or set memory.device: cpu",
        )
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise BadInput(
            f"memory.device: found {name}, this machine has cuda:0 to cuda:{count - 1}",
            hint="CUDA_VISIBLE_DEVICES renumbers what it names",
        )
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Make a CUDA device this thread's own, on which Triton launches and torch captures whatever
    the tensors say; the thread that does is the one that runs the steps."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def grow_segments(device: torch.device) -> None:
    """Let torch keep what tensors take in stretches that grow, rather than in separate pieces.

    Tensors of other sizes then find room in what steps left behind: without it the largest step of
    an 8B kept 29 % more than it had in use, and weights quantised at load 10 %. An allocator that
    the environment sets is left alone.
    """
    if device.type != "cuda" or any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        return
    _set_allocator("expandable_segments:True")
    try:
        torch.empty(2**25, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _log.warning("this device maps no memory in pieces, segments do not grow: %s", error)
        _set_allocator("expandable_segments:False")


def _set_allocator(settings: str) -> None:
    """As PYTORCH_ALLOC_CONF would; what torch has for it in torch.cuda warns of its end."""
    torch._C._accelerator_setAllocatorSettings(settings)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 on CUDA; float16 only when asked for."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """How K and V lie in the pool: `fp8` is e4m3 without a scale, `auto` the compute dtype."""
    return FP8 if name == "fp8" else dtype


def plan_memory(config: EngineConfig, geometry: ModelGeometry) -> Allocation:
    """Cut the device's memory into weights, workspace, tables and pool. Raises MloraError."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
    quantization = base_quantization(
        Path(config.model_path),
        geometry,
        config.quantization,
        from_files=config.load_format != "dummy",
    )
    quantization = placed(quantization, device, dtype)
    step = StepSizes(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_lora_rank,
        config.num_slots,
        config.max_model_len or geometry.max_position,
        chip=chip_of(device.index or 0) if device.type == "cuda" else None,
        captured=config.cuda_graphs,
        captured_prompts=config.capture_prompts,
    )
    pool, available = config.pool_bytes, None
    if pool is None and device.type == "cpu" and config.device_bytes is None:
        free = free_host_bytes()
        pool, available = cpu_pool_bytes(free), int(free * config.device_fraction)
    elif pool is None:
        available = _available(config, device)
    cut = cut_device(
        geometry,
        quantization,
        (dtype.itemsize, kv_dtype.itemsize),
        step,
        available=available,
        pool=pool,
    )
    return Allocation(
        device,
        dtype,
        kv_dtype,
        cut.plan,
        cut.max_blocks,
        quantization,
        step.graph_rows,
        step.prompt_steps,
        step.most_rows,
    )


def _available(config: EngineConfig, device: torch.device) -> int:
    """Bytes of the device that may be used. Raises Refused where they are not free."""
    if device.type == "cpu":
        return config.device_bytes or free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    if config.device_bytes is None:
        return min(int(total * config.device_fraction), free - _CUDA_MARGIN)
    if config.device_bytes > free:
        raise Refused(
            f"memory.device_bytes: {format_size(config.device_bytes)} asked for,"
            f" {format_size(free)} of {format_size(total)} are free",
            hint="another process holds the rest: see nvidia-smi",
        )
    return config.device_bytes

"""What the engine is told at its start, as one message."""

from typing import Literal

import msgspec

from multilora_cli.errors import BadInput


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process needs. Sizes in bytes, times in seconds.

    The pool takes `pool_bytes` where given; else what `device_bytes`, or `device_fraction` of the
    device, leaves beside weights, tables and workspace. On a CPU without either: the smaller of
    2 GiB and a quarter of the free memory.
    """

    model_path: str  # local folder in Hugging Face format
    model_name: str = "base"
    base_digest: str = ""  # part of every prefix-cache key; computed from the folder when empty
    device: str = "auto"  # auto | cpu | cuda:N
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: str = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None  # tokens of prompt and answer; None: the model's own
    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int = 8192  # token rows of one step
    # Prompt tokens of a step in which others decode: it bounds the gap between their tokens while a
    # long prompt arrives. 1,024 tokens of an 8B take about 30 ms on an H200; fewer would leave it
    # waiting for weights.
    max_chunk_beside_decode: int = 1024
    max_queue: int = 1024  # sequences that may wait
    max_lora_rank: int = 512
    max_loras: int | None = None  # distinct adapters among the running; None: as many as slots
    max_adapter_bytes: int | None = None  # of the distinct adapters that run at once; None: any
    fairness: Literal["tenant", "adapter", "none"] = "tenant"  # what takes turns when all wait
    num_slots: int = 65  # rows of the adapter table; row 0 is the base
    pool_bytes: int | None = None
    device_bytes: int | None = None
    device_fraction: float = 0.92
    host_adapter_bytes: int = 8 * 2**30  # warm images
    prefetch_bytes_per_s: int = 0  # of adapters that nobody waits for yet; 0: none
    kv_reserve: float = 0.25  # share of the pool that adapters may never take
    prefix_caching: bool = True
    check_adapter_values: bool = True  # refuse NaN, infinity and overflow in adapters
    adapter_wait_s: float = 2.0  # a sequence that waited longer for its adapter is not overtaken
    adapter_wait_limit_s: float = 60.0  # longer: the fault adapter_loading
    num_loaders: int = 2  # threads that read and convert adapters
    cuda_graphs: bool = True  # capture decode steps; CUDA only
    capture_prompts: bool = True  # also steps with chunks of prompts
    steps_ahead: int | None = None  # launched before the oldest is awaited; None: 1 on CUDA, else 0
    num_threads: int | None = None  # torch intra-op threads; None: the cores, at most 8
    debug: bool = False  # poison freed pages, audit owners after every step, allow failpoints
    failpoints: dict[str, str] = {}  # see engine/failpoints.py; refused without debug

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_chunk_beside_decode",
            "max_queue",
            "num_loaders",
        ):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: found {getattr(self, name)}, expected at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadInput(
                f"max_num_batched_tokens: found {self.max_num_batched_tokens}, expected at least"
                f" max_num_seqs ({self.max_num_seqs}): every running sequence decodes in each step"
            )
        if self.num_slots < 2:
            raise BadInput(f"num_slots: found {self.num_slots}, expected at least 2")
        if self.steps_ahead not in (None, 0, 1):
            raise BadInput(f"steps_ahead: found {self.steps_ahead}, expected 0 or 1")
        if not 0.0 <= self.kv_reserve < 1.0:
            raise BadInput(f"kv_reserve: found {self.kv_reserve}, expected from 0 to below 1")
        if not 0.0 < self.device_fraction <= 1.0:
            raise BadInput(f"device_fraction: found {self.device_fraction}, expected 0 to 1")
        if self.failpoints and not self.debug:
            raise BadInput("failpoints are for tests: they need debug")

    @property
    def distinct_adapters(self) -> int:
        """How many different adapters may run in one step."""
        slots = self.num_slots - 1
        return slots if self.max_loras is None else min(self.max_loras, slots)

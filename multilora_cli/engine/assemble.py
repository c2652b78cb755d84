"""Puts an engine together: reads the base, plans memory, allocates, connects the owners."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from multilora_cli.adapters.crew import Crew
from multilora_cli.adapters.host_cache import HostCache
from multilora_cli.adapters.hot_tier import HotTier
from multilora_cli.adapters.residency import Residency
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.batch import BatchBuilder
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.decode_graphs import DecodeGraphs, GraphMemory, rehearse
from multilora_cli.engine.device_memory import (
    Allocation,
    choose_device,
    grow_segments,
    plan_memory,
    use_device,
)
from multilora_cli.engine.device_meter import DeviceMeter
from multilora_cli.engine.engine import Engine, EngineParts
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.fair_order import FairOrder
from multilora_cli.engine.largest_step import largest_step, sample_every_way
from multilora_cli.engine.loader_threads import loader_threads, num_helpers
from multilora_cli.engine.messages import Ready
from multilora_cli.engine.model_runner import ModelRunner
from multilora_cli.engine.page_copier import PageCopier
from multilora_cli.engine.prompt_graphs import PromptGraphs
from multilora_cli.engine.scheduler import Limits, Scheduler
from multilora_cli.errors import BadInput
from multilora_cli.memory.eviction import EvictionRule, Evictor
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.page_buffer import PageBuffer
from multilora_cli.memory.page_pool import PagePool
from multilora_cli.memory.prefix_cache import BLOCK_TOKENS, PrefixCache
from multilora_cli.models.base_rows import BaseRows
from multilora_cli.models.checkpoint import base_digest
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.warm_up import warm_up
from multilora_cli.progress import Report, silent
from multilora_cli.sizing.budget import CONTEXT_BYTES, MAX_CHUNKS
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_kernels.compile_ahead import compile_only
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

Clock = Callable[[], float]
_THREADS_MAX = 8
_PINNED_AT_START = 2**30  # page-locking blocks the device; 1 GiB takes 0.6 s, before it serves


class _Assembly:
    """One start of the engine; each method adds owners that the next one needs."""

    def __init__(
        self, config: EngineConfig, geometry: ModelGeometry, report: Report, now: Clock
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.report = report
        self.now = now
        self.failpoints = Failpoints(config.failpoints)
        device = choose_device(config.device)
        self.meter = DeviceMeter(device)
        grow_segments(device)  # before CUDA is initialised
        use_device(device)
        self.allocation = plan_memory(config, geometry)
        self.max_model_len = _context(config, geometry, self.allocation)

    def load_base(self) -> Decoder:
        """The decoder, its weights on the device."""
        with self.meter.part("weights"):
            return load_decoder(
                Path(self.config.model_path),
                self.geometry,
                self.allocation.device,
                self.allocation.dtype,
                self.report,
                load_format=self.config.load_format,
                quantization=self.allocation.quantization,
            )

    def take_memory(self) -> None:
        """Pool, adapter table and the books over both."""
        plan, config = self.allocation.plan, self.config
        with self.meter.part("pool"):
            self.buffer = PageBuffer(plan.num_pages, plan.page_bytes, self.allocation.device)
        if config.debug:
            self.buffer.poison_all()
        poison = self.buffer.poison if config.debug else None
        self.pool = PagePool(plan.num_pages, plan.page_bytes, poison=poison)
        self.rule = EvictionRule()
        self.evictor = Evictor(self.pool, self.rule, config.kv_reserve)
        self.prefixes: PrefixCache | None = None
        if config.prefix_caching:
            self.prefixes = PrefixCache(self.pool, self.rule, self.now)
        self.kv = KVCache(self.pool, self.evictor, self.prefixes)
        with self.meter.part("tables"):
            self.table = AdapterTable(
                config.num_slots,
                self.geometry.num_layers,
                self.geometry.module_shapes,
                self.allocation.max_blocks,
                self.allocation.device,
            )

    def residency(self, loaders: ThreadPoolExecutor, decoder: Decoder) -> Residency:
        """Adapters: warm images in host memory, hot ones in the pool."""
        config, device = self.config, self.allocation.device
        page_bytes, dtype = self.pool.page_bytes, self.allocation.dtype
        base = self.base_rows = BaseRows(decoder)
        crew = Crew(loaders, num_helpers())
        reader = AdapterReader(
            config, self.geometry, page_bytes, base, dtype, self.failpoints, crew
        )
        warm = HostCache(config.host_adapter_bytes, reader.open, pin=device.type == "cuda")
        if device.type == "cuda":
            warm.prepare(min(config.host_adapter_bytes, _PINNED_AT_START))
        copier = PageCopier(self.buffer.pages)
        hot = HotTier(self.pool, self.evictor, self.table, copier, config.num_slots)
        residency = Residency(
            hot, warm, loaders, self.rule, self.now, config.num_loaders,
            config.prefetch_bytes_per_s,
        )  # fmt: skip
        self.evictor.attach(prefixes=self.prefixes, adapters=residency.idle)
        if self.prefixes is not None:
            residency.purge = self.prefixes.purge
        return residency

    def scheduler(self, residency: Residency) -> Scheduler:
        """The queues, within the limits of the config."""
        config = self.config
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_chunk_beside_decode=config.max_chunk_beside_decode,
            max_adapters=config.distinct_adapters,
            usable_pages=self.pool.usable,
            adapter_wait_s=config.adapter_wait_s,
            adapter_wait_limit_s=config.adapter_wait_limit_s,
            max_adapter_pages=_pages_within(config.max_adapter_bytes, self.pool.page_bytes),
            captured_chunks=tuple(sorted({step.tokens for step in self.allocation.prompt_steps})),
            captured_prompts=MAX_CHUNKS,
        )
        return Scheduler(limits, self.kv, residency, self.now, FairOrder(config.fairness))

    def runner(self, decoder: Decoder) -> ModelRunner:
        """What runs a step on the device; on CUDA with its decode steps captured."""
        config, device = self.config, self.allocation.device
        limits = (config.max_num_seqs, config.max_lora_rank)
        segments = Segments(self.allocation.most_rows, device, *limits)
        # One row may sample for all answers of a request, which all wait in the queue.
        most_samples = config.max_num_seqs + config.max_queue
        sampled = torch.zeros(most_samples, dtype=torch.int64, device=device)
        kv_dtype = self.allocation.kv_dtype
        self.builder = BatchBuilder(self.buffer.pages, self.table, segments, sampled, kv_dtype)
        graphs, prompt_graphs = self._make_graphs(decoder)
        if device.type == "cuda":
            self.table.settle(self.pool.page_bytes, self.allocation.dtype.itemsize)
            segments.reserve(self.table)
            with self.meter.part("workspace"), decoder.few_layers():  # what libraries get once
                self._compile(decoder)
                self._warm_up(decoder, self._report_steps)
                self.base_rows.warm_up()
        self.graph_memory: GraphMemory | None = None
        if self.graphs:
            memory = self.graph_memory = GraphMemory(device)
            for captured in self.graphs:
                captured.record_all(memory.record, self._report_graphs)
        # After the captures, which give back what torch keeps: what this leaves serves every step.
        with self.meter.peak("workspace"), decoder.few_layers():
            if device.type == "cuda":
                largest_step(
                    decoder, self.builder, config.max_num_batched_tokens, config.max_num_seqs
                )
        return ModelRunner(decoder, self.builder, self.failpoints, graphs, prompt_graphs)

    def _make_graphs(self, decoder: Decoder) -> tuple[DecodeGraphs | None, PromptGraphs | None]:
        """Decode steps, and those with prompts, as the plan says; none is captured yet."""
        self.graphs: list[DecodeGraphs | PromptGraphs] = []
        planned = self.allocation
        if not planned.graph_rows:
            return None, None
        limits = (self.max_model_len, self.config.max_lora_rank)
        graphs = DecodeGraphs(decoder, self.builder, planned.graph_rows, *limits)
        self.graphs.append(graphs)
        if not planned.prompt_steps:
            return graphs, None
        prompt_graphs = PromptGraphs(decoder, self.builder, planned.prompt_steps, *limits)
        self.graphs.append(prompt_graphs)
        return graphs, prompt_graphs

    def _compile(self, decoder: Decoder) -> None:
        """Every kernel that a step may launch, on all cores: nothing runs yet."""
        self.report("kernels", 0, 1)
        with compile_only():
            self._warm_up(decoder, lambda done, total: None)
            for graphs in self.graphs:
                graphs.record_all(rehearse, lambda done, total: None)
            vocab, sampled = self.geometry.vocab_size, self.builder.sampled
            logits = torch.zeros(1, vocab, device=sampled.device)
            sample_every_way(logits, sampled, logprobs=None)
        self.report("kernels", 1, 1)

    def _warm_up(self, decoder: Decoder, progress: Callable[[int, int], None]) -> None:
        warm_up(
            decoder,
            self.buffer.pages,
            self.config.max_num_batched_tokens,
            (self.table, self.builder.segments),
            self.allocation.kv_dtype,
            progress,
        )

    def _report_steps(self, done: int, total: int) -> None:
        self.report("steps", done, total)

    def _report_graphs(self, done: int, total: int) -> None:
        self.report("graphs", done, total)

    def ready(self, decoder: Decoder) -> Ready:
        """What was allocated, beside what was planned."""
        plan = self.allocation.plan
        return Ready(
            device=str(self.allocation.device),
            dtype=str(self.allocation.dtype).removeprefix("torch."),
            max_model_len=self.max_model_len,
            num_pages=plan.num_pages,
            page_bytes=plan.page_bytes,
            planned=plan.parts() | self._planned_outside(),
            allocated=self._allocated(decoder),
            notes=list(decoder.notes),
        )

    def _planned_outside(self) -> dict[str, int]:
        """What lies outside of what may be used: memory.device_fraction leaves room for it."""
        return {"context": CONTEXT_BYTES} if self.allocation.device.type == "cuda" else {}

    def _allocated(self, decoder: Decoder) -> dict[str, int]:
        """Bytes by part: the owners' own count, and on a card what the meter counted."""
        found = {
            "weights": decoder.weight_bytes,
            "pool": self.buffer.nbytes,
            "tables": self.table.nbytes,
        }
        if self.allocation.device.type != "cuda":
            return found
        found |= self.meter.parts
        found["lists"] = self.builder.segments.nbytes
        in_driver = 0
        if self.graph_memory is not None:
            memory, in_driver = self.graph_memory, self.graph_memory.driver_bytes
            found["graphs"] = sum(graphs.nbytes for graphs in self.graphs) + memory.pool_bytes
        found["margin"] = self.meter.kept - sum(found.values())
        if in_driver:
            found["graphs"] += in_driver
        outside = self.meter.outside()
        if outside is not None:
            found["context"] = outside - in_driver
        return found


def _pages_within(num_bytes: int | None, page_bytes: int) -> int | None:
    return None if num_bytes is None else num_bytes // page_bytes


def build_engine(
    config: EngineConfig, report: Report = silent, now: Clock = time.monotonic
) -> Engine:
    """An engine that is ready to step. Raises MloraError.

    `report` is called with phase, done and total while the base is read and memory is taken;
    `now` gives monotonic seconds.
    """
    torch.set_num_threads(config.num_threads or _default_threads())
    folder = Path(config.model_path)
    assembly = _Assembly(config, read_geometry(folder), report, now)
    decoder = assembly.load_base()
    report("pool", 0, 1)
    assembly.take_memory()
    report("pool", 1, 1)
    loaders = loader_threads(config.num_loaders + num_helpers(), assembly.allocation.device)
    residency = assembly.residency(loaders, decoder)
    runner = assembly.runner(decoder)
    return Engine(
        EngineParts(
            config=config,
            base_digest=config.base_digest or base_digest(folder, config.load_format),
            max_model_len=assembly.max_model_len,
            vocab_size=assembly.geometry.vocab_size,
            pool=assembly.pool,
            prefixes=assembly.prefixes,
            kv=assembly.kv,
            residency=residency,
            scheduler=assembly.scheduler(residency),
            runner=runner,
            ready=assembly.ready(decoder),
            failpoints=assembly.failpoints,
            now=now,
            loaders=loaders,
            steps_ahead=_steps_ahead(config, assembly.allocation),
            # A CPU would compute between two steps what its loader threads compute beside them.
            beside=assembly.base_rows.advance if decoder.device.type == "cuda" else None,
        )
    )


def _steps_ahead(config: EngineConfig, allocation: Allocation) -> int:
    """One on a CUDA device. A CPU runs a step within the call that launches it, so there a step
    ahead would only delay every token by one."""
    if config.steps_ahead is not None:
        return config.steps_ahead
    return 1 if allocation.device.type == "cuda" else 0


def _context(config: EngineConfig, geometry: ModelGeometry, allocation: Allocation) -> int:
    """Tokens of the longest sequence: what was asked for, or the model's own and what fits."""
    fits = (allocation.plan.num_pages - 1) * BLOCK_TOKENS
    asked = config.max_model_len
    if asked is None:
        return min(geometry.max_position, fits)
    if asked > geometry.max_position:
        raise BadInput(
            f"base.max_model_len: found {asked}, the model was trained for"
            f" {geometry.max_position} positions"
        )
    return asked


def _default_threads() -> int:
    """What OMP_NUM_THREADS says, else the cores, at most 8.

    Threads that wait for one another spin: on cores shared with other work two of them made a
    small model's step 6 to 10 times slower than one.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else min(len(os.sched_getaffinity(0)), _THREADS_MAX)

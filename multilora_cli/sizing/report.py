"""What fits and what it will cost: one fleet, one card, as a value that commands print."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from multilora_cli.errors import Refused
from multilora_cli.fleet.schema import Fleet
from multilora_cli.sizing.bound import break_even, decode_bound, load_seconds, prefill_seconds
from multilora_cli.sizing.budget import (
    CONTEXT_BYTES,
    BaseBytes,
    MemoryPlan,
    base_bytes,
    num_slots,
)
from multilora_cli.sizing.device import StepSizes, cut_device
from multilora_cli.sizing.efficiency import Step, measured, nearest
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.hardware import Gpu
from multilora_cli.sizing.host_slabs import images_that_fit
from multilora_cli.sizing.pages import (
    ATTENTION,
    TARGETS,
    AdapterCost,
    Ranks,
    adapter_cost,
    kv_page_bytes,
    pages_for_tokens,
    uniform_ranks,
)
from multilora_cli.sizing.quantization import Quantization
from multilora_cli.units import format_size
from multilora_kernels.layout import MODULES, NO_EXTRAS, TOKENS_PER_PAGE, Extras

SCHEMA = "mlora.plan/1"
RANKS = (8, 16, 32, 64, 128)
BATCHES = (1, 16, 64, 256)
CONTEXT = 1024  # tokens a row holds in the bounds that are printed


@dataclass(frozen=True)
class AdapterShape:
    """An adapter as planning knows it: its name, the rank of every module, and what is beside."""

    name: str
    ranks: Ranks
    base_model: str = ""
    pinned: bool = False
    extras: Extras = NO_EXTRAS
    edge_rank: int = 0  # the largest rank on embedding and head

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max([*self.ranks.values(), self.edge_rank])

    @property
    def modules(self) -> tuple[str, ...]:
        """The target modules, in the order of a layer."""
        present = {name for _, name in self.ranks}
        present |= {name.partition(".")[0] for name, _, _ in self.extras.matrices}
        return tuple(name for name in (*MODULES, "embed_tokens", "lm_head") if name in present)


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter's cost."""

    name: str
    rank: int
    modules: tuple[str, ...]
    cost: AdapterCost


@dataclass(frozen=True)
class RankRow:
    """What adapters of one rank and target set would cost, and how many would fit."""

    rank: int
    targets: str
    cost: AdapterCost
    fit_hot: int  # beside kv_reserve
    fit_warm: int  # in host_adapters
    load_ms: float | None  # pinned host memory to device, least time


@dataclass(frozen=True)
class BoundRow:
    """Least time of one decode step, and what to expect of this engine where it was measured."""

    batch: int
    base_ms: float
    adapters_ms: float  # every row its own adapter, of the fleet's mean size
    tokens_s: float  # at adapters_ms
    expected_tokens_s: float | None = None  # tokens_s times the share that was reached
    expected_from: str = "no data for this card"  # or where that share was measured


@dataclass(frozen=True)
class FleetPlan:
    """The whole answer; `problems` is empty where the fleet fits."""

    model: str
    gpu: str
    storage: str
    available_bytes: int
    base: BaseBytes
    memory: MemoryPlan
    adapter_pages: int  # pages that adapters may take
    adapters: tuple[PlannedAdapter, ...]  # most expensive first
    hot_together: int  # how many of them fit at once, smallest first
    warm_bytes: int  # all adapters as host images
    host_bytes: int  # what host memory may hold of them
    kv_tokens: int  # left for KV with those hot
    sequences: int  # of max_model_len that fit beside them
    per_rank: tuple[RankRow, ...]
    bounds: tuple[BoundRow, ...]
    prefill_ms: float | None  # of CONTEXT tokens
    break_even: int  # distinct adapters whose bytes equal the base's
    max_model_len: int  # tokens of a sequence of full length
    card_bytes: int | None = None  # of the whole card; None: a CPU
    context_bytes: int = 0  # that the driver takes of it beside `available_bytes`
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    schema: str = field(default=SCHEMA)

    @property
    def fits(self) -> bool:
        """Whether the fleet can be served as it is."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Plain data under a versioned schema."""
        return {"schema": self.schema, "fits": self.fits, **asdict(self)}


@dataclass(frozen=True)
class PlanRequest:
    """What is planned: a fleet's base on a device with `available_bytes` to use."""

    fleet: Fleet
    geometry: ModelGeometry
    quantization: Quantization
    itemsize: int  # of the compute dtype
    available_bytes: int
    gpu: Gpu | None = None
    pool_bytes: int | None = None  # of the pool at most; None: what is left
    adapters: tuple[AdapterShape, ...] = ()
    notes: tuple[str, ...] = ()  # become warnings of the plan

    @property
    def max_model_len(self) -> int:
        """Tokens one request may have."""
        return self.fleet.base.max_model_len or self.geometry.max_position

    @property
    def page_bytes(self) -> int:
        """Bytes of one pool page."""
        return kv_page_bytes(self.geometry, self.kv_itemsize)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one KV element."""
        return 1 if self.fleet.base.kv_cache_dtype == "fp8" else self.itemsize

    def cost(self, ranks: Ranks, extras: Extras = NO_EXTRAS) -> AdapterCost:
        """What an adapter of `ranks` and `extras` costs in this pool."""
        return adapter_cost(self.geometry, ranks, self.page_bytes, self.itemsize, extras)


def plan_fleet(request: PlanRequest) -> FleetPlan:
    """The plan of one fleet on one device. Raises Refused where even the base does not fit."""
    base = base_bytes(request.geometry, request.itemsize, request.quantization)
    costs = [request.cost(shape.ranks, shape.extras) for shape in request.adapters]
    memory = _memory(request)
    planned = sorted(
        (
            PlannedAdapter(shape.name, shape.max_rank, shape.modules, cost)
            for shape, cost in zip(request.adapters, costs, strict=True)
        ),
        key=lambda adapter: (-adapter.cost.num_pages, adapter.name),
    )
    allowed = int(memory.num_pages * (1 - request.fleet.memory.kv_reserve))
    hot, hot_pages = _fill(sorted(cost.num_pages for cost in costs), allowed)
    free = memory.num_pages - hot_pages
    gpu = request.gpu
    return FleetPlan(
        model=request.fleet.base.model,
        gpu=gpu.name if gpu else "CPU",
        storage=request.quantization.describe(),
        available_bytes=min(request.available_bytes, sum(memory.parts().values()))
        if request.pool_bytes is not None
        else request.available_bytes,
        base=base,
        memory=memory,
        adapter_pages=allowed,
        adapters=tuple(planned),
        hot_together=hot,
        warm_bytes=sum(cost.pool_bytes for cost in costs),
        host_bytes=request.fleet.memory.host_adapters,
        kv_tokens=free * TOKENS_PER_PAGE,
        sequences=free // pages_for_tokens(request.max_model_len),
        per_rank=tuple(_per_rank(request, allowed)),
        bounds=tuple(_bounds(request, base, costs)) if gpu else (),
        prefill_ms=_prefill_ms(request, gpu) if gpu else None,
        break_even=break_even(base, _mean(costs)),
        max_model_len=request.max_model_len,
        card_bytes=gpu.memory_bytes if gpu else None,
        context_bytes=CONTEXT_BYTES if gpu else 0,
        warnings=(*request.notes, *_warnings(request, planned, allowed)),
        problems=tuple(_problems(request, planned, allowed, memory)),
    )


def _memory(request: PlanRequest) -> MemoryPlan:
    slots = num_slots(len(request.adapters) + request.fleet.num_unlisted)
    return cut_device(
        request.geometry,
        request.quantization,
        (request.itemsize, request.kv_itemsize),
        StepSizes.of_limits(
            request.fleet.limits,
            slots,
            request.max_model_len,
            request.gpu.chip if request.gpu is not None else None,
        ),
        available=request.available_bytes,
        pool=request.pool_bytes,
    ).plan


def _fill(pages: Sequence[int], room: int) -> tuple[int, int]:
    """How many of `pages`, smallest first, fit into `room`, and what they take."""
    taken = 0
    for count, need in enumerate(pages):
        if taken + need > room:
            return count, taken
        taken += need
    return len(pages), taken


def _per_rank(request: PlanRequest, allowed: int) -> Iterator[RankRow]:
    warm = request.fleet.memory.host_adapters
    for targets, modules in TARGETS.items():
        for rank in RANKS:
            cost = request.cost(uniform_ranks(request.geometry, rank, modules))
            yield RankRow(
                rank=rank,
                targets=targets,
                cost=cost,
                fit_hot=allowed // cost.num_pages,
                fit_warm=images_that_fit(warm, cost.pool_bytes, is_locked=request.gpu is not None),
                load_ms=load_seconds(cost.pool_bytes, request.gpu) * 1000 if request.gpu else None,
            )


def _bounds(
    request: PlanRequest, base: BaseBytes, costs: Sequence[AdapterCost]
) -> Iterator[BoundRow]:
    assert request.gpu is not None
    kv = request.geometry.kv_bytes_per_token(request.kv_itemsize)
    mean = _mean(costs) or request.cost(uniform_ranks(request.geometry, 16, ATTENTION)).weight_bytes
    for batch in BATCHES:
        if batch > request.fleet.limits.max_num_seqs:
            continue
        contexts = [min(CONTEXT, request.max_model_len)] * batch
        distinct = [mean] * min(batch, len(costs) or batch)
        plain = decode_bound(base, kv, contexts, (), request.gpu).seconds
        loaded = decode_bound(base, kv, contexts, distinct, request.gpu).seconds
        row = BoundRow(batch, plain * 1000, loaded * 1000, batch / loaded)
        yield _expected(request, row, adapters=bool(costs))


def _expected(request: PlanRequest, row: BoundRow, *, adapters: bool) -> BoundRow:
    """`row` with what this engine was measured to reach of it, or why nobody knows."""
    gpu, cells = request.gpu, measured()
    assert gpu is not None
    if not any(cell.sm == gpu.sm for cell in cells):
        return row
    if request.kv_itemsize != request.itemsize:  # every cell has KV in the compute dtype
        return replace(row, expected_from="no data with KV in FP8")
    step = Step(row.batch, adapters, row.adapters_ms)
    cell = nearest(cells, gpu, request.quantization.method, step)
    if cell is None:
        return replace(row, expected_from="no step like this was measured on this card")
    return replace(row, expected_tokens_s=row.tokens_s * cell.share, expected_from=cell.label)


def _prefill_ms(request: PlanRequest, gpu: Gpu) -> float:
    fp8 = request.quantization.method == "fp8"
    return prefill_seconds(request.geometry, CONTEXT, gpu, fp8=fp8) * 1000


def _mean(costs: Sequence[AdapterCost]) -> int:
    """Bytes that a decode step reads of the mean adapter."""
    return round(statistics.fmean(c.step_bytes for c in costs)) if costs else 0


def _warnings(
    request: PlanRequest, planned: Sequence[PlannedAdapter], allowed: int
) -> Iterator[str]:
    total = sum(adapter.cost.num_pages for adapter in planned)
    wide = [a for a in planned if set(a.modules) - set(ATTENTION)]
    if wide and total > allowed:
        shapes = {shape.name: shape for shape in request.adapters}
        saved = 0
        for adapter in wide:
            shape = shapes[adapter.name]
            narrow = {key: rank for key, rank in shape.ranks.items() if key[1] in ATTENTION}
            vectors = frozenset(key for key in shape.extras.vectors if key[1] in ATTENTION)
            extras = Extras(vectors, shape.extras.matrices)
            saved += adapter.cost.num_pages - request.cost(narrow, extras).num_pages
        times = total / max(total - saved, 1)
        yield (
            f"{len(wide)} adapters also target the MLP: on attention alone the fleet would take"
            f" {total - saved} pages instead of {total}, {times:.1f} times as many would fit"
        )
    if len(planned) > 1:
        typical = statistics.median(adapter.rank for adapter in planned)
        for adapter in planned[:3]:
            if adapter.rank >= 4 * typical:
                yield (
                    f"{adapter.name}: rank {adapter.rank} where the median is {typical:g}; it takes"
                    f" {adapter.cost.num_pages} pages ({format_size(adapter.cost.pool_bytes)}),"
                    " and costs the others nothing"
                )
    yield from _saved_modules(request)
    bases = {s.base_model for s in request.adapters if s.base_model}
    if len(bases) > 1:
        named = ", ".join(sorted(bases)[:4])
        yield f"the adapters name {len(bases)} different bases: {named}"


def _saved_modules(request: PlanRequest) -> Iterator[str]:
    """Whole matrices in adapters: each is a copy of a part of the base, for one tenant."""
    for shape in request.adapters:
        saved = {key for key in shape.extras.matrices if key[0].endswith(".weight")}
        if not saved:
            continue
        whole = request.cost(shape.ranks, shape.extras)
        rest = request.cost(
            shape.ranks, replace(shape.extras, matrices=shape.extras.matrices - saved)
        )
        names = " and ".join(sorted(name.removesuffix(".weight") for name, _, _ in saved))
        size = sum(rows * length for _, rows, length in saved) * request.itemsize
        yield (
            f"{shape.name}: saves {names} whole, {format_size(size)} (modules_to_save); it takes"
            f" {whole.num_pages} pages instead of {rest.num_pages}; LoRA on {names} is far smaller"
        )


def _problems(
    request: PlanRequest, planned: Sequence[PlannedAdapter], allowed: int, memory: MemoryPlan
) -> Iterator[str]:
    need = pages_for_tokens(request.max_model_len)
    if need > memory.num_pages:
        tokens = memory.num_pages * TOKENS_PER_PAGE
        yield (
            f"one request of {request.max_model_len} tokens needs {need} pages and the pool has"
            f" {memory.num_pages}: set base.max_model_len to {tokens} or less"
        )
    if planned and planned[0].cost.num_pages > allowed:
        largest = planned[0]
        yield (
            f"{largest.name} needs {largest.cost.num_pages} pages and adapters may take {allowed}"
            f" of {memory.num_pages}: lower memory.kv_reserve or give more memory"
        )
    names = {shape.name for shape in request.adapters if shape.pinned}
    pinned = sum(a.cost.num_pages for a in planned if a.name in names)
    if pinned > allowed:
        yield (
            f"the {len(names)} adapters with pin: hot need {pinned} pages together and adapters may"
            f" take {allowed}: pin fewer, or give more memory"
        )


def what_would_fit(request: PlanRequest) -> str | None:
    """The first storage of a 16-bit base that makes a refused one fit, in words."""
    model, gpu = request.fleet.base.model, request.gpu
    ways = {
        "fp8": "--set base.quantization=fp8",
        "awq": f"make it with `mlora quantize {model} --to awq`",
    }
    for method in ("fp8", "awq") if request.quantization.method == "none" else ():
        changed = Quantization(method).on(
            gpu=gpu is not None,
            has_fp8=gpu is not None and gpu.has_fp8,
            itemsize=request.itemsize,
        )
        try:
            plan = plan_fleet(replace(request, quantization=changed))
        except Refused:
            continue
        if plan.fits:
            return f"it fits as {changed.describe()}: {ways[method]}"
    return None

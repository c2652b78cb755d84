"""add_lora at Llama-3-8B shapes, weights scattered over a paged pool of real geometry.

The timed part is what a decode step does: launches sized for as many adapters of the fleet's
highest rank as there are rows, walking whatever the step's lists hold. Beside it run a Python loop
over the adapters and gather + bmm, on contiguous weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from multilora_kernels.add_lora import add_lora
from multilora_kernels.bench.timing import Built, Case, Run, sets_needed
from multilora_kernels.launch import Chip
from multilora_kernels.layout import GROUPS, MODULES, ImagePlan, page_bytes, plan_image
from multilora_kernels.lora_choice import (
    DECODE_BUCKETS,
    Choose,
    GroupShape,
    LoraChoice,
    choose,
    clamp,
    decode_bucket,
    is_decode,
    prefill_bucket,
    with_tuned,
)
from multilora_kernels.popularity import make_slots
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable
from multilora_kernels.testing import LLAMA3_8B, Fleet, make_fleet

LAYERS = 32
ADAPTERS = 256
ITEMSIZE = 2
PAGE_BYTES = page_bytes(LAYERS, 8, 128, ITEMSIZE)
MIX = (16, 8, 32, 16, 64, 16, 8, 128)
# Layers that adapters of a rank have: few enough for 256 of them to fit one card.
_LAYERS_OF = {"8": 32, "16": 32, "32": 16, "64": 8, "128": 4, "mix": 12}
_BASELINE_ROWS = 64

# Around what the searches of docs/benchmarks/lora-tuning-h200.jsonl left in the running.
DECODE_CHOICES: tuple[Mapping[str, Any], ...] = tuple(
    {
        "block_n": block_n, "expand_registers": expand, "rows_n": rows_n,
        "shrink_registers": shrink, "row_splits": row_splits, "programs_per_sm": cap,
    }
    for block_n, expand, rows_n, shrink, row_splits, cap in (
        (128, None, 128, 80, 4, 16),
        (128, None, 128, 80, 2, 16),
        (128, None, 128, None, 4, 16),
        (256, 128, 128, 80, 4, 16),
        (256, 128, 128, 80, 2, 16),
        (256, 128, 128, 80, 2, 8),
        (256, None, 128, 80, 2, 16),
    )
)  # fmt: skip
ORDER_CHOICES: tuple[Mapping[str, Any], ...] = tuple(
    {"block_k": block_k, "k_steps": steps, "shrink_warps": warps, "expand_warps": expand}
    for block_k, steps, warps, expand in (
        (512, 1, 4, 4),
        (512, 4, 4, 4),
        (1024, 1, 4, 4),
        (1024, 1, 8, 4),
        (1024, 1, 4, 8),
        (2048, 1, 8, 4),
    )
)
# The shrink's as chosen, with several expands; then several shares of K.
PREFILL_CHOICES: tuple[Mapping[str, Any], ...] = (
    *(
        {"block_n": block_n, "n_steps": steps, "expand_stages": stages, "expand_warps": warps}
        for block_n, steps, stages, warps in (
            (64, 4, 4, 4),
            (64, 8, 3, 4),
            (64, 8, 4, 4),
            (64, 16, 4, 4),
            (128, 4, 3, 4),
        )
    ),
    *({"block_k": 64, "k_steps": span // 64} for span in (1024, 4096)),
)


@dataclass(frozen=True)
class DeviceFleet:
    """256 random adapters of one rank law in a pool on the device."""

    pool: torch.Tensor
    table: AdapterTable
    ranks: tuple[int, ...]  # by adapter
    layers: int


def ranks_of(label: str) -> tuple[int, ...]:
    """Rank of every adapter: all alike, or the mix's eight in turn."""
    if label == "mix":
        return tuple(MIX[i % len(MIX)] for i in range(ADAPTERS))
    return (int(label),) * ADAPTERS


@lru_cache(maxsize=1)
def device_fleet(label: str, device: torch.device) -> DeviceFleet:
    """Adapters on all seven projections, pages in random order."""
    layers = _LAYERS_OF[label]
    ranks = ranks_of(label)
    plans = {rank: _plan(rank, layers) for rank in set(ranks)}
    num_pages = sum(plans[rank].num_pages for rank in ranks)
    pool = torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    for pages in pool.view(torch.bfloat16).split(1024):
        pages.normal_(std=0.02)
    order = np.random.Generator(np.random.PCG64(1)).permutation(num_pages).tolist()
    blocks = sum(len(plans[rank].blocks) for rank in ranks)
    blocks = blocks * LAYERS // layers
    table = AdapterTable(ADAPTERS + 1, LAYERS, LLAMA3_8B, blocks, device)
    for index, rank in enumerate(ranks):
        plan = plans[rank]
        table.set(index + 1, plan, [order.pop() for _ in range(plan.num_pages)])
    table.flush()
    return DeviceFleet(pool, table, ranks, layers)


@lru_cache(maxsize=1)
def _one_adapter(device: torch.device) -> Fleet:
    """One layer of one adapter in pages of the real size: enough to compile the kernels."""
    ranks = {(0, module): 16 for module in MODULES}
    return make_fleet([ranks], LLAMA3_8B, 1, PAGE_BYTES, torch.bfloat16, device)


@lru_cache(maxsize=16)
def _plan(rank: int, layers: int) -> ImagePlan:
    ranks = {(layer, module): rank for layer in range(layers) for module in MODULES}
    return plan_image(ranks, LLAMA3_8B, PAGE_BYTES, ITEMSIZE)


@dataclass(frozen=True)
class LoraCell:
    """One cell of the grid: a group, a number of rows, how adapters and ranks are spread."""

    group: str
    rows: int
    popularity: str  # a law of `testing`, or "N adapters" in equal runs (prefill)
    ranks: str

    def slots(self, turn: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Slots of the rows; every turn takes other adapters."""
        if self.popularity.endswith("adapters"):
            adapters = int(self.popularity.split()[0])
            slots = np.repeat(np.arange(adapters, dtype=np.int32), self.rows // adapters)
        else:
            slots = make_slots(self.popularity, self.rows, first_slot=0)
        return (slots + turn * (int(slots.max()) + 1)) % ADAPTERS + 1

    @property
    def bytes(self) -> float:
        """Each distinct adapter's A and B once, x once, y read and written."""
        ranks = ranks_of(self.ranks)
        weights = sum(ranks[slot - 1] for slot in set(self.slots(0).tolist()))
        shapes = [LLAMA3_8B[module] for module in GROUPS[self.group]]
        d_out = sum(shape[1] for shape in shapes)
        per_rank = sum(sum(shape) for shape in shapes)
        return float(ITEMSIZE * (weights * per_rank + self.rows * (shapes[0][0] + 2 * d_out)))

    @property
    def flops(self) -> float:
        """Two per weight and row."""
        ranks = ranks_of(self.ranks)
        weights = float(sum(ranks[slot - 1] for slot in self.slots(0).tolist()))
        return 2.0 * weights * sum(sum(LLAMA3_8B[module]) for module in GROUPS[self.group])

    def build(self, device: torch.device) -> Built:
        """Inputs that together exceed the L2, and the functions that run one of them."""
        fleet = device_fleet(self.ranks, device)
        modules = GROUPS[self.group]
        d_in, d_out = LLAMA3_8B[modules[0]][0], sum(LLAMA3_8B[m][1] for m in modules)
        sets = sets_needed(self.bytes)
        x = torch.randn(sets, self.rows, d_in, device=device, dtype=torch.bfloat16)
        y = torch.randn(sets, self.rows, d_out, device=device, dtype=torch.bfloat16)

        def ours(choice: Choose) -> Run:
            turns = [
                self.segments(fleet, turn, device, choice)
                for turn in range(-(-sets // fleet.layers))
            ]

            def run(index: int) -> None:
                turn, layer = divmod(index, fleet.layers)
                add_lora(
                    y[index], x[index], fleet.pool, fleet.table, turns[turn], layer, self.group
                )

            return run

        variants = {"ours": ours(choose)}
        if self.rows <= _BASELINE_ROWS and self.ranks == "16":
            variants.update(_baselines(self, x, y, device))
        return Built(sets, variants, lambda tuned: ours(forced(tuned)))

    def compile(self, device: torch.device, tuned: Mapping[str, Any]) -> None:
        """Launch both kernels once with a given choice."""
        fleet = _one_adapter(device)
        shapes = [LLAMA3_8B[module] for module in GROUPS[self.group]]
        x = torch.zeros(self.rows, shapes[0][0], device=device, dtype=torch.bfloat16)
        y = torch.zeros(self.rows, sum(s[1] for s in shapes), device=device, dtype=torch.bfloat16)
        segments = Segments(self.rows, device, choose=forced(tuned))
        segments.build([1] * self.rows)
        add_lora(y, x, fleet.pool, fleet.table, segments, 0, self.group)

    def segments(
        self, fleet: DeviceFleet, turn: int, device: torch.device, choice: Choose
    ) -> Segments:
        """The step's lists, with launches sized as a captured decode graph has them."""
        segments = Segments(self.rows, device, max_rank=128, choose=choice)
        slots = self.slots(turn)
        if is_decode(self.rows):
            rank = max(fleet.ranks)
            segments.prepare_capture(fleet.table, self.rows, rank, slots)
        else:
            segments.build(slots)
        return segments


def forced(tuned: Mapping[str, Any]) -> Choose:
    """The ordinary choice with some fields given."""

    def choice(group: GroupShape, num_tokens: int, chip: Chip) -> LoraChoice:
        return clamp(with_tuned(choose(group, num_tokens, chip), tuned), group)

    return choice


def _baselines(
    cell: LoraCell, x: torch.Tensor, y: torch.Tensor, device: torch.device
) -> dict[str, Run]:
    """A loop over adapters as PEFT runs it, and gather + bmm, on contiguous weights."""
    slots = cell.slots(0)
    adapters, index = np.unique(slots, return_inverse=True)
    rank = 16
    shapes = [LLAMA3_8B[module] for module in GROUPS[cell.group]]
    sets = min(len(x), 8)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(sets, len(adapters), *shape, device=device, dtype=x.dtype) * 0.02

    a = [weights(rank, d_in) for d_in, _ in shapes]
    b = [weights(d_out, rank) for _, d_out in shapes]
    columns = np.cumsum([0] + [d_out for _, d_out in shapes]).tolist()
    rows = [torch.from_numpy(np.flatnonzero(index == i)).to(device) for i in range(len(adapters))]
    owner = torch.from_numpy(index.reshape(-1)).to(device)

    def loop(i: int) -> None:
        w = i % sets
        for adapter, own in enumerate(rows):
            x_rows = x[i].index_select(0, own)
            for module in range(len(shapes)):
                delta = (x_rows @ a[module][w, adapter].T) @ b[module][w, adapter].T
                y[i, :, columns[module] : columns[module + 1]].index_add_(0, own, delta)

    def gather(i: int) -> None:
        w = i % sets
        for module in range(len(shapes)):
            shrunk = torch.bmm(a[module][w].index_select(0, owner), x[i].unsqueeze(2))
            delta = torch.bmm(b[module][w].index_select(0, owner), shrunk).squeeze(2)
            y[i, :, columns[module] : columns[module + 1]] += delta

    return {"torch_loop": loop, "gather_bmm": gather}


def _case(cell: LoraCell) -> Case:
    phase = (
        f"decode {decode_bucket(cell.rows)}"
        if is_decode(cell.rows)
        else f"prefill {prefill_bucket(cell.rows)}"
    )
    tunes = cell.ranks in ("16", "64", "mix")
    tunes = tunes and cell.popularity in ("distinct", "skewed", "8 adapters")
    tunes = tunes and cell.rows in (*DECODE_BUCKETS, 2048, 8192)
    choices = (DECODE_CHOICES if is_decode(cell.rows) else PREFILL_CHOICES) if tunes else ()
    return Case(
        op="lora",
        shape={
            "group": cell.group,
            "T": cell.rows,
            "popularity": cell.popularity,
            "rank": cell.ranks,
        },
        bytes=cell.bytes,
        flops=cell.flops,
        build=cell.build,
        tune_key=f"{_key(cell.group)} {phase}",
        choices=choices,
        compile=cell.compile,
    )


def _key(group: str) -> str:
    shapes = [LLAMA3_8B[module] for module in GROUPS[group]]
    return GroupShape(group, shapes[0][0], tuple(s[1] for s in shapes), ITEMSIZE, 8192).key


def _order_case(group: str, rows: int) -> Case:
    """Only for --tune: what must be one choice for all decode sizes has one key for them all."""
    cell = LoraCell(group, rows, "distinct", "16")

    def build(device: torch.device) -> Built:
        built = cell.build(device)
        return Built(built.num_sets, {}, built.with_choice)

    return Case(
        op="lora",
        shape={"group": group, "T": rows, "popularity": "distinct", "tunes": "order of sums"},
        bytes=cell.bytes,
        build=build,
        tune_key=f"{_key(group)} decode",
        choices=ORDER_CHOICES,
        compile=cell.compile,
        only_tunes=True,
    )


def _step_case(rows: int, groups: tuple[str, ...]) -> Case:
    """All layers of one decode step, every row its own rank-16 adapter."""
    cells = [LoraCell(group, rows, "distinct", "16") for group in groups]

    def build(device: torch.device) -> Built:
        fleet = device_fleet("16", device)
        segments = cells[0].segments(fleet, 0, device, choose)
        parts = []
        for cell in cells:
            modules = GROUPS[cell.group]
            d_out = sum(LLAMA3_8B[module][1] for module in modules)
            size = (LAYERS, rows, LLAMA3_8B[modules[0]][0])
            x = torch.randn(size, device=device, dtype=torch.bfloat16)
            y = torch.randn(LAYERS, rows, d_out, device=device, dtype=torch.bfloat16)
            parts.append((cell.group, x, y))

        def run(_: int) -> None:
            for layer in range(LAYERS):
                for group, x, y in parts:
                    add_lora(y[layer], x[layer], fleet.pool, fleet.table, segments, layer, group)

        return Built(1, {"ours": run})

    return Case(
        op="lora_step",
        shape={"T": rows, "groups": "+".join(groups), "layers": LAYERS, "rank": "16"},
        bytes=LAYERS * sum(cell.bytes for cell in cells),
        flops=LAYERS * sum(cell.flops for cell in cells),
        build=build,
    )


def cells() -> Iterator[LoraCell]:
    """The grid, by rank law so that each pool is made once."""
    some = ("qkv", "down")
    for group, rows in product(GROUPS, (1, 4, 16, 32, 64, 128, 256)):
        yield LoraCell(group, rows, "distinct", "16")
    for law, group, rows in product(("uniform", "skewed", "identical"), some, (16, 64, 256)):
        yield LoraCell(group, rows, law, "16")
    for group, rows, adapters in product(GROUPS, (2048, 8192), (1, 8, 32)):
        yield LoraCell(group, rows, f"{adapters} adapters", "16")
    for ranks, group, rows in product(("8", "32", "64", "128", "mix"), some, (1, 16, 64, 256)):
        yield LoraCell(group, rows, "distinct", ranks)


def cases() -> list[Case]:
    """Every case of the LoRA op."""
    made = [_order_case(group, rows) for group in GROUPS for rows in (1, 16, 64, 256)]
    steps = [
        _step_case(rows, groups)
        for rows in (1, 16, 64, 256)
        for groups in (tuple(GROUPS), ("qkv", "o"))
    ]
    grid = [_case(cell) for cell in cells()]
    alike = [case for case in grid if case.shape["rank"] == "16"]
    return [*made, *alike, *steps, *(case for case in grid if case.shape["rank"] != "16")]

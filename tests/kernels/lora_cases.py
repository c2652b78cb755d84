"""Adapters of many kinds on a small geometry, and the fp64 delta that every kernel must reach."""

from collections.abc import Sequence

import torch

from multilora_kernels.add_lora import add_lora
from multilora_kernels.layout import GROUPS, MODULES
from multilora_kernels.lora_choice import Choose, choose
from multilora_kernels.segments import Segments
from multilora_kernels.testing import Fleet, make_fleet

SHAPES = {
    "q_proj": (48, 48),
    "k_proj": (48, 16),
    "v_proj": (48, 16),
    "o_proj": (48, 48),
    "gate_proj": (48, 100),
    "up_proj": (48, 100),
    "down_proj": (100, 48),
}
LAYERS = 2
# One KV head of 16: the smallest page there is, so every tile is cut into many blocks.
PAGE_BYTES = LAYERS * 2 * 16 * 16 * 4
# Largest ||y - y64|| / ||y64||: roundings of the output and, with matrix tiles, of A x.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
RANKS = (1, 8, 16, 17, 24, 64, 512, 3)

Ranks = dict[tuple[int, str], int]


def adapters(ranks: Sequence[int] = RANKS, layers: int = LAYERS) -> list[Ranks]:
    """Every rank once; one with attention only, one with layer 1 only, one that varies by layer."""
    made = [{(layer, m): rank for layer in range(layers) for m in MODULES} for rank in ranks]
    made.append({(layer, m): 16 for layer in range(layers) for m in ("q_proj", "v_proj")})
    made.append({(1, m): 20 for m in MODULES})
    made.append({(0, "q_proj"): 40, (1, "q_proj"): 8, (1, "down_proj"): 2})
    return made


def small_fleet(
    dtype: torch.dtype, seed: int, device: str = "cpu", ranks: Sequence[int] = RANKS
) -> Fleet:
    """All of `adapters()` in the smallest pages."""
    return make_fleet(adapters(ranks), SHAPES, LAYERS, PAGE_BYTES, dtype, device, seed)


def dense(
    fleet: Fleet, x: torch.Tensor, slots: Sequence[int], layer: int, group: str
) -> torch.Tensor:
    """The delta of every row in fp64, straight from the adapters' matrices."""
    parts = []
    for module in GROUPS[group]:
        part = torch.zeros(
            len(slots), fleet.shapes[module][1], dtype=torch.float64, device=x.device
        )
        for slot in sorted(set(slots) - {0}):
            pair = fleet.weights[slot - 1].get((layer, module))
            if pair is not None:
                rows = [row for row, other in enumerate(slots) if other == slot]
                a, b = (matrix.to(x.device).double() for matrix in pair)
                part[rows] = (x[rows].double() @ a.T) @ b.T
        parts.append(part)
    return torch.cat(parts, dim=1)


def inputs(fleet: Fleet, rows: int, group: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x and y of one group, on the fleet's device, in the dtype of its images."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(iter(fleet.weights[0].values()))[0].dtype
    modules = GROUPS[group]
    x = torch.randn(rows, fleet.shapes[modules[0]][0], generator=generator)
    y = torch.randn(rows, sum(fleet.shapes[m][1] for m in modules), generator=generator)
    return x.to(dtype).to(fleet.pool.device), y.to(dtype).to(fleet.pool.device)


def run(
    fleet: Fleet,
    x: torch.Tensor,
    y: torch.Tensor,
    slots: Sequence[int],
    group: str,
    layers: Sequence[int] = range(LAYERS),
    choose: Choose = choose,
) -> None:
    """One step: build segments, add the deltas of every layer to y."""
    segments = Segments(len(slots), x.device, choose=choose)
    segments.build(slots)
    for layer in layers:
        add_lora(y, x, fleet.pool, fleet.table, segments, layer, group)


def check(
    fleet: Fleet,
    slots: Sequence[int],
    group: str,
    seed: int,
    layers: Sequence[int],
    choose: Choose = choose,
) -> None:
    """Every row within tolerance of fp64; rows of the base untouched."""
    x, y = inputs(fleet, len(slots), group, seed)
    expected = y.double() + sum(dense(fleet, x, slots, layer, group) for layer in layers)
    before = y.clone()
    run(fleet, x, y, slots, group, layers, choose)
    error = ((y.double() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE[x.dtype], f"{group}: error {error:.2e}, seed {seed}"
    base = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(y[base], before[base])

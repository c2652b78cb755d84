"""Made-up adapters and batches, the same for tests and benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from multilora_kernels.layout import (
    NO_EXTRAS,
    Extras,
    ImagePlan,
    MatrixName,
    VectorKind,
    plan_image,
)
from multilora_kernels.popularity import make_slots
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

LLAMA3_8B: Mapping[str, tuple[int, int]] = {
    "q_proj": (4096, 4096),
    "k_proj": (4096, 1024),
    "v_proj": (4096, 1024),
    "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336),
    "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}

Weights = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
Vectors = dict[tuple[int, str, VectorKind], torch.Tensor]


def make_segments(
    popularity: str, num_rows: int, device: torch.device | str = "cpu", shuffle: bool = True
) -> Segments:
    """Segments of `num_rows` rows spread over adapters by a popularity law."""
    segments = Segments(num_rows, device)
    segments.build(make_slots(popularity, num_rows, shuffle=shuffle))
    return segments


def random_weights(
    ranks: Mapping[tuple[int, str], int],
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
) -> Weights:
    """A [r, d_in] and B [d_out, r] by (layer, module), rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for key, rank in ranks.items():
        if rank:
            d_in, d_out = shapes[key[1]]
            a = torch.randn(rank, d_in, generator=generator) / d_in**0.5
            b = torch.randn(d_out, rank, generator=generator) / rank**0.5
            weights[key] = (a.to(dtype), b.to(dtype))
    return weights


def random_vectors(extras: Extras, shapes: Mapping[str, tuple[int, int]], seed: int) -> Vectors:
    """A float32 vector [d_out] by (layer, module, kind)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shapes[key[1]][1], generator=generator) for key in sorted(extras.vectors)
    }


def random_matrices(
    extras: Extras, dtype: torch.dtype, seed: int
) -> dict[MatrixName, torch.Tensor]:
    """A matrix [rows, row length] by name, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(rows, length, generator=generator) / length**0.5).to(dtype)
        for name, rows, length in sorted(extras.matrices)
    }


def fill_matrices(
    plan: ImagePlan, matrices: Mapping[MatrixName, torch.Tensor], image: torch.Tensor
) -> None:
    """Write `matrices` into the pages of an image, where `plan` has them."""
    for block in plan.matrices:
        rows = matrices[block.name][block.start : block.start + block.num_rows]
        raw = rows.reshape(-1).view(torch.uint8)
        image[block.page, block.offset : block.offset + len(raw)] = raw


def fill_vectors(plan: ImagePlan, vectors: Vectors, image: torch.Tensor) -> None:
    """Write `vectors` into the pages of an image, where `plan` has them."""
    for block in plan.vectors:
        values = vectors[block.layer, block.module, block.kind]
        raw = values[block.start : block.start + block.length].view(torch.uint8)
        image[block.page, block.offset : block.offset + len(raw)] = raw


def fill_image(plan: ImagePlan, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """The adapter's pages, uint8 [num_pages, page_bytes], as `plan` lays them out."""
    image = torch.zeros(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
    for block in plan.blocks:
        a, b = weights[block.layer, block.module]
        stop = min(block.rank_start + block.rank_width, a.shape[0])
        along = slice(block.start, block.start + block.length)
        if block.matrix == "a":
            tile = torch.zeros(block.rank_width, block.length, dtype=dtype)
            tile[: stop - block.rank_start] = a[block.rank_start : stop, along]
        else:
            tile = torch.zeros(block.length, block.rank_width, dtype=dtype)
            tile[:, : stop - block.rank_start] = b[along, block.rank_start : stop]
        raw = tile.view(-1).view(torch.uint8)
        image[block.page, block.offset : block.offset + len(raw)] = raw
    return image


@dataclass(frozen=True)
class Fleet:
    """Adapters in a pool: slot i + 1 holds adapter i, with the weights it was made from."""

    pool: torch.Tensor
    table: AdapterTable
    weights: tuple[Weights, ...]
    shapes: Mapping[str, tuple[int, int]]
    vectors: tuple[Vectors, ...] = ()
    matrices: tuple[Mapping[MatrixName, torch.Tensor], ...] = ()


def make_fleet(
    ranks: Sequence[Mapping[tuple[int, str], int]],
    shapes: Mapping[str, tuple[int, int]],
    num_layers: int,
    page_bytes: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    extras: Sequence[Extras] = (),
) -> Fleet:
    """One random adapter per entry of `ranks`, scattered over a pool that is otherwise NaN."""
    itemsize = dtype.itemsize
    extras = extras or [NO_EXTRAS] * len(ranks)
    plans = [
        plan_image(entry, shapes, page_bytes, itemsize, more)
        for entry, more in zip(ranks, extras, strict=True)
    ]
    num_pages = sum(plan.num_pages for plan in plans) + 3
    # All bits set is a NaN in every float format: whatever is read by mistake shows.
    pool = torch.full((num_pages, page_bytes), 255, dtype=torch.uint8)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_pages).tolist()
    # Vectors of a module take one cell, as wide as the widest tile, however few their pieces are.
    max_blocks = sum(
        len(plan.blocks) + 16 * len(plan.vectors) + len(plan.matrices) for plan in plans
    )
    table = AdapterTable(len(plans) + 1, num_layers, shapes, max_blocks, device)
    weights: list[Weights] = []
    vectors: list[Vectors] = []
    matrices: list[dict[MatrixName, torch.Tensor]] = []
    for index, (entry, plan) in enumerate(zip(ranks, plans, strict=True)):
        pages = [order.pop() for _ in range(plan.num_pages)]
        made = random_weights(entry, shapes, dtype, seed * 1000 + index)
        vectors.append(random_vectors(plan.extras, shapes, seed * 1000 + index))
        image = fill_image(plan, made, dtype)
        fill_vectors(plan, vectors[-1], image)
        matrices.append(random_matrices(plan.extras, dtype, seed * 1000 + index))
        fill_matrices(plan, matrices[-1], image)
        pool[pages] = image
        table.set(index + 1, plan, pages)
        weights.append(made)
    table.flush()
    return Fleet(pool.to(device), table, tuple(weights), shapes, tuple(vectors), tuple(matrices))

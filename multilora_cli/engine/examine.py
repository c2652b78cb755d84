"""Everything that can be said of one adapter without running the model.

What refuses an adapter here is what refuses it at load, because it is the same code: the header
and its coverage (`adapters.peft`), then the image with its checks of values (`AdapterReader`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from multilora_cli.adapters.base_match import BaseMatch, match_base
from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.peft_config import CONFIG_NAME
from multilora_cli.adapters.strict_json import parse_json
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.engine.parity_adapter import MergedAdapter
from multilora_cli.sizing.geometry import ModelGeometry, projection_name

_PROBES = 4  # random inputs that a module's product is tried on


@dataclass(frozen=True)
class ModuleRow:
    """Neighbouring layers of one module that have rank and scale in common."""

    module: str
    layers: str  # 0-31; empty for embedding and head
    rank: int
    scale: float
    rule: str  # alpha 32 / rank 16


@dataclass(frozen=True)
class Examined:
    """What an adapter is, what it costs, and what a person should know of it."""

    digest: str
    base: BaseMatch
    num_tensors: int  # all of them are used, or the adapter is refused
    num_modules: int  # adapted (layer, module) pairs, embedding and head
    rows: tuple[ModuleRow, ...]
    num_bytes: int  # of its weights in the compute dtype, nothing padded
    num_pages: int
    pool_bytes: int
    idle: tuple[str, ...]  # modules whose delta is zero
    warnings: tuple[str, ...]
    notes: tuple[str, ...]  # what reading had to say, and changes nothing


def examine(
    adapter: AdapterFile,
    name: str,
    geometry: ModelGeometry,
    reader: AdapterReader,
    served: tuple[str, str | None],
) -> Examined:
    """Read every tensor of an adapter whose header was read. Raises AdapterError.

    `reader` is that of the engine; `served` are base.model and base.revision.
    """
    digest = content_digest(adapter)
    plan, fill = reader.open(AdapterRef(name, digest, str(adapter.folder), 0))
    image = torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
    notes = fill(image)
    del image
    config = parse_json((adapter.folder / CONFIG_NAME).read_bytes())
    base = match_base(adapter.base_model_name, config.get("revision"), *served)
    idle = tuple(_idle_modules(adapter, geometry))
    return Examined(
        digest=digest,
        base=base,
        num_tensors=len(adapter.tensors),
        num_modules=len(adapter.weights) + len(adapter.edges.lora) + len(adapter.edges.saved),
        rows=tuple(_module_rows(adapter, config)),
        num_bytes=adapter.num_bytes(plan.itemsize),
        num_pages=plan.num_pages,
        pool_bytes=plan.num_pages * plan.page_bytes,
        idle=idle,
        warnings=tuple(_warnings(adapter, base, idle)),
        notes=(*adapter.notes, *(_as_texts(notes) if len(idle) < len(adapter.weights) else ())),
    )


def _warnings(adapter: AdapterFile, base: BaseMatch, idle: tuple[str, ...]) -> Iterator[str]:
    if base.is_warning:
        yield base.text
    factors_alone = all("lora_A" in name or "lora_B" in name for name in adapter.tensors)
    if factors_alone and adapter.weights and len(idle) == len(adapter.weights):
        yield (
            "changes nothing: the product B A of every module is zero, so it answers as the base;"
            " an untrained adapter looks like this"
        )
    elif idle:
        yield (
            f"{len(idle)} of {len(adapter.weights)} modules change nothing, the first is {idle[0]}"
        )


def _as_texts(notes: object) -> Iterator[str]:
    """What filling the image had to say."""
    if isinstance(notes, tuple):
        yield from (str(note) for note in notes)


def _idle_modules(adapter: AdapterFile, geometry: ModelGeometry) -> Iterator[str]:
    """Modules whose B (A x) is zero for random x, and so their product, whichever factor it is."""
    generator = torch.Generator().manual_seed(0)
    shapes = geometry.module_shapes
    with MergedAdapter(adapter, geometry) as merged:
        for layer, module in sorted(adapter.weights):
            x = torch.randn(shapes[module][0], _PROBES, generator=generator)
            if merged.is_idle(layer, module, x):
                yield projection_name(layer, module)


def _module_rows(adapter: AdapterFile, config: Mapping[str, Any]) -> Iterator[ModuleRow]:
    rslora = bool(config.get("use_rslora"))

    def kind(key: tuple[int, str]) -> tuple[str, int, float]:
        weights = adapter.weights[key]
        return key[1], weights.rank, weights.scaling

    def rule(rank: int, scale: float) -> str:
        root = math.sqrt(rank) if rslora else rank
        return f"alpha {scale * root:g} / " + (f"sqrt(rank {rank})" if rslora else f"rank {rank}")

    order = sorted(adapter.weights, key=lambda key: (kind(key), key[0]))
    for (module, rank, scale), keys in groupby(order, key=kind):
        layers = _ranges([layer for layer, _ in keys])
        yield ModuleRow(module, layers, rank, scale, rule(rank, scale))
    for edge, found in adapter.edges.lora.items():
        yield ModuleRow(edge, "", found.rank, found.scaling, rule(found.rank, found.scaling))


def _ranges(layers: list[int]) -> str:
    """0-3, 7, 9-31."""
    parts: list[str] = []
    start = previous = layers[0]
    for layer in [*layers[1:], -1]:
        if layer != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = layer
        previous = layer
    return ", ".join(parts)

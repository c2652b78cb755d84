"""Adapters with vectors on some modules, and what every kernel must make of them."""

from collections.abc import Sequence

import torch
from lora_cases import LAYERS, PAGE_BYTES, SHAPES, TOLERANCE

from multilora_kernels.layout import GROUPS, MODULES, VECTOR_KINDS, Extras
from multilora_kernels.scale_shift import scale_shift
from multilora_kernels.segments import Segments
from multilora_kernels.testing import Fleet, make_fleet

EVERYWHERE = {(layer, module, kind) for layer in range(LAYERS) for module in MODULES
              for kind in VECTOR_KINDS}  # fmt: skip
EXTRAS = (
    Extras(),
    Extras(frozenset(EVERYWHERE)),
    Extras(frozenset(key for key in EVERYWHERE if key[2] == "scale")),
    Extras(frozenset(key for key in EVERYWHERE if key[2] == "shift" and key[1] != "q_proj")),
    Extras(frozenset({(1, "k_proj", "shift"), (0, "up_proj", "scale"), (1, "q_proj", "scale")})),
)
# Slot i has EXTRAS[i - 1]; base rows, plain LoRA rows, and one adapter on several rows.
SLOTS = (0, 2, 1, 3, 4, 5, 2, 0, 5)


def vector_fleet(dtype: torch.dtype, device: str = "cpu", **changes: object) -> Fleet:
    """One adapter per entry of EXTRAS; only the first two have factors too."""
    lora = {(layer, module): 8 for layer in range(LAYERS) for module in MODULES}
    settings = {"shapes": SHAPES, "num_layers": LAYERS, "page_bytes": PAGE_BYTES, **changes}
    return make_fleet(
        [lora, lora, {}, {}, {}], dtype=dtype, device=device, seed=4, extras=EXTRAS,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def expected(
    fleet: Fleet, y: torch.Tensor, slots: Sequence[int], layer: int, group: str
) -> torch.Tensor:
    """g * y + b in float64, straight from the adapters' vectors."""
    out = y.double()
    for row, slot in enumerate(slots):
        column = 0
        for module in GROUPS[group]:
            d_out = fleet.shapes[module][1]
            found = fleet.vectors[slot - 1] if slot else {}
            part = out[row, column : column + d_out]
            scale, shift = (found.get((layer, module, kind)) for kind in VECTOR_KINDS)
            if scale is not None:
                part *= scale.double().to(y.device)
            if shift is not None:
                part += shift.double().to(y.device)
            column += d_out
    return out


def check(fleet: Fleet, group: str, dtype: torch.dtype, slots: Sequence[int] = SLOTS) -> None:
    """Both layers: rows with vectors as in float64, all others bit for bit as they were."""
    generator = torch.Generator().manual_seed(3)
    width = sum(fleet.shapes[module][1] for module in GROUPS[group])
    for layer in range(LAYERS):
        y = torch.randn(len(slots), width, generator=generator).to(dtype).to(fleet.pool.device)
        segments = Segments(len(slots), fleet.pool.device)
        segments.build(slots)
        reference, before = expected(fleet, y, slots, layer, group), y.clone()
        scale_shift(y, fleet.pool, fleet.table, segments, layer, group)
        error = ((y.double() - reference).norm() / reference.norm()).item()
        assert error < TOLERANCE[dtype], (group, layer, error)
        plain = [row for row, slot in enumerate(slots) if slot < 2]
        assert torch.equal(y[plain], before[plain])
        if any(slot > 1 for slot in slots):
            assert not torch.equal(y, before) or group in ("o", "down")

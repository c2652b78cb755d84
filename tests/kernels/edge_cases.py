"""Adapters of the embedding and the head, and what the kernels must make of them."""

from collections.abc import Sequence

import torch
from lora_cases import LAYERS, PAGE_BYTES, SHAPES, TOLERANCE

from multilora_kernels.edge_lora import embed_lora, head_lora
from multilora_kernels.layout import Extras
from multilora_kernels.segments import Segments
from multilora_kernels.testing import Fleet, make_fleet

VOCAB, HIDDEN = 301, 48


def _embed(rank: int) -> Extras:
    return Extras(matrices=frozenset({("embed_tokens.a", VOCAB, rank),
                                      ("embed_tokens.b", HIDDEN, rank)}))  # fmt: skip


def _head(rank: int) -> Extras:
    return Extras(matrices=frozenset({("lm_head.a", rank, HIDDEN), ("lm_head.b", VOCAB, rank)}))


EXTRAS = (
    Extras(),
    _embed(5),
    _head(16),
    Extras(matrices=_embed(40).matrices | _head(33).matrices),
    Extras(matrices=frozenset({("embed_tokens.weight", VOCAB, HIDDEN)})),
    Extras(matrices=frozenset({("lm_head.weight", VOCAB, HIDDEN)})),
)
# Slot i has EXTRAS[i - 1]; base rows, plain LoRA rows, and one adapter on several rows.
SLOTS = (0, 2, 1, 3, 4, 5, 6, 4, 0, 2, 6)


def edge_fleet(dtype: torch.dtype, device: str = "cpu") -> Fleet:
    """One adapter per entry of EXTRAS."""
    return make_fleet(
        [{(0, "q_proj"): 8}, {}, {}, {(0, "q_proj"): 8}, {}, {}], SHAPES, LAYERS, PAGE_BYTES, dtype,
        device, seed=6, extras=EXTRAS,
    )  # fmt: skip


def _segments(fleet: Fleet, slots: Sequence[int]) -> Segments:
    segments = Segments(len(slots), fleet.pool.device)
    segments.build(slots)
    return segments


def check_embedding(fleet: Fleet, dtype: torch.dtype, slots: Sequence[int] = SLOTS) -> None:
    """Rows as in float64; those without such an adapter bit for bit as they were."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), HIDDEN, generator=generator).to(dtype).to(fleet.pool.device)
    tokens = torch.randint(VOCAB, (len(slots),), generator=generator)
    expected, before = x.double().cpu(), x.clone()
    for row, slot in enumerate(slots):
        found = fleet.matrices[slot - 1] if slot else {}
        if "embed_tokens.weight" in found:
            expected[row] = found["embed_tokens.weight"][tokens[row]].double()
        if "embed_tokens.a" in found:
            a, b = found["embed_tokens.a"].double(), found["embed_tokens.b"].double()
            expected[row] += b @ a[tokens[row]]
    embed_lora(x, tokens.to(x.device), fleet.pool, fleet.table, _segments(fleet, slots))
    _compare(x, before, expected, dtype, [slot in (2, 4, 5) for slot in slots])


def check_head(fleet: Fleet, dtype: torch.dtype, slots: Sequence[int] = SLOTS) -> None:
    """Logits as in float64; those of other rows bit for bit as they were."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(len(slots), HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(len(slots), VOCAB, generator=generator).to(fleet.pool.device)
    expected, before = logits.double().cpu(), logits.clone()
    for row, slot in enumerate(slots):
        found, h = fleet.matrices[slot - 1] if slot else {}, hidden[row].double()
        if "lm_head.weight" in found:
            expected[row] = found["lm_head.weight"].double() @ h
        if "lm_head.a" in found:
            expected[row] += found["lm_head.b"].double() @ (found["lm_head.a"].double() @ h)
    segments = _segments(fleet, slots)
    head_lora(logits, hidden.to(logits.device), fleet.pool, fleet.table, segments)
    _compare(logits, before, expected, torch.float32, [slot in (3, 4, 6) for slot in slots])


def _compare(
    found: torch.Tensor, before: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype,
    touched: list[bool],
) -> None:  # fmt: skip
    error = ((found.double().cpu() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE[dtype], error
    rest = [row for row, is_touched in enumerate(touched) if not is_touched]
    assert torch.equal(found[rest], before[rest])
    assert all(not torch.equal(found[r], before[r]) for r, t in enumerate(touched) if t)

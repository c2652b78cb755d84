"""How much of its bound this engine reaches, as measured; data, never a guess.

`efficiency.json` holds one line for each measured cell of `mlora bench --offline` (made from
docs/benchmarks by tools/efficiency.py): on which card, how the base is stored, how many rows, with
or without adapters, and the share of the least possible time of a decode step that was reached.
Cards of one compute capability count as one class: they run the same code. There is no line for a
class that nobody measured.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from multilora_cli.sizing.hardware import Gpu

FILE = "efficiency.json"
# A step that has half as much to read is not told: launches and the host, which do not shrink with
# the model, would count for more than they did. One that has more to read reaches at least as much.
_LEAST_WORK = 0.5
# A batch twice as large or half as large as the nearest measured one is still told; others are not.
_FARTHEST = 1.0


@dataclass(frozen=True)
class Measured:
    """One cell: the least time of a decode step over the time that it took."""

    card: str  # as the driver spells it
    sm: int
    storage: str  # none, fp8 or awq
    batch: int
    adapters: bool
    bound_ms: float  # the least time itself
    share: float
    commit: str

    @property
    def label(self) -> str:
        """Where the figure is from."""
        return f"measured on {self.card}, commit {self.commit[:10]}"


@dataclass(frozen=True)
class Step:
    """A planned decode step: rows, whether every row has an adapter, and its least time."""

    batch: int
    adapters: bool
    bound_ms: float


@lru_cache(maxsize=1)
def measured() -> tuple[Measured, ...]:
    """All cells that come with the package."""
    text = resources.files("multilora_cli.sizing").joinpath(FILE).read_text("utf-8")
    return tuple(Measured(**cell) for cell in json.loads(text)["cells"])


def nearest(cells: Sequence[Measured], gpu: Gpu, storage: str, step: Step) -> Measured | None:
    """The measured cell nearest to a step on this class of card; None where there is none."""
    batch = step.batch
    fitting = [
        cell
        for cell in cells
        if cell.sm == gpu.sm
        and cell.storage == storage
        and cell.adapters == step.adapters
        and step.bound_ms >= _LEAST_WORK * cell.bound_ms
    ]
    best = min(fitting, key=lambda cell: _distance(cell, batch), default=None)
    return best if best is not None and _distance(best, batch) <= _FARTHEST else None


def _distance(cell: Measured, batch: int) -> float:
    """In doublings."""
    return abs(math.log2(cell.batch / batch))

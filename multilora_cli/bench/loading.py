"""How fast adapters become hot while others decode, and what those others feel of it.

They also feel a long prompt that arrives, which is computed in chunks between their tokens.

Every adapter is loaded three times: for the first time in this process; once more after it was
evicted to its files, so that its digest and layout are known; and from host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from multilora_cli.bench.offline import Driver
from multilora_cli.engine.messages import AdapterRef, Submit

_QUIET_STEPS = 8  # between loads, so that one's gap is not counted for the next


@dataclass(frozen=True)
class LoadFigures:
    """Milliseconds: from the call to hot, one entry an adapter; and between tokens of the others.

    A load is done when the first step that may use the adapter is launched: whole steps that go by
    meanwhile, and what the host does for that one.
    """

    first_ms: tuple[float, ...]  # from files in the page cache, at their first load
    again_ms: tuple[float, ...]  # from files, with a known digest
    warm_ms: tuple[float, ...]  # from host memory
    step_ms: float  # median between tokens while nothing is loaded
    gap_median_ms: float  # between tokens during loads
    gap_max_ms: float
    prompt_tokens: int  # of the prompt that arrives
    prompt_gap_max_ms: float  # between tokens of the others until its first one


def measure_loads(
    driver: Driver, submits: Sequence[Submit], adapters: Sequence[AdapterRef], prompt: Submit
) -> LoadFigures:
    """Load `adapters` one by one while `submits` decode, then let `prompt` arrive, twice. Raises
    Refused where an adapter is refused or the answers end before that."""
    driver.begin(submits)
    quiet = driver.steps(4 * _QUIET_STEPS)
    gaps: list[float] = []
    rounds: tuple[Literal["warm", "cold"], ...] = ("cold", "warm", "cold")  # evicted to, after
    first, again, warm = (
        [_timed(driver, adapter, evict_to, gaps) for adapter in adapters] for evict_to in rounds
    )
    arrivals = [driver.arrive_beside(prompt) for _ in range(2)][1]  # once to warm up
    driver.cancel(submits)
    return LoadFigures(
        first_ms=tuple(first),
        again_ms=tuple(again),
        warm_ms=tuple(warm),
        step_ms=median(quiet) * 1e3,
        gap_median_ms=median(gaps) * 1e3,
        gap_max_ms=max(gaps) * 1e3,
        prompt_tokens=len(prompt.prompt),
        prompt_gap_max_ms=max(arrivals) * 1e3,
    )


def _timed(
    driver: Driver, adapter: AdapterRef, evict_to: Literal["warm", "cold"], gaps: list[float]
) -> float:
    """One load, then the eviction that the next round starts from; ms to hot."""
    seconds, during = driver.load_beside(adapter)
    gaps += during
    driver.evict(adapter, evict_to)
    driver.steps(_QUIET_STEPS)
    return seconds * 1e3

"""Where the engine's time goes: counters that /metrics shows and the benchmark reads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("schedule", "launch", "wait", "answer")
"""schedule: adapters and the next batch; launch: its tensors and kernels, on the host; wait: for
the device; answer: from sampled tokens to deltas."""


class PhaseTimes:
    """Seconds by phase of the loop, and of steps from launch (or the end of the one before) to end.

    One step ahead of the device the host's phases overlap with steps: what they add up to beside
    `wait` is the host's work, and a step takes longer than that only while the device is the limit.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        self._step_s = 0.0

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time of the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - began

    def step(self, seconds: float) -> None:
        """A step has ended."""
        self._steps += 1
        self._step_s += seconds

    def counters(self) -> dict[str, float]:
        """For the snapshot."""
        phases = {f"{phase}_seconds": seconds for phase, seconds in self._seconds.items()}
        return {"steps": self._steps, "step_seconds": self._step_s, **phases}

"""Where the engine's time goes: counters that /metrics shows and the benchmark reads."""

import time

PHASES = ("schedule", "launch", "wait", "answer", "beside")
"""schedule: adapters and the next batch; launch: its tensors and kernels, on the host; wait: for
the device; answer: from sampled tokens to deltas; beside: work of loads between two steps."""


class PhaseTimes:
    """Seconds by phase of the loop, and of steps from launch (or the end of the one before) to end.

    Of all steps, and once more of those with prompts in them: what the host does for those that
    only decode is the difference. Turns without a step are not counted.

    One step ahead of the device the host's phases overlap with steps: what they add up to beside
    `wait` is the host's work, and a step takes longer than that only while the device is the limit.
    """

    def __init__(self) -> None:
        self._decode = dict.fromkeys((*PHASES, "step"), 0.0)
        self._prompt = dict(self._decode)
        self._decode_steps = self._prompt_steps = 0
        self._at = 0.0

    def start(self) -> None:
        """The next phase begins now."""
        self._at = time.perf_counter()

    def end(self, phase: str, *, prompts: bool) -> None:
        """A phase of a step, with `prompts` or without, ends now, and another one begins."""
        now = time.perf_counter()
        (self._prompt if prompts else self._decode)[phase] += now - self._at
        self._at = now

    def step(self, seconds: float, *, prompts: bool) -> None:
        """A step has ended."""
        (self._prompt if prompts else self._decode)["step"] += seconds
        self._prompt_steps += prompts
        self._decode_steps += not prompts

    def counters(self) -> dict[str, float]:
        """For the snapshot."""
        found: dict[str, float] = {
            "steps": self._decode_steps + self._prompt_steps,
            "prompt_steps": self._prompt_steps,
        }
        for phase, seconds in self._prompt.items():
            found[f"{phase}_seconds"] = self._decode[phase] + seconds
            found[f"prompt_{phase}_seconds"] = seconds
        return found

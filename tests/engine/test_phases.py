"""What the loop's counters say: of all steps, and of those with prompts."""

import pytest

from multilora_cli.engine import phases
from multilora_cli.engine.phases import PHASES, PhaseTimes
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig


def test_a_phase_is_counted_once_for_all_and_once_for_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    times = PhaseTimes()
    for prompts, launch_s in ((False, 1.0), (True, 4.0), (False, 2.0)):
        now[0] += 50  # between two turns
        times.start()
        now[0] += 0.5
        times.end("schedule", prompts=prompts)
        now[0] += launch_s
        times.end("launch", prompts=prompts)
        times.step(10 * launch_s, prompts=prompts)
    found = times.counters()
    assert (found["steps"], found["prompt_steps"]) == (3, 1)
    assert (found["schedule_seconds"], found["prompt_schedule_seconds"]) == (1.5, 0.5)
    assert (found["launch_seconds"], found["prompt_launch_seconds"]) == (7.0, 4.0)
    assert (found["step_seconds"], found["prompt_step_seconds"]) == (70.0, 40.0)


def test_steps_are_told_apart_by_what_they_compute(fleet: SignatureFleet) -> None:
    """Four chunks of a prompt, the last of which samples, beside nothing; then tokens alone."""
    rig = Rig(fleet.base, max_num_batched_tokens=16, max_num_seqs=8)
    for _ in range(5):
        rig.step()  # turns without a step
    rig.ask([3] * 64, max_tokens=9)
    found = rig.counters()
    assert found["prompt_steps"] == 4
    assert found["steps"] - found["prompt_steps"] in (8, 9)  # one may be launched in vain
    for phase in PHASES:
        if phase != "beside":  # a CPU does nothing there
            assert 0 < found[f"prompt_{phase}_seconds"] < found[f"{phase}_seconds"]

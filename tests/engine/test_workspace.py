"""Scratch of the largest step, measured on a CPU against the formula that plans it."""

import torch
from torch.profiler import ProfilerActivity, profile

from multilora_cli.sizing.budget import cpu_workspace_bytes
from multilora_cli.sizing.geometry import read_geometry
from tests.engine.conftest import TinyFleet
from tests.engine.engine_kit import Rig

TOKENS, SEQS, RANK = 2048, 16, 64


def high_water(work: profile) -> int:
    """The most that was allocated at once while `work` was watched, bytes."""
    now = peak = 0
    for event in work.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU:
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def test_the_largest_step_stays_within_its_plan(tiny: TinyFleet) -> None:
    """A-RUN-15: prompts that fill a step, every one with an adapter, none longer than planned."""
    geometry = read_geometry(tiny.base)
    page = 2 * 2 * 2 * 16 * 16 * 4
    rig = Rig(
        tiny.base, pages=600, page=page, max_num_batched_tokens=TOKENS, max_num_seqs=SEQS,
        max_lora_rank=RANK, prefix_caching=False, debug=False, steps_ahead=0,
    )  # fmt: skip
    for ref in tiny.adapters:  # loads are not what is measured
        rig.ask([5, 6], ref, max_tokens=1)
    for i in range(SEQS):
        rig.submit([i + 1] * (TOKENS // SEQS), tiny.adapters[i % 3], max_tokens=2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as work:
        rig.step()
    planned = cpu_workspace_bytes(geometry, 4, TOKENS, SEQS, RANK)
    assert 0.5 * planned < high_water(work) <= planned

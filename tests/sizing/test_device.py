"""One cut of the device's memory, for plan and engine; and what differs from it."""

import math

import pytest

from multilora_cli.fleet.schema import Limits
from multilora_cli.sizing.device import DeviceCut, StepSizes, cut_device, deviations
from multilora_cli.sizing.hardware import find_gpu
from multilora_cli.sizing.quantization import FP8, NONE, Quantization
from tests.sizing.test_budget import LLAMA3_8B

H200 = find_gpu("h200")
STEP = StepSizes(8192, 256, 64, num_slots=257, max_context=8192, chip=H200.chip)


def cut(step: StepSizes = STEP, quantization: Quantization = NONE, **size: int) -> DeviceCut:
    return cut_device(LLAMA3_8B, quantization, (2, 2), step, **size)


def test_all_parts_are_within_what_is_available() -> None:
    plan = cut(available=80 * 2**30).plan
    parts = {"weights", "pool", "workspace", "tables", "graphs", "lists", "extras", "margin"}
    assert set(plan.parts()) == parts
    assert 0 <= 80 * 2**30 - sum(plan.parts().values()) < plan.page_bytes


def test_a_pool_of_a_given_size_gets_it() -> None:
    for quantization in (NONE, FP8):
        plan = cut(pool=2**30 + 7, quantization=quantization).plan
        assert plan.pool == 2**30 and plan.num_pages == 512


def test_nothing_is_captured_on_a_cpu_or_where_it_is_off() -> None:
    from dataclasses import replace

    for step in (replace(STEP, chip=None), replace(STEP, captured=False)):
        assert step.graph_rows == () and "graphs" not in cut(step, pool=2**30).plan.parts()


@pytest.mark.parametrize("max_seqs", [1, 3, 20, 65, 256, 600])
@pytest.mark.parametrize("max_tokens", [16, 64, 100, 512, 8192])
def test_no_captured_step_is_larger_than_its_buffers(max_seqs: int, max_tokens: int) -> None:
    limits = Limits(max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens)
    step = StepSizes.of_limits(limits, 300, 8192, H200.chip)
    largest = max(tokens for tokens, _ in step.captured_steps.in_order())
    assert max(largest, step.max_tokens) == step.most_rows
    assert all(prompts.num_tokens <= step.max_tokens for prompts in step.prompt_steps)


def test_every_running_sequence_decodes_in_each_step() -> None:
    limits = Limits(max_num_seqs=512, max_num_batched_tokens=64)
    assert StepSizes.of_limits(limits, 300, 8192, None).max_tokens == 512


def test_one_of_both_sizes_is_needed() -> None:
    with pytest.raises(ValueError, match="must be given"):
        cut()


def test_deviations_above_two_percent() -> None:
    planned = {"weights": 1000, "pool": 1000, "workspace": 1000, "tables": 0}
    allocated = {"weights": 1020, "pool": 1021, "workspace": 900, "tables": 0, "context": 5}
    found = deviations(planned, allocated)
    assert found == {"pool": pytest.approx(0.021), "workspace": pytest.approx(-0.1),
                     "context": math.inf}  # fmt: skip
    assert deviations(planned, {"weights": 1000}) == {}
    assert deviations({"margin": 100}, {"margin": 7}) == {}, "a margin need not be used"
    planned, piece = {"margin": 200 * 2**20}, 20 * 2**20
    assert deviations(planned, {"margin": 203 * 2**20 + piece}) == {}, "nor is another piece much"
    assert deviations(planned, {"margin": 220 * 2**20 + piece}) == {"margin": pytest.approx(0.2)}

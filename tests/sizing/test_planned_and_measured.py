"""What an H200 allocated, as recorded in docs/benchmarks, beside what is planned for that.

Only what no kernel's choice changes: pools of captured steps and work lists follow the kernels, and
tests/engine/test_step_memory.py compares those with the decoder as it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.sizing.budget import (
    BASE_KIND,
    CONTEXT_BYTES,
    CapturedSteps,
    StepKind,
    base_bytes,
    driver_graph_bytes,
    fixed_graph_bytes,
    graph_rows,
    prompt_steps,
)
from multilora_cli.sizing.device import NOTABLE, StepSizes, cut_device
from multilora_cli.sizing.quantization import AWQ, FP8, NONE
from multilora_cli.sizing.step_memory import StepScratch
from multilora_kernels.chip import H200
from multilora_kernels.layout import GROUPS
from tests.sizing.test_budget import LLAMA3_8B

STORAGES = {"none": NONE, "fp8": FP8, "awq": AWQ}
DATA = Path(__file__).parents[2] / "docs" / "benchmarks" / "plan-h200.jsonl"
RUNS = [json.loads(line) for line in DATA.read_text().splitlines()]


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: f"{run['quantization']}-{run['max_lora_rank']}"
)
def test_parts_within_two_percent(run: dict[str, Any]) -> None:
    quantization, allocated = STORAGES[run["quantization"]], run["allocated"]
    step = StepSizes(
        run["max_num_batched_tokens"], run["max_num_seqs"], run["max_lora_rank"],
        run["num_slots"], run["max_model_len"], chip=H200,
    )  # fmt: skip
    if "device_bytes" in run:
        cut = cut_device(LLAMA3_8B, quantization, (2, 2), step, available=run["device_bytes"])
        assert cut.plan.tables == pytest.approx(allocated["tables"], rel=NOTABLE)
    close = {"weights": base_bytes(LLAMA3_8B, 2, quantization).total, "context": CONTEXT_BYTES}
    for part, planned in close.items():
        assert planned == pytest.approx(allocated[part], rel=NOTABLE), part
    if "graphs" in run:
        # Adapters' launches were for all projections then, sized for one rank or for two, and steps
        # with more than 256 prompt tokens were not captured.
        ranks = (16, 64) if step.max_rank > 16 else (16,)
        kinds = (BASE_KIND, *(StepKind(tuple(GROUPS), rank) for rank in ranks))
        prompts = tuple(s for s in prompt_steps(step.max_seqs) if s.tokens <= 256)
        steps = CapturedSteps(graph_rows(step.max_seqs), prompts, kinds)
        kernel = StepScratch(LLAMA3_8B, 2, quantization, H200).kernel
        graphs = run["graphs"]
        assert len(steps.in_order()) == graphs["steps"]
        driver = driver_graph_bytes(LLAMA3_8B.num_layers, steps, kernel)
        assert driver == pytest.approx(graphs["driver"], rel=NOTABLE)
        fixed = fixed_graph_bytes(LLAMA3_8B, steps, step.max_context)
        assert fixed == pytest.approx(graphs["fixed"], rel=NOTABLE)

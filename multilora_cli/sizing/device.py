"""How a device's memory is cut, for a plan and for the engine alike: one function, both call it."""

from collections.abc import Mapping
from dataclasses import dataclass

from multilora_cli.errors import ModelError
from multilora_cli.fleet.schema import Limits
from multilora_cli.sizing.allocator import LARGE_PAGE
from multilora_cli.sizing.budget import (
    CapturedSteps,
    MemoryPlan,
    PromptStep,
    base_bytes,
    cpu_workspace_bytes,
    driver_graph_bytes,
    fixed_graph_bytes,
    graph_rows,
    max_blocks,
    plan_pool,
    prompt_steps,
    step_kinds,
    table_bytes,
)
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.pages import kv_page_bytes
from multilora_cli.sizing.quantization import Quantization
from multilora_cli.sizing.step_memory import StepScratch
from multilora_kernels.chip import Chip
from multilora_kernels.list_capacity import group_shapes, list_bytes
from multilora_kernels.lora_choice import GroupShape

NOTABLE = 0.02  # a part that takes more or less than planned by this share is worth a word


@dataclass(frozen=True)
class StepSizes:
    """What one step may be, as far as memory goes."""

    max_tokens: int
    max_seqs: int
    max_rank: int
    num_slots: int  # of the adapter table
    max_context: int  # tokens of the longest sequence
    chip: Chip | None  # the card; None: a CPU
    captured: bool = True  # decode steps as CUDA graphs; never on a CPU
    captured_prompts: bool = True  # and steps with chunks of prompts

    @classmethod
    def of_limits(
        cls, limits: Limits, num_slots: int, max_context: int, chip: Chip | None
    ) -> "StepSizes":
        """From a fleet's limits: every running sequence decodes in each step."""
        return cls(
            max_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
            max_seqs=limits.max_num_seqs,
            max_rank=limits.max_lora_rank,
            num_slots=num_slots,
            max_context=max_context,
            chip=chip,
        )

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """Rows of the decode steps that are captured."""
        return graph_rows(self.max_seqs) if self.chip is not None and self.captured else ()

    @property
    def captured_steps(self) -> CapturedSteps:
        """All that is captured."""
        return CapturedSteps(self.graph_rows, self.prompt_steps, step_kinds(self.max_rank))

    @property
    def prompt_steps(self) -> tuple[PromptStep, ...]:
        """Steps with prompts that are captured: none larger than a step may be."""
        if not self.graph_rows or not self.captured_prompts:
            return ()
        steps = prompt_steps(self.max_seqs)
        return tuple(step for step in steps if step.num_tokens <= self.max_tokens)

    @property
    def most_rows(self) -> int:
        """Token rows of the largest step, a captured one's spare rows included."""
        return max(self.max_tokens, *self.graph_rows, 0)


@dataclass(frozen=True)
class DeviceCut:
    """A plan, and the capacity of the adapter table in blocks."""

    plan: MemoryPlan
    max_blocks: int


def cut_device(
    geometry: ModelGeometry,
    quantization: Quantization,
    itemsizes: tuple[int, int],
    step: StepSizes,
    *,
    available: int | None = None,
    pool: int | None = None,
) -> DeviceCut:
    """The parts of `available` bytes, or those around a pool of a given size: where both are
    given, a smaller pool than that if need be. Raises Refused where no pool is left.

    `itemsizes` are those of the compute dtype and of K and V.
    """
    itemsize, kv_itemsize = itemsizes
    fixed = {"weights": base_bytes(geometry, itemsize, quantization).total}
    if step.chip is None:
        fixed["workspace"] = cpu_workspace_bytes(
            geometry, itemsize, step.max_tokens, step.max_seqs, step.max_rank
        )
    else:
        scratch = StepScratch(geometry, itemsize, quantization, step.chip)
        page = kv_page_bytes(geometry, kv_itemsize)
        fixed |= _on_card(scratch, step, group_shapes(geometry.module_shapes, page, itemsize))
    # The table depends on the pool it serves; without a given one it is counted for all that is
    # available, which is more.
    size = pool if pool is not None else available
    if size is None:
        raise ValueError("either what is available or the pool's size must be given")
    blocks = max_blocks(geometry, itemsize, size, kv_page_bytes(geometry, kv_itemsize))
    tables = table_bytes(geometry, step.num_slots, blocks)
    if pool is not None:
        around = pool + tables + sum(fixed.values())
        size = around if available is None else min(around, available)
    parts = fixed | {"tables": tables}
    plan = plan_pool(geometry, size, kv_itemsize, parts, on_card=step.chip is not None)
    return DeviceCut(plan, blocks)


def _on_card(
    scratch: StepScratch, step: StepSizes, shapes: Mapping[str, GroupShape]
) -> dict[str, int]:
    """The parts that only a card has, beside its workspace."""
    assert step.chip is not None
    geometry, steps = scratch.geometry, step.captured_steps
    captured = scratch.captured(steps.in_order()) if steps.rows else 0
    graphs = fixed_graph_bytes(geometry, steps, step.max_context) + captured
    workspace, margin = scratch.eager(step.max_tokens, step.max_seqs)
    return {
        "workspace": workspace,
        "margin": margin,
        "graphs": graphs + driver_graph_bytes(geometry.num_layers, steps, scratch.kernel),
        "lists": list_bytes(shapes, step.most_rows, step.max_seqs, step.max_rank, step.chip),
        "extras": driver_graph_bytes(geometry.num_layers, steps, scratch.kernel, extras=True),
    }


def check_context(asked: int | None, geometry: ModelGeometry) -> None:
    """Raise ModelError where base.max_model_len is beyond what the model was trained for."""
    if asked is not None and asked > geometry.max_position:
        raise ModelError(
            f"base.max_model_len: found {asked}, the model was trained for"
            f" {geometry.max_position} positions"
        )


def deviations(planned: Mapping[str, int], allocated: Mapping[str, int]) -> dict[str, float]:
    """Parts that took notably more (above 0) or less than planned, as a share of what was planned.

    Parts that were not measured are left out; one that was not planned at all counts as infinite.
    Of a margin less may be used, and so much more as torch maps at a time: which holes a load
    leaves between weights differs from run to run (AWQ on an H200: 202 and 214 MB, 199 planned).
    """
    found: dict[str, float] = {}
    for part, got in allocated.items():
        wanted = planned.get(part, 0)
        least, most = wanted, wanted
        if part == "margin":
            least, most = 0, wanted + LARGE_PAGE
        if not (1 - NOTABLE) * least <= got <= most + NOTABLE * wanted:
            found[part] = got / wanted - 1 if wanted else float("inf")
    return found

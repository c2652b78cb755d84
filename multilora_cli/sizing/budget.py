"""Device memory by part. The engine allocates from these numbers and `plan` prints them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from multilora_cli.errors import Refused
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_cli.sizing.pages import TARGETS, adapter_cost, kv_page_bytes, uniform_ranks
from multilora_cli.sizing.quantization import NONE, Quantization
from multilora_cli.units import format_size
from multilora_kernels.layout import (
    GROUPS,
    MATRICES,
    MODULES,
    TOKENS_PER_PAGE,
    Extras,
    chunk_length,
)

# Adapters loaded at run time find room in the table up to this many beside the fleet's own.
_SPARE_SLOTS = 64
_MIN_SLOTS = 256
_MAX_SLOTS = 4096
_SMALL_RANK = 8  # the narrowest tile: lower ranks take as much

# Decode steps that are captured, in rows; a step runs as the next larger one, its spare rows idle.
_GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_GRAPH_RANKS = (16, 64)
_ATTENTION_GROUPS = ("qkv", "o")
# Captured steps with prompts: spare tokens cost as much as others, so there are several sizes. The
# largest takes an H200 25 ms, as long as launching its kernels one by one takes the host.
MAX_CHUNKS = 16
_PROMPT_DECODES = (8, 64, 256)
_PROMPT_TOKENS = (64, 256, 512, 1024)
# Nodes of a captured step, counted on an H200: around the layers, and of each layer (four
# multiplies, two norms, RoPE with the write of K and V, attention, gating; one or two more where
# a multiply splits or quantises); its adapters (two launches for each multiply that they have), and
# what adapters with extras add to those (one for each of the four).
_STEP_NODES = 27
_NODES = 10
_LORA_NODES = 2
_EXTRA_NODES = 4
# What the driver keeps of a node, by what multiplies the linears: of an 8B on an H200 98 MiB of 57
# steps in 16 bits, 68 MiB of 39 in FP8, 56 MiB of 39 in 4 bits (docs/benchmarks/plan-h200.jsonl).
NODE_BYTES = {"library": 3480, "fp8_gemm": 3530, "awq_gemm": 2910, "fp8_weight_only": 2910}
# What the driver takes of a card for the engine's process, beside all of the parts: 524 MiB for the
# context, the rest for the code and constants of torch's, cuBLAS's and our kernels. As counted on
# an H200 under torch 2.11 and CUDA 13, the same for bases in 16 bits, FP8 and AWQ.
CONTEXT_BYTES = 756 * 2**20

_MATRIX_FIELDS = 4  # per slot and matrix of embedding or head (multilora_kernels.matrix_table)

# The adapter table holds 8 bytes an entry and three entries a block, since tiles of different
# modules share one cell size (multilora_kernels.table).
ENTRIES_PER_BLOCK = 3
TABLE_BYTES_PER_BLOCK = ENTRIES_PER_BLOCK * 8


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of a base model's weights by part."""

    embedding: int
    head: int  # 0 where it is tied to the embedding
    projections: dict[str, int]  # by module, over all layers, biases included
    norms: int

    @property
    def linears(self) -> int:
        """The seven projections of all layers."""
        return sum(self.projections.values())

    @property
    def total(self) -> int:
        """All weights."""
        return self.embedding + self.head + self.linears + self.norms


@dataclass(frozen=True)
class MemoryPlan:
    """Where device memory goes, bytes."""

    weights: int
    workspace: int  # activations, logits and LoRA intermediates of the largest step
    tables: int  # adapter table
    pool: int
    page_bytes: int
    graphs: int = 0  # captured decode steps
    lists: int = 0  # work lists of the LoRA kernels, and their partial results
    extras: int = 0  # decode steps captured when adapters with extras first need them
    margin: int = 0  # what torch keeps at most beyond what tensors hold at once

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool // self.page_bytes

    def parts(self) -> dict[str, int]:
        """Bytes by part, for the start panel."""
        return {
            "weights": self.weights,
            "pool": self.pool,
            "workspace": self.workspace,
            "tables": self.tables,
            **({"graphs": self.graphs} if self.graphs else {}),
            **({"lists": self.lists} if self.lists else {}),
            **({"extras": self.extras} if self.extras else {}),
            **({"margin": self.margin} if self.margin else {}),
        }


def base_bytes(
    geometry: ModelGeometry, itemsize: int, quantization: Quantization = NONE
) -> BaseBytes:
    """Bytes of a base's weights; `itemsize` of the compute dtype, which all but linears keep."""
    table = geometry.vocab_size * geometry.hidden_size * itemsize
    shapes = geometry.module_shapes
    projections = {
        module: geometry.num_layers * d_out * (module in geometry.biased_modules) * itemsize
        for module, (_, d_out) in shapes.items()
    }
    for layer in range(geometry.num_layers):
        for modules in GROUPS.values():
            parts = quantization.part_bytes(
                [projection_name(layer, module) for module in modules],
                shapes[modules[0]][0],
                [shapes[module][1] for module in modules],
                itemsize,
            )
            for module, size in zip(modules, parts, strict=True):
                projections[module] += size
    per_layer = 2 * geometry.hidden_size + 2 * geometry.head_dim * geometry.qk_norm
    return BaseBytes(
        embedding=table,
        head=0 if geometry.tie_word_embeddings else table,
        projections=projections,
        norms=(geometry.num_layers * per_layer + geometry.hidden_size) * itemsize,
    )


def cpu_workspace_bytes(
    geometry: ModelGeometry, itemsize: int, max_tokens: int, max_seqs: int, max_rank: int
) -> int:
    """High-water mark of one step's scratch on a CPU: `max_tokens` rows, `max_seqs` sampled.

    One layer's hidden state, residual and normed input, then either q, k, v and the attention's
    output, or gate, up, silu(gate) and the product. Logits are float32 and the sampler keeps four
    such arrays. LoRA intermediates are float32 [tokens, 3 x rank] of the widest launch (q, k, v).
    """
    attention = 2 * geometry.q_size + 2 * geometry.kv_size
    widest = 3 * geometry.hidden_size + max(attention, 4 * geometry.intermediate_size)
    logits = 4 * max_seqs * geometry.vocab_size * 4
    return max_tokens * widest * itemsize + logits + max_tokens * 3 * max_rank * 4


def graph_rows(max_seqs: int) -> tuple[int, ...]:
    """Rows of the decode steps that are captured where up to `max_seqs` sequences run."""
    covering = next((rows for rows in _GRAPH_ROWS if rows >= max_seqs), _GRAPH_ROWS[-1])
    return tuple(rows for rows in _GRAPH_ROWS if rows <= covering)


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Room of a captured step with prompts: rows of one token, and tokens of up to 16 chunks."""

    decodes: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Token rows, spare ones included."""
        return self.decodes + self.tokens


def prompt_steps(max_seqs: int) -> tuple[PromptStep, ...]:
    """Steps with prompts that are captured where up to `max_seqs` sequences run."""
    covering = next((rows for rows in _PROMPT_DECODES if rows >= max_seqs), _PROMPT_DECODES[-1])
    decodes = [rows for rows in _PROMPT_DECODES if rows <= covering]
    return tuple(PromptStep(rows, tokens) for rows in decodes for tokens in _PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a captured step launches for adapters."""

    groups: tuple[str, ...]  # of projections (`multilora_kernels.layout.GROUPS`); none: the base
    # Sizes the launches and nothing else: work of higher ranks is walked in turns.
    rank: int


BASE_KIND = StepKind((), 0)


def step_kinds(max_rank: int) -> tuple[StepKind, ...]:
    """What each of those steps is captured for: the base alone, adapters of the attention, and
    adapters of any modules; a launch without work would stand between its neighbours all the same.
    """
    rank = next((rank for rank in _GRAPH_RANKS if rank >= max_rank), _GRAPH_RANKS[-1])
    return BASE_KIND, StepKind(_ATTENTION_GROUPS, rank), StepKind(tuple(GROUPS), rank)


def step_kind(kinds: Sequence[StepKind], groups: Collection[str]) -> StepKind:
    """Which of `step_kinds` a step runs as whose adapters have modules of `groups`."""
    return next(kind for kind in kinds[1:] if set(groups) <= set(kind.groups))


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """The steps that are captured: decode steps by rows, then those with prompts."""

    rows: tuple[int, ...]
    prompts: tuple[PromptStep, ...]
    kinds: tuple[StepKind, ...]  # each step is captured once for every one

    def in_order(self) -> list[tuple[int, int]]:
        """(token rows, rows that decode) in the order of their capture: the largest first, each
        once for every kind."""
        steps = [(rows, rows) for rows in sorted(self.rows, reverse=True)]
        prompts = sorted(self.prompts, key=lambda step: (step.num_tokens, step.decodes))
        steps += [(step.num_tokens, step.decodes) for step in reversed(prompts)]
        return [step for step in steps for _ in self.kinds]


def fixed_graph_bytes(geometry: ModelGeometry, steps: CapturedSteps, max_context: int) -> int:
    """Device bytes of the tensors that captured steps read, and of the logits that they leave."""
    if not steps.rows:
        return 0
    # Decode steps and those with prompts have tensors of their own.
    sequences = [max(steps.rows)]
    if steps.prompts:
        sequences.append(max(step.decodes for step in steps.prompts) + MAX_CHUNKS)
    columns = -(-max_context // (16 * TOKENS_PER_PAGE)) * 16
    return sum(sequences) * (2 * columns + geometry.vocab_size) * 4


def driver_graph_bytes(
    num_layers: int, steps: CapturedSteps, kernel: str = "library", *, extras: bool = False
) -> int:
    """What the driver keeps of captured steps, whose linears `kernel` multiplies; `extras`: of
    those that adapters with extras need, which are decode steps with adapters captured once more.
    """
    if not steps.rows:
        return 0
    adapted = [kind for kind in steps.kinds if kind.groups]
    launches = sum(_LORA_NODES * len(kind.groups) for kind in adapted)
    if extras:
        per_layer = len(adapted) * (_NODES + _EXTRA_NODES) + launches
        nodes = len(steps.rows) * (len(adapted) * _STEP_NODES + num_layers * per_layer)
    else:
        per_layer = len(steps.kinds) * _NODES + launches
        once = len(steps.kinds) * _STEP_NODES + num_layers * per_layer
        nodes = (len(steps.rows) + len(steps.prompts)) * once
    return nodes * NODE_BYTES[kernel]


def num_slots(num_adapters: int) -> int:
    """Rows of the adapter table for a fleet of `num_adapters`: how many may be hot, and slot 0.

    A slot costs a few KiB, pages are what limits hot adapters; so this is generous.
    """
    return 1 + min(max(num_adapters + _SPARE_SLOTS, _MIN_SLOTS), _MAX_SLOTS)


def max_blocks(geometry: ModelGeometry, itemsize: int, pool_bytes: int, page_bytes: int) -> int:
    """Blocks of all adapters that a pool could hold: the capacity of the adapter table.

    Enough for a pool full of what has the most rank tiles a page: adapters of rank 8 with DoRA, on
    attention or on all projections. That is 32 blocks a page of an 8B, and 75 of Qwen2.5-7B, whose
    pages are small.
    """
    chunk = chunk_length(page_bytes, itemsize)
    width = max(
        -(-d_in // chunk) - (-d_out // chunk) for d_in, d_out in geometry.module_shapes.values()
    )
    per_page = 0.0
    for modules in TARGETS.values():
        ranks = uniform_ranks(geometry, _SMALL_RANK, modules)
        vectors = Extras(frozenset((layer, name, "scale") for layer, name in ranks))
        cost = adapter_cost(geometry, ranks, page_bytes, itemsize, vectors)
        cells = 2 * len(modules)  # a tile and a vector of each
        per_page = max(per_page, cells * geometry.num_layers * width / cost.num_pages)
    pages = max(pool_bytes // page_bytes, 1)
    return math.ceil(per_page * pages / ENTRIES_PER_BLOCK)


def table_bytes(geometry: ModelGeometry, num_slots: int, max_blocks: int) -> int:
    """Bytes of an adapter table for `num_slots` slots and `max_blocks` blocks."""
    smallest = geometry.num_layers * len(MODULES) * num_slots
    vector_cells = num_slots * len(MODULES) * 4
    matrices = num_slots * len(MATRICES) * _MATRIX_FIELDS * 4 + 8 * max_blocks
    return TABLE_BYTES_PER_BLOCK * (max_blocks + smallest) + vector_cells + matrices


def plan_pool(
    geometry: ModelGeometry,
    available: int,
    kv_itemsize: int,
    parts: Mapping[str, int],
    *,
    on_card: bool = True,
) -> MemoryPlan:
    """The pool that `available` bytes leave beside the other parts of a MemoryPlan, by name.

    Raises Refused where none fits.
    """
    page = kv_page_bytes(geometry, kv_itemsize)
    pool = (available - sum(parts.values())) // page * page
    if pool < page * 2:
        need = sum(parts.values()) + 2 * page
        named = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        raise Refused(
            f"the base does not fit: {format_size(need)} needed ({named}),"
            f" {format_size(available)} available",
            hint=(
                "quantise the base, lower limits.max_num_batched_tokens, or use a larger card"
                if on_card
                else "a CPU holds weights in 32 bits: take a smaller base, or a machine with a card"
                " (mlora plan --gpu says which)"
            ),
        )
    return MemoryPlan(pool=pool, page_bytes=page, **parts)

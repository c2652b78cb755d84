"""The tensors of a step on a card, in the order in which the decoder takes and drops them.

Run through the allocator's rules they say what a step keeps: to the segment, where the kernels'
own choices are known, and tests/engine/test_step_memory.py compares with what the decoder does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from multilora_cli.sizing.allocator import ENDS, Allocator, Block
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.quantization import Quantization
from multilora_kernels import hopper_choice
from multilora_kernels.chip import Chip, tuned_table
from multilora_kernels.layout import GROUPS
from multilora_kernels.split_choice import Tile, bucket_of, choose_tile

# Splits of a row's context that decode attention may run side by side.
_DECODE_SPLITS = 32
# Logits and their tokens that a row's truncation may list (multilora_kernels.pick_tokens).
_LISTED_BYTES = 4096 * 4
_SLICE_BYTES = 64 * 2**20  # of W, widened at a time (multilora_kernels.slices)
# Rows up to which a multiply splits K, where nothing was tuned, and the least rows of its tiles.
_SPLIT_ROWS = {"fp8_gemm": 64, "awq_gemm": 128, "fp8_weight_only": 128}
_LEAST_ROWS = {"fp8_gemm": 16, "awq_gemm": 8, "fp8_weight_only": 8}
_LAYERS = 3  # after which every further one finds the room of the one before


def cublas_bytes(chip: Chip) -> int:
    """Scratch that torch gives cuBLAS for each stream that calls it, at the first call."""
    return 32 * 2**20 if chip.sm in (90, 100) else 8 * 2**20 + 128 * 2**10


@dataclass(frozen=True)
class StepScratch:
    """What one card's kernels take for steps of a model beside weights and pages."""

    geometry: ModelGeometry
    itemsize: int  # of the compute dtype
    quantization: Quantization  # as it lies on the device
    chip: Chip

    @property
    def kernel(self) -> str:
        """What multiplies the packed linears: one of ours by its name, or the library."""
        stored = self.quantization
        if stored.method == "none" or stored.placement == "dense":
            return "library"
        if stored.method == "awq":
            return "awq_gemm"
        return "fp8_weight_only" if stored.placement == "weight_only" else "fp8_gemm"

    def eager(self, max_tokens: int, max_seqs: int) -> tuple[int, int]:
        """The most bytes of tensors in the largest step, every sequence of it sampled in the
        dearest way; and what torch keeps beyond them.

        `max_seqs` rows of `max_tokens` decode, the others are one prompt.
        """
        memory = StepMemory(self, has_library=True)  # since the first steps
        hidden = memory.forward(max_tokens, max_seqs)
        rows = memory.take(max_seqs * self.geometry.hidden_size * self.itemsize)
        memory.head(max_seqs)
        logits = max_seqs * self.geometry.vocab_size * 4
        taken = [memory.take(logits)]
        memory.give(rows)
        taken.append(memory.take(logits))  # a copy, for bias and penalties
        memory.give(memory.take(logits))  # how often each token was said
        memory.give(*[memory.take(max_seqs * _LISTED_BYTES) for _ in range(2)])
        taken.append(memory.take(logits))  # log-probabilities
        memory.give(*hidden, *taken)
        return memory.peak + cublas_bytes(self.chip), memory.kept - memory.peak + ENDS

    def captured(self, steps: Sequence[tuple[int, int]]) -> int:
        """Bytes of the pool that captured steps share: (token rows, rows that decode) of each, in
        the order of their capture."""
        memory = StepMemory(self)
        for tokens, decodes in steps:
            memory.give(*memory.forward(tokens, decodes), *memory.head(decodes))
        return memory.kept


class StepMemory(Allocator):
    """The tensors of steps, one after another."""

    def __init__(self, scratch: StepScratch, *, has_library: bool = False) -> None:
        super().__init__()
        self._of = scratch
        self._has_library = has_library  # whether the library's scratch has been taken

    def forward(self, tokens: int, decodes: int) -> list[Block | None]:
        """A pass over some layers, which all do the same; returns what is left: hidden states."""
        geometry = self._of.geometry
        indices = [self.take(tokens * 8) for _ in range(3)]
        tables = [self.take(tokens * geometry.head_dim // 2 * 4) for _ in range(2)]
        stream = tokens * geometry.hidden_size * self._of.itemsize
        x, residual = self.take(stream), self.take(stream)
        for _ in range(_LAYERS):
            x = self._layer(x, tokens, decodes)
        self.give(*tables, residual, *indices)
        return [x]

    def head(self, rows: int) -> list[Block | None]:
        """What the logits of so many rows take beside themselves."""
        self._library()
        return [self.take(rows * 8), self.take(rows * 8)]

    def _layer(self, x: Block | None, tokens: int, decodes: int) -> Block | None:
        geometry, size = self._of.geometry, self._of.itemsize
        normed = self._quantised("qkv", tokens)
        packed = self._multiply("qkv", tokens)
        heads = tokens * geometry.q_size * size
        query, attended = self.take(heads), self.take(heads)
        parts = decodes * geometry.num_heads * _DECODE_SPLITS * 4
        self.give(*[self.take(parts * geometry.head_dim), self.take(parts * 2)])
        rows = self._quantised("o", tokens)
        out = self._multiply("o", tokens)
        self.give(*rows, packed, query, attended)
        rows = self._quantised("gate_up", tokens)
        self.give(*reversed(normed))
        gate_up = self._multiply("gate_up", tokens)
        product = self.take(tokens * geometry.intermediate_size * size)
        gated = self._quantised("down", tokens)
        self.give(gate_up)
        down = self._multiply("down", tokens)
        # x last: whoever called the layer holds it until then.
        self.give(product, *reversed(gated), out, *reversed(rows), x)
        return down

    def _shape(self, group: str) -> tuple[int, int]:
        """Columns and rows of the group's packed weight."""
        shapes = [self._of.geometry.module_shapes[module] for module in GROUPS[group]]
        return sum(d_out for _, d_out in shapes), shapes[0][0]

    def _quantised(self, group: str, tokens: int) -> list[Block | None]:
        """Rows in FP8 beside the plain ones, and their scales."""
        if self._of.kernel != "fp8_gemm":
            return []
        width = self._shape(group)[1]
        scales = -(-width // 128) if self._of.quantization.granularity == "block" else 1
        return [self.take(tokens * width), self.take(tokens * scales * 4)]

    def _multiply(self, group: str, tokens: int) -> Block | None:
        """The product; what the multiply takes meanwhile is given back."""
        n, k = self._shape(group)
        parts = self._part_bytes(tokens, n, k)
        if parts is None:
            return self._by_library(tokens, n, k)
        out = self.take(tokens * n * self._of.itemsize)
        self.give(self.take(parts))
        return out

    def _part_bytes(self, tokens: int, n: int, k: int) -> int | None:
        """Sums that the programs of a multiply of ours leave for the last of them; None: the
        library multiplies."""
        kernel, shape = self._of.kernel, f"n{n}-k{k}"
        if kernel == "library":
            rows = tuned_table(self._of.chip, "bf16_rows").get(shape, {})
            if tokens == 1:
                return 0
            if tokens > int(rows.get("max_rows", 0)):
                return None
            return _parts(int(rows.get("split_k", 1)), tokens, n)
        hopper = hopper_choice.choose_launch(tokens, n, k, self._of.chip)
        if kernel == "awq_gemm" and hopper is not None:
            return hopper.partial_bytes(tokens, n)
        best = tuned_table(self._of.chip, kernel).get(shape, {})
        if tokens > int(best.get("max_split", best.get("max_fused", _SPLIT_ROWS[kernel]))):
            return None
        base = Tile(block_m=bucket_of(tokens, _LEAST_ROWS[kernel]))
        tile = choose_tile(kernel, base, n, k, self._of.chip, lambda tile: 0)
        rows = -(-tokens // tile.block_m) * tile.block_m
        return _parts(tile.split_k, rows, -(-n // tile.block_n) * tile.block_n)

    def _by_library(self, tokens: int, n: int, k: int) -> Block | None:
        """The product by cuBLAS, and what is made for it."""
        kernel, size = self._of.kernel, self._of.itemsize
        best = tuned_table(self._of.chip, kernel).get(f"n{n}-k{k}", {})
        by_block = self._of.quantization.granularity == "block"
        is_scaled = tokens <= int(best.get("max_scaled", 0)) or size != 2
        before, slices = 0, 0
        if kernel in ("awq_gemm", "fp8_weight_only"):
            slices = self._slice(n, k, best)
        elif kernel == "fp8_gemm" and by_block:
            before, slices = tokens * k * size, self._slice(n, k, {})
        elif kernel == "fp8_gemm" and is_scaled:
            before = tokens * n * 4
        first = self.take(before)
        if first is not None and not slices:
            self._library()  # what the product is then made from
        out = self.take(tokens * n * size)
        widened = self.take(slices)
        self._library()
        self.give(widened, first)
        return out

    def _slice(self, n: int, k: int, best: dict[str, object]) -> int:
        """Bytes of the rows of W that are widened at a time."""
        limit = int(str(best.get("slice_bytes", _SLICE_BYTES)))
        return min(n, max(128, limit // (2 * k) // 128 * 128)) * k * self._of.itemsize

    def _library(self) -> None:
        """What cuBLAS gets once, and keeps."""
        if not self._has_library:
            self.take(cublas_bytes(self._of.chip))
            self._has_library = True


def _parts(splits: int, rows: int, columns: int) -> int:
    """Bytes of float32 sums of so many splits; one alone writes the product."""
    return splits * rows * columns * 4 if splits > 1 else 0

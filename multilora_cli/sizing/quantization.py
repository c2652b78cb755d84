"""How a base's linear layers are stored, in its checkpoint and on the device, and what that costs.

The bytes are those of the forms that the kernels read (multilora_kernels.awq_pack, fp8_gemm,
fp8_weight_only), padding included: what is planned is what is allocated.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from multilora_cli.errors import ModelError

Method = Literal["none", "awq", "fp8"]
Layout = Literal["autoawq", "compressed"]
Granularity = Literal["tensor", "channel", "block"]
Activations = Literal["none", "dynamic", "static"]
Placement = Literal["packed", "weight_only", "dense"]

BLOCK = 128  # rows and columns of an FP8 scale block; inputs and rows of a packed INT4 block
_ROWS_PER_COUNTER = 64  # of the split multiplies


@dataclass(frozen=True)
class Quantization:
    """Storage of the linear layers; embeddings, norms and the head stay in the compute dtype."""

    method: Method = "none"
    group_size: int = 128  # awq: input elements that share a scale; -1: a whole column
    zero_point: bool = True  # awq: stored zero points; else 8
    granularity: Granularity = "channel"  # fp8: what one weight scale covers
    activations: Activations = "dynamic"  # fp8: whose scale; none: they are not quantised
    layout: Layout = "autoawq"  # awq: whose tensors
    upper_bound: float = float("inf")  # fp8: of the largest magnitude that sets a row's scale
    ignored: tuple[str, ...] = ()  # modules kept as they are: see `covers`
    targets: tuple[str, ...] = ()  # modules quantised; none named: all
    at_load: bool = False  # the checkpoint is 16-bit, its linears are quantised while they load
    placement: Placement = "packed"

    def covers(self, name: str) -> bool:
        """Whether the module `name`, such as model.layers.0.mlp.up_proj, is stored quantised."""
        if self.method == "none" or any(_names(entry, name) for entry in self.ignored):
            return False
        return not self.targets or any(_names(entry, name) for entry in self.targets)

    def on(self, *, gpu: bool, has_fp8: bool, itemsize: int) -> "Quantization":
        """As it lies on a device with a compute dtype of `itemsize` bytes.

        On a CPU weights are dequantised at load: for 4096 x 4096 the multiply then takes 2.5 ms,
        unpacking it every time 80 ms. The kernels multiply 16-bit activations; an FP8 multiply
        needs tensor cores that know it.
        """
        if self.placement == "dense" or not gpu or itemsize == 4:
            return replace(self, placement="dense")
        if self.method == "fp8" and (not has_fp8 or self.activations == "none"):
            return replace(self, placement="weight_only")
        return replace(self, placement="packed")

    def part_bytes(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], itemsize: int
    ) -> list[int]:
        """Bytes of each part of one packed weight: what it adds to the parts before it.

        `names` are the modules whose rows [d_out, d_in] lie one after another. Raises ModelError
        where a group does not divide the input.
        """
        quantised = [self.covers(name) and self.placement != "dense" for name in names]
        if all(quantised) and self._fuses(d_outs):
            sums = [
                self._packed(d_in, sum(d_outs[: count + 1]), names[0])
                for count in range(len(d_outs))
            ]
            return [after - before for before, after in zip([0, *sums], sums, strict=False)]
        return [
            self._packed(d_in, d_out, name) if packed else d_in * d_out * itemsize
            for name, d_out, packed in zip(names, d_outs, quantised, strict=True)
        ]

    def _fuses(self, d_outs: Sequence[int]) -> bool:
        """Scale blocks of a part must not reach into the next one."""
        by_block = self.method == "fp8" and self.granularity == "block"
        return not by_block or not any(d_out % BLOCK for d_out in d_outs[:-1])

    def _packed(self, d_in: int, d_out: int, name: str) -> int:
        return self._int4(d_in, d_out, name) if self.method == "awq" else self._fp8(d_in, d_out)

    def _int4(self, d_in: int, d_out: int, name: str) -> int:
        """4 bits a weight, and per group and row a word of 32 with scale and zero point."""
        group = d_in if self.group_size == -1 else self.group_size
        if d_in % group:
            raise ModelError(f"{name}: group_size {group} does not divide an input of {d_in}")
        rows, blocks = _padded(d_out), _padded(d_in) // BLOCK
        groups = 1 if d_in == group else max(BLOCK // group, 1)
        return rows * blocks * (BLOCK // 2 + 4 * groups) + 4 * (rows // _ROWS_PER_COUNTER)

    def _fp8(self, d_in: int, d_out: int) -> int:
        """A byte a weight, and fp32 scales."""
        scales = d_out
        if self.granularity == "block":
            scales = _padded(d_out) // BLOCK * (_padded(d_in) // BLOCK)
        columns = _padded(d_in) if self.placement == "weight_only" else d_in
        return d_out * columns + 4 * (scales + -(-d_out // _ROWS_PER_COUNTER))

    def describe(self) -> str:
        """In words, for tables: `AWQ INT4, groups of 128`."""
        if self.method == "none":
            return "16-bit"
        if self.method == "awq":
            words = "AWQ INT4, " + (
                "one group a column" if self.group_size == -1 else f"groups of {self.group_size}"
            )
        else:
            words = f"FP8, a scale per {self.granularity}"
        if self.at_load:
            words += ", quantised at load"
        return (
            words
            + {"packed": "", "weight_only": ", weight-only", "dense": ", dequantised"}[
                self.placement
            ]
        )


NONE = Quantization()
AWQ = Quantization("awq")
FP8 = Quantization("fp8")


def choose_quantization(wanted: str, stored: Quantization, where: str) -> Quantization:
    """What `base.quantization` makes of a checkpoint. Raises ModelError where nothing can.

    `none` dequantises at load, `fp8` quantises a 16-bit checkpoint at load.
    """
    if wanted in ("auto", stored.method):
        return stored
    if wanted == "none":
        return replace(stored, placement="dense")
    if stored.method != "none":
        raise ModelError(
            f"{where}: base.quantization: found {wanted}, the checkpoint is {stored.method}",
            hint="leave base.quantization at auto, or name the 16-bit checkpoint",
        )
    if wanted == "fp8":
        return replace(FP8, at_load=True)
    raise ModelError(
        f"{where}: base.quantization: found {wanted}, the checkpoint is 16-bit",
        hint="make one with `mlora quantize MODEL --to awq`, or use base.quantization: fp8",
    )


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _names(entry: str, module: str) -> bool:
    """Whether an entry of a quantization_config names the module.

    `re:` is a pattern from the name's start, as compressed-tensors has it; else the entry's dotted
    components are the module's name or a run within it: lm_head, model.layers.0, down_proj.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."

"""How a base's linear layers are stored, read from quantization_config, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from multilora_cli.errors import ModelError

Method = Literal["none", "awq", "fp8"]
Granularity = Literal["tensor", "channel", "block"]

BLOCK = 128  # rows and columns of an FP8 scale block
_REFUSED = {
    "gptq": "act-order and its own zero points are another layout; requantise with `--to awq`",
    "bitsandbytes": "its blocks are another layout; serve the 16-bit model or quantise it to awq",
    "modelopt": "only its FP8 form is known; requantise to fp8",
    "mxfp4": "4-bit floats are not read",
}


@dataclass(frozen=True)
class Quantization:
    """Storage of the linear layers; embeddings, norms and the head stay in the compute dtype."""

    method: Method = "none"
    group_size: int = 128  # awq: input elements that share a scale; -1: a whole column
    zero_point: bool = True  # awq
    granularity: Granularity = "channel"  # fp8: what one weight scale covers
    static_activations: bool = False  # fp8: the checkpoint brings the activation scale

    def linear_bytes(self, d_in: int, d_out: int, itemsize: int) -> int:
        """Bytes of one [d_out, d_in] weight with its scales and zero points.

        Raises ModelError where a group does not divide the input.
        """
        if self.method == "none":
            return d_in * d_out * itemsize
        if self.method == "awq":
            group = d_in if self.group_size == -1 else self.group_size
            if d_in % group:
                raise ModelError(f"group_size {group} does not divide an input of {d_in}")
            scales = d_in // group * d_out
            return d_in * d_out // 2 + 2 * scales + (scales // 2 if self.zero_point else 0)
        scales = {
            "tensor": 1,
            "channel": d_out,
            "block": -(-d_out // BLOCK) * -(-d_in // BLOCK),
        }[self.granularity]
        return d_in * d_out + 4 * scales

    def describe(self) -> str:
        """In words, for tables: `AWQ INT4, groups of 128`."""
        if self.method == "none":
            return "16-bit"
        if self.method == "awq":
            return "AWQ INT4, " + (
                "one group a column" if self.group_size == -1 else f"groups of {self.group_size}"
            )
        return f"FP8, a scale per {self.granularity}"


NONE = Quantization()
AWQ = Quantization("awq")
FP8 = Quantization("fp8")


def read_quantization(config: Mapping[str, Any] | None, where: str) -> Quantization:
    """The format in a quantization_config. Raises ModelError naming what is not read."""
    if not config:
        return NONE
    method = config.get("quant_method")
    if method == "awq":
        return _awq(config, where)
    if method == "fp8":
        block = config.get("weight_block_size")
        static = config.get("activation_scheme") == "static"
        return Quantization(
            "fp8", granularity="block" if block else "tensor", static_activations=static
        )
    if method == "fbgemm_fp8":
        return FP8
    if method == "compressed-tensors":
        return _compressed_tensors(config, where)
    why = _REFUSED.get(str(method), "expected awq, fp8, fbgemm_fp8 or compressed-tensors")
    raise ModelError(f"{where}: quantization_config.quant_method: found {method!r}", hint=why)


def _awq(config: Mapping[str, Any], where: str) -> Quantization:
    bits = config.get("bits", config.get("w_bit", 4))
    group = config.get("group_size", config.get("q_group_size", 128))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise ModelError(f"{where}: quantization_config.bits: found {bits!r}, expected 4")
    if group not in (32, 64, 128, -1):
        raise ModelError(
            f"{where}: quantization_config.group_size: found {group!r}, expected 32, 64, 128 or -1"
        )
    if version != "gemm":
        raise ModelError(
            f"{where}: quantization_config.version: found {version!r}, expected 'gemm'",
            hint="quantise again with version gemm: mlora quantize MODEL --to awq",
        )
    return Quantization("awq", group_size=group, zero_point=bool(config.get("zero_point", True)))


def _compressed_tensors(config: Mapping[str, Any], where: str) -> Quantization:
    groups = config.get("config_groups")
    schemes = [
        group.get("weights") or {}
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    ]
    if len(schemes) != 1:
        raise ModelError(
            f"{where}: quantization_config.config_groups: found {len(schemes)} groups, expected one"
        )
    weights = schemes[0]
    kind = (weights.get("type"), weights.get("num_bits"))
    strategy = weights.get("strategy")
    if kind == ("int", 4) and strategy in ("group", "channel"):
        group = weights.get("group_size") if strategy == "group" else -1
        if group not in (32, 64, 128, -1):
            raise ModelError(f"{where}: group_size: found {group!r}, expected 32, 64, 128 or -1")
        return Quantization("awq", group_size=group, zero_point=not weights.get("symmetric", True))
    if kind == ("float", 8) and strategy in ("tensor", "channel", "block"):
        activations = next(iter(groups.values())).get("input_activations") or {}  # type: ignore[union-attr]
        static = activations.get("dynamic") is False
        return Quantization("fp8", granularity=strategy, static_activations=static)
    raise ModelError(
        f"{where}: quantization_config: found weights {kind[0]} of {kind[1]} bits by {strategy},"
        " expected int4 by group or channel, or float8 by tensor, channel or block"
    )

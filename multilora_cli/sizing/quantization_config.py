"""Reads a quantization_config: AutoAWQ, FP8, FBGEMM and compressed-tensors; all else is refused.

Nothing is guessed: a field whose value changes what the tensors mean is either known or named in
the refusal, with the way out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from multilora_cli.errors import ModelError
from multilora_cli.sizing.quantization import BLOCK, NONE, Quantization

_REFUSED = {
    "gptq": "its layout and zero points are others; requantise with `mlora quantize --to awq`",
    "bitsandbytes": "its blocks are another layout; serve the 16-bit model or quantise it to awq",
    "modelopt": "requantise the 16-bit model with `mlora quantize --to fp8`",
    "mxfp4": "4-bit floats are not read; serve the 16-bit model or quantise it to awq",
    "auto-round": "export it with format auto_awq",
}
_GROUPS = (32, 64, 128, -1)
# What a pattern may hold: no group is repeated, so that matching a name takes no long time.
_PATTERN = re.compile(
    r"(?:(?:[A-Za-z0-9_\-]|\\[.dw]|\[[A-Za-z0-9_^\-]+\]|\.)[*+?]?|\(\?:|[()|^$])*"
)
_PATTERN_MAX = 200
_PATTERN_REPEATS_MAX = 4
_NAMES_MAX = 20_000


def read_quantization(config: Mapping[str, Any] | None, where: str) -> Quantization:
    """The format in a quantization_config. Raises ModelError naming what is not read."""
    return _ConfigReader(config, where).quantization() if config else NONE


class _ConfigReader:
    """Typed reads of one quantization_config, every error naming file and field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def quantization(self) -> Quantization:
        """The format. Raises ModelError naming what is not read."""
        method = self._config.get("quant_method")
        if method == "awq":
            return self._awq()
        if method == "fp8":
            return self._fp8()
        if method == "fbgemm_fp8":
            return self._fbgemm()
        if method == "compressed-tensors":
            return self._compressed_tensors()
        raise self._error(
            "quant_method",
            method,
            "awq, fp8, fbgemm_fp8 or compressed-tensors",
            hint=_REFUSED.get(str(method)),
        )

    def _error(
        self, field: str, found: object, expected: str, hint: str | None = None
    ) -> ModelError:
        return ModelError(
            f"{self._where}: quantization_config.{field}: found {found!r:.80}, expected {expected}",
            hint=hint,
        )

    def _awq(self) -> Quantization:
        config = self._config
        bits = config.get("bits", config.get("w_bit", 4))
        if type(bits) is not int or bits != 4:
            raise self._error("bits", bits, "4", "requantise with `mlora quantize --to awq`")
        version = config.get("version", config.get("format", "gemm"))
        if str(version).lower() != "gemm":
            raise self._error(
                "version", version, "'gemm'",
                hint="quantise again with version gemm: mlora quantize MODEL --to awq",
            )  # fmt: skip
        if config.get("desc_act"):
            raise self._error("desc_act", config["desc_act"], "false: act-order is not read")
        zero_point = config.get("zero_point", True)
        if not isinstance(zero_point, bool):
            raise self._error("zero_point", zero_point, "true or false")
        group = self._group_size(config.get("group_size", config.get("q_group_size", 128)))
        return Quantization(
            "awq",
            group_size=group,
            zero_point=zero_point,
            ignored=self._names("modules_to_not_convert"),
        )

    def _fp8(self) -> Quantization:
        config = self._config
        kind = config.get("fmt") or "e4m3"
        if kind != "e4m3":
            raise self._error("fmt", kind, "'e4m3'")
        scheme: Any = config.get("activation_scheme") or "dynamic"
        if scheme not in ("static", "dynamic"):
            raise self._error("activation_scheme", scheme, "'static' or 'dynamic'")
        block = config.get("weight_block_size")
        if block is not None and list(_sequence(block)) != [BLOCK, BLOCK]:
            raise self._error("weight_block_size", block, f"null or [{BLOCK}, {BLOCK}]")
        if block is not None and scheme == "static":
            raise self._error("activation_scheme", scheme, "'dynamic' beside weight_block_size")
        return Quantization(
            "fp8",
            granularity="block" if block else "tensor",
            activations=scheme,
            ignored=(*self._names("modules_to_not_convert"), *self._names("ignored_layers")),
        )

    def _fbgemm(self) -> Quantization:
        bound = self._config.get("activation_scale_ub")
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < 1e30):
            raise self._error("activation_scale_ub", bound, "a positive number or null")
        return Quantization(
            "fp8",
            upper_bound=float("inf") if bound is None else float(bound),
            ignored=self._names("modules_to_not_convert"),
        )

    def _compressed_tensors(self) -> Quantization:
        groups = self._config.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, dict) else []
        if len(schemes) != 1 or not isinstance(schemes[0], dict):
            raise ModelError(
                f"{self._where}: quantization_config.config_groups: found {len(schemes)} groups,"
                " expected one"
            )
        for field in ("transform_config", "sparsity_config"):
            value = self._config.get(field)
            if value and value != {"format": "dense"}:
                raise self._error(field, value, "nothing: it changes what the weights mean")
        scheme = schemes[0]
        if scheme.get("output_activations"):
            raise self._error("output_activations", scheme["output_activations"], "null")
        weights = self._object("weights", scheme.get("weights"))
        kind = (weights.get("type", "int"), weights.get("num_bits"))
        if kind == ("int", 4):
            return self._compressed_int4(scheme, weights)
        if kind == ("float", 8):
            return self._compressed_fp8(scheme, weights)
        raise ModelError(
            f"{self._where}: quantization_config.config_groups: found weights {kind[0]!r:.20} of"
            f" {kind[1]!r:.20} bits (format {self._config.get('format')!r:.40}), expected int of 4"
            " bits or float of 8 bits"
        )

    def _compressed_int4(
        self, scheme: Mapping[str, Any], weights: Mapping[str, Any]
    ) -> Quantization:
        self._format("pack-quantized", scheme)
        if scheme.get("input_activations"):
            raise self._error(
                "input_activations", scheme["input_activations"], "null beside 4-bit weights"
            )
        order = weights.get("actorder")
        if order not in (None, False, "weight", "static"):
            raise self._error("actorder", order, "null or 'weight': act-order is not read")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel"):
            raise self._error("weights.strategy", strategy, "'group' or 'channel'")
        group = self._group_size(weights.get("group_size")) if strategy == "group" else -1
        symmetric = weights.get("symmetric", True)
        if not isinstance(symmetric, bool):
            raise self._error("weights.symmetric", symmetric, "true or false")
        return Quantization(
            "awq",
            group_size=group,
            zero_point=not symmetric,
            layout="compressed",
            ignored=self._names("ignore"),
            targets=self._targets(scheme),
        )

    def _compressed_fp8(
        self, scheme: Mapping[str, Any], weights: Mapping[str, Any]
    ) -> Quantization:
        self._format("float-quantized", scheme)
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise self._error("weights.strategy", strategy, "'tensor', 'channel' or 'block'")
        if not weights.get("symmetric", True):
            raise self._error("weights.symmetric", False, "true for FP8")
        block = weights.get("block_structure")
        if strategy == "block" and list(_sequence(block)) != [BLOCK, BLOCK]:
            raise self._error("weights.block_structure", block, f"[{BLOCK}, {BLOCK}]")
        return Quantization(
            "fp8",
            granularity=strategy,
            activations=self._activations(scheme.get("input_activations"), strategy),
            ignored=self._names("ignore"),
            targets=self._targets(scheme),
        )

    def _activations(self, value: object, strategy: str) -> Any:
        """none, dynamic (computed per row whatever the checkpoint says) or static."""
        if value is None:
            return "none"
        found = self._object("input_activations", value)
        if (found.get("type"), found.get("num_bits")) != ("float", 8):
            raise self._error("input_activations", found, "float of 8 bits, or null")
        if found.get("dynamic"):
            return "dynamic"
        if found.get("strategy") != "tensor" or strategy == "block":
            raise self._error(
                "input_activations.strategy", found.get("strategy"),
                "'tensor' for static activations, and no weight blocks beside them",
            )  # fmt: skip
        return "static"

    def _format(self, expected: str, scheme: Mapping[str, Any]) -> None:
        found = scheme.get("format") or self._config.get("format") or expected
        if found != expected:
            raise self._error("format", found, repr(expected))

    def _targets(self, scheme: Mapping[str, Any]) -> tuple[str, ...]:
        names = self._checked("targets", scheme.get("targets"))
        return () if "Linear" in names else names

    def _names(self, field: str) -> tuple[str, ...]:
        return self._checked(field, self._config.get(field))

    def _checked(self, field: str, value: object) -> tuple[str, ...]:
        """A list of module names and `re:` patterns, or null."""
        names = [] if value is None else value
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            raise self._error(field, value, "a list of module names or null")
        if len(names) > _NAMES_MAX:
            raise self._error(field, f"{len(names)} names", f"at most {_NAMES_MAX}")
        for name in names:
            if name.startswith("re:"):
                self._check_pattern(field, name[3:])
        return tuple(names)

    def _check_pattern(self, field: str, pattern: str) -> None:
        repeats = sum(pattern.count(sign) for sign in ("*", "+"))
        try:
            if len(pattern) > _PATTERN_MAX or repeats > _PATTERN_REPEATS_MAX:
                raise ValueError
            if _PATTERN.fullmatch(pattern) is None:
                raise ValueError
            re.compile(pattern)
        except (ValueError, re.error):
            raise self._error(
                field, "re:" + pattern,
                f"names, dots, classes and at most {_PATTERN_REPEATS_MAX} repeats, none of a group",
            ) from None  # fmt: skip

    def _group_size(self, value: object) -> int:
        if type(value) is not int or value not in _GROUPS:
            raise self._error("group_size", value, "32, 64, 128 or -1")
        return value

    def _object(self, field: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._error(field, value, "an object")
        return value


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()

"""Whether an adapter was trained on the base that it is served on, as far as names tell."""

import re
from dataclasses import dataclass
from typing import Literal

from multilora_cli.adapters.strict_json import quoted

# What exporters append to a model's name when they store it otherwise.
_STORAGE = re.compile(
    r"[-_.](?:awq|fp8|gptq|int4|int8|w4a16|w8a8|w8a16|bnb|4bit|8bit|bf16|fp16|hf|dynamic|quantized"
    r"|g?\d{2,3}g|unsloth)(?=$|[-_.])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class BaseMatch:
    """How an adapter's base_model_name_or_path and revision stand to the served base."""

    kind: Literal["unnamed", "same", "stored_otherwise", "revision", "other"]
    text: str

    @property
    def is_warning(self) -> bool:
        """Whether the adapter may have been trained on other weights."""
        return self.kind in ("revision", "other")


def match_base(
    named: str | None, revision: str | None, served: str, served_revision: str | None
) -> BaseMatch:
    """Compare what an adapter says (`named`, `revision`) with base.model and base.revision.

    Shapes are checked elsewhere; this is about which weights they are the shapes of.
    """
    if not named:
        return BaseMatch("unnamed", "the adapter names no base: shapes decide")
    if _last(named).lower() == _last(served).lower():
        if revision and served_revision and revision != served_revision:
            return BaseMatch(
                "revision",
                f"trained on revision {quoted(revision)} of {quoted(named)}, served on"
                f" {quoted(served_revision)}: equal only if both hold the same weights",
            )
        return BaseMatch("same", f"trained on {quoted(named)}, which is the served base")
    if _stem(named) == _stem(served):
        return BaseMatch(
            "stored_otherwise",
            f"trained on {quoted(named)}, served on {quoted(served)}: the same model, stored"
            " otherwise; --drift measures what that changes",
        )
    return BaseMatch(
        "other",
        f"trained on {quoted(named)}, served on {quoted(served)}: shapes fit, but its answers are"
        " as trained only if the weights are the same",
    )


def _last(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def _stem(name: str) -> str:
    return re.sub(r"[-_.]", "-", _STORAGE.sub("", _last(name))).lower()

"""Takes the names of an adapter's tensors apart: which module, and which part of its adapter."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

Part = Literal["A", "B", "lora_bias", "magnitude", "bias", "weight", "token_rows"]
EdgeModule = Literal["embed_tokens", "lm_head"]
EDGES: tuple[EdgeModule, ...] = ("embed_tokens", "lm_head")

EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_ADAPTER = r"(?:\.(?P<{}>(?!weight$|bias$)[^.]+))?"
_NAME = re.compile(
    r"(?P<prefix>(?:(?:base_model|model|language_model|module|_orig_mod|_fsdp_wrapped_module)\.)*)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<block>self_attn|mlp)\.(?P<module>\w+)\."
    r"(?:lora_(?P<matrix>[AB])" + _ADAPTER.format("of_matrix") + r"\.weight"
    r"|(?P<lora_bias>lora_B)" + _ADAPTER.format("of_bias") + r"\.bias"
    r"|(?P<magnitude>lora_magnitude_vector)" + _ADAPTER.format("of_magnitude") + r"(?:\.weight)?"
    r"|(?P<bias>(?:base_layer\.)?bias))"
)
_EDGE = re.compile(
    r"(?:(?:base_model|model|language_model|module|_orig_mod|_fsdp_wrapped_module)\.)*"
    r"(?P<module>embed_tokens|lm_head)\."
    r"(?:lora_(?:embedding_)?(?P<matrix>[AB])" + _ADAPTER.format("of_matrix") + r"(?:\.weight)?"
    r"|(?P<lora_bias>lora_B)" + _ADAPTER.format("of_bias") + r"\.bias"
    r"|(?P<magnitude>lora_magnitude_vector)" + _ADAPTER.format("of_magnitude") + r"(?:\.weight)?"
    r"|(?P<token_rows>token_adapter\.trainable_tokens_delta)(?:\.[^.]+)?"
    r"|(?:modules_to_save\.(?:[^.]+\.)?)?(?P<weight>weight))"
)
BLOCKS: Mapping[str, str] = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "qkv_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "gate_up_proj": "mlp",
    "down_proj": "mlp",
}
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class TensorName(NamedTuple):
    """A tensor name taken apart."""

    prefix: str
    layer: int
    module: str  # one of BLOCKS
    part: Part
    adapter: str  # the segment some tools put after lora_A; empty where there is none

    @property
    def form(self) -> tuple[str, str]:
        """What all names of one file have in common; a bias of the base carries no adapter."""
        return (self.prefix, self.adapter)


def module_path(prefix: str, layer: int, module: str) -> str:
    """The module's path in the base: model.layers.3.self_attn.q_proj."""
    return _path(prefix, layer, module)


# A fleet's adapters share their names, so taking names apart is paid for once.
@lru_cache(maxsize=65536)
def _path(prefix: str, layer: int, module: str) -> str:
    return f"{prefix}layers.{layer}.{BLOCKS[module]}.{module}"


@lru_cache(maxsize=65536)
def parse_name(name: str) -> TensorName | None:
    """The parts of `name`; None where it belongs to no projection of a layer."""
    match = _NAME.fullmatch(name)
    if match is None or BLOCKS.get(match["module"]) != match["block"]:
        return None
    part: Part
    if match["matrix"]:
        part = "A" if match["matrix"] == "A" else "B"
    elif match["lora_bias"]:
        part = "lora_bias"
    elif match["magnitude"]:
        part = "magnitude"
    else:
        part = "bias"
    adapter = match["of_matrix"] or match["of_bias"] or match["of_magnitude"] or ""
    return TensorName(match["prefix"], int(match["layer"]), match["module"], part, adapter)


class EdgeName(NamedTuple):
    """The name of a tensor of the embedding or the head, taken apart."""

    module: EdgeModule
    part: Part  # weight: a whole matrix in place of the base's; token_rows: some rows of it
    adapter: str


@lru_cache(maxsize=1024)
def parse_edge_name(name: str) -> EdgeName | None:
    """The parts of `name`; None where it is no adapter of embedding or head."""
    match = _EDGE.fullmatch(name)
    if match is None:
        return None
    module: EdgeModule = "lm_head" if match["module"] == "lm_head" else "embed_tokens"
    part: Part
    if match["matrix"]:
        part = "A" if match["matrix"] == "A" else "B"
        if ("lora_embedding_" in name) != (module == "embed_tokens"):
            return None
    elif match["weight"]:
        part = "weight"
    elif match["token_rows"]:
        part = "token_rows"
    else:
        part = "lora_bias" if match["lora_bias"] else "magnitude"
    adapter = match["of_matrix"] or match["of_bias"] or match["of_magnitude"] or ""
    return EdgeName(module, part, adapter)

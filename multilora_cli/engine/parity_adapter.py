"""An adapter folded into its base's weights, in fp32: W' = W + s B A, with whatever comes on top.

Written against PEFT's files alone, so that it can judge the served path: it shares the file reader
with it, and neither the binding of names, nor the scale, nor any layout.

    LoRA        W + s B A, s = alpha / r or alpha / sqrt(r), alpha by alpha_pattern
    DoRA        every row of that rescaled to the length that lora_magnitude_vector says
    bias        the stored bias in place of the base's; lora_B.bias is added, times s
    embeddings  E + s (B A)^T, of lora_embedding_A [r, vocab] and lora_embedding_B [hidden, r]
    saved       a whole matrix in place of the base's, with rows for added tokens
    tokens      stored rows in place of those of the tokens that trainable_token_indices names
"""

import math
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from multilora_cli.adapters.module_pattern import matches_key
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.peft_config import CONFIG_NAME
from multilora_cli.adapters.safetensors_header import SafetensorsHeader, TensorEntry
from multilora_cli.adapters.strict_json import parse_json
from multilora_cli.models.checkpoint import Checkpoint
from multilora_cli.models.tensor_reader import TensorReader
from multilora_cli.progress import silent
from multilora_cli.sizing.geometry import ModelGeometry, projection_name

EMBEDDING, HEAD = "embed_tokens", "lm_head"
_CPU = torch.device("cpu")
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.(.+)")
_OUTSIDE = re.compile(r"(?:.*\.)?(embed_tokens|lm_head)\.(.+)")
# The last part of a tensor's name, without an adapter's own name in between, and what it is.
_ROLE = re.compile(
    r"(?:(?P<lora_bias>lora_B(?:\.[^.]+)??\.bias)"
    r"|(?P<tokens>token_adapter\.trainable_tokens_delta)(?:\.[^.]+)?"
    r"|(?P<matrix>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.[^.]+)??(?:\.weight)?"
    r"|(?:base_layer\.|original_module\.)?(?P<own>weight|bias))"
)
_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_Place = tuple[int, str]  # layer (-1 outside of layers) and module


class MergedAdapter:
    """One adapter's tensors, folded into the matrices that are handed in. Use as a context.

    `storage` is the dtype that tensors are rounded to once they are read; None: they are not.
    """

    def __init__(
        self, adapter: AdapterFile, geometry: ModelGeometry, storage: torch.dtype | None = None
    ) -> None:
        self._storage = storage
        self._shapes = geometry.module_shapes
        self._config: Mapping[str, Any] = parse_json((adapter.folder / CONFIG_NAME).read_bytes())
        tokens = self._config.get("trainable_token_indices") or {}
        self._token_indices: Mapping[str, list[int]] = (
            {EMBEDDING: tokens} if isinstance(tokens, list) else tokens
        )
        self._is_tied = geometry.tie_word_embeddings
        self._places: dict[_Place, dict[str, TensorEntry]] = {}
        for entry in adapter.tensors.values():
            place, role = _place(entry.name)
            self._places.setdefault(place, {})[role] = entry
        self._reader = TensorReader(_as_checkpoint(adapter), _CPU, silent)

    def __enter__(self) -> "MergedAdapter":
        self._reader.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.__exit__(kind, error, traceback)

    def projection(
        self, layer: int, module: str, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight fp32 [out, in] and bias [out] of one projection as the adapter makes them."""
        tensors, rows, path = self._stored(layer, module)
        if "lora_A" in tensors:
            factor, scale = self._read(tensors["lora_A"]), self._scale(path, tensors["lora_A"])
            lora_b = self._read(tensors["lora_B"])[rows]
            weight = torch.addmm(weight, lora_b, factor, alpha=scale)
        if "lora_magnitude_vector" in tensors:
            length = self._read(tensors["lora_magnitude_vector"]).reshape(-1)[rows]
            weight = weight * (length / weight.norm(dim=1))[:, None]
        if "bias" in tensors:
            bias = self._read(tensors["bias"])[rows]
        if "lora_B.bias" in tensors:
            scale = self._scale(path, tensors["lora_A"])
            more = scale * self._read(tensors["lora_B.bias"])[rows]
            bias = more if bias is None else bias + more
        return weight, bias

    def is_idle(self, layer: int, module: str, x: torch.Tensor) -> bool:
        """Whether one projection stays the base's: B (A x) is zero for x fp32 [in, N]."""
        tensors, rows, _ = self._stored(layer, module)
        if tensors.keys() - {"lora_A", "lora_B"}:
            return False
        delta = self._read(tensors["lora_B"])[rows] @ (self._read(tensors["lora_A"]) @ x)
        return not bool(delta.any())

    def _stored(self, layer: int, module: str) -> tuple[Mapping[str, TensorEntry], slice, str]:
        """A projection's tensors, its rows of those that are fused, and PEFT's path of it."""
        path = projection_name(layer, module)
        own = self._places.get((layer, module), {})
        if own or module not in _FUSED:
            return own, slice(None), path
        fused, members = _FUSED[module]
        before = sum(self._shapes[name][1] for name in members[: members.index(module)])
        rows = slice(before, before + self._shapes[module][1])
        return self._places.get((layer, fused), {}), rows, path.removesuffix(module) + fused

    def embedding(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Embeddings of token `ids` int64 [N]; `rows` are the base's, fp32 [N, hidden].

        Ids beyond the base's vocabulary have any row there.
        """
        tensors = self._places.get((-1, EMBEDDING), {})
        if "weight" in tensors:
            stored = tensors["weight"]
            known = ids.clamp(max=stored.shape[0] - 1).tolist()
            rows = torch.cat([self._read(stored.rows(i, i + 1)) for i in known])
        rows = self._with_token_rows(EMBEDDING, ids, rows)
        if "lora_embedding_A" in tensors:
            scale = self._scale("model." + EMBEDDING, tensors["lora_embedding_A"])
            factor = self._read(tensors["lora_embedding_A"])[:, ids].T
            rows = rows + scale * (factor @ self._read(tensors["lora_embedding_B"]).T)
        return rows

    def _with_token_rows(self, module: str, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`rows` of token `ids` with those that are stored one by one; tied ends share them."""
        own = module if module in self._token_indices or not self._is_tied else EMBEDDING
        stored = self._places.get((-1, own), {}).get("trainable_tokens_delta")
        if stored is None:
            return rows
        values = self._read(stored)
        for position, token in enumerate(self._token_indices[own]):
            rows = torch.where((ids == token)[:, None], values[position], rows)
        return rows

    def head_rows(self, vocab: int) -> int:
        """Rows of the output head: those of the base's `vocab`, or of the adapter's own head."""
        stored = self._places.get((-1, HEAD), {}).get("weight")
        return vocab if stored is None else stored.shape[0]

    def head(self, start: int, stop: int, weight: torch.Tensor) -> torch.Tensor:
        """Rows of the head from `start` on, fp32; `weight` holds the base's from there."""
        tensors = self._places.get((-1, HEAD), {})
        if "weight" in tensors:
            weight = self._read(tensors["weight"].rows(start, stop))
        weight = self._with_token_rows(HEAD, torch.arange(start, stop), weight)
        if "lora_A" in tensors:
            factor, scale = self._read(tensors["lora_A"]), self._scale(HEAD, tensors["lora_A"])
            part = self._read(tensors["lora_B"].rows(start, stop))
            weight = weight + scale * (part @ factor)
        if "lora_magnitude_vector" in tensors:
            length = self._read(tensors["lora_magnitude_vector"]).reshape(-1)[start:stop]
            weight = weight * (length / weight.norm(dim=1))[:, None]
        return weight

    def _scale(self, path: str, lora_a: TensorEntry) -> float:
        """By the rank of the stored factor and the first alpha_pattern that PEFT would match."""
        rank = lora_a.shape[0]
        patterns: Mapping[str, float] = self._config.get("alpha_pattern") or {}
        alpha = next(
            (value for key, value in patterns.items() if matches_key(key, path)),
            self._config.get("lora_alpha", 8),
        )
        return alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        tensor = self._reader.read(entry)
        return (tensor if self._storage is None else tensor.to(self._storage)).float()


def _place(name: str) -> tuple[_Place, str]:
    """Where a tensor belongs, and what it is there."""
    found = _IN_LAYER.fullmatch(name)
    if found is not None:
        place, last = (int(found[1]), found[2]), found[3]
    else:
        outside = _OUTSIDE.fullmatch(name)
        if outside is None:
            raise AssertionError(f"{name}: a tensor that reading should have refused")
        place, last = (-1, outside[1]), outside[2]
    role = _ROLE.fullmatch(last)
    if role is None:
        raise AssertionError(f"{name}: a tensor that reading should have refused")
    if role["tokens"]:
        return place, "trainable_tokens_delta"
    return place, role["matrix"] or role["own"] or "lora_B.bias"


def _as_checkpoint(adapter: AdapterFile) -> Checkpoint:
    headers = {}
    for identity in adapter.files[1:]:
        tensors = {n: e for n, e in adapter.tensors.items() if e.file == identity.path}
        headers[identity.path] = SafetensorsHeader(identity, {}, tensors)
    return Checkpoint(headers)

"""The decoder of Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3: one file, differences by flags.

The flags are fields of ModelGeometry: qkv_bias (Qwen2), o_bias and mlp_bias (some Llamas),
qk_norm (Qwen3), sliding_windows (Mistral, some Qwens), tie_word_embeddings, rope.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from multilora_cli.layers.attention import Attention, HeadShape
from multilora_cli.layers.context import RowAdapters, StepContext
from multilora_cli.layers.embedding import Embedding, Head
from multilora_cli.layers.linear import DenseWeight, LoraLinear, Weight
from multilora_cli.layers.norm import RMSNorm
from multilora_cli.layers.rotary import Rotary
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_kernels.layout import GROUPS
from multilora_kernels.rope_store_kv import HeadNorm
from multilora_kernels.rows import Rows, gated_rows

LinearSource = Callable[[int, str], Weight | None]
"""The packed weight of a layer's group where it is stored quantised, else None."""


class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up packed in this order."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, rows: Rows, ctx: StepContext) -> torch.Tensor:
        """Rows [T, hidden]; returns [T, hidden]."""
        return self.down(gated_rows(self.gate_up(rows, ctx), self.down.scaling), ctx)


class DecoderLayer:
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: Mlp
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that launch the same kernels: how weights are stored shows in bytes."""
        attention, mlp = self.attention, self.mlp
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        stored = tuple((linear.weight.nbytes, linear.bias is None) for linear in linears)
        return (stored, attention.shape.sliding_window)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        ctx: StepContext,
    ) -> torch.Tensor:
        """x [T, hidden] is yet to be added to the residual stream, which changes in place.

        Returns this layer's own output, to be added by the norm that comes next; x is used up.
        """
        rows = self.input_norm(x, residual, self.attention.qkv.scaling)
        x = self.attention(rows, tables, ctx)
        rows = self.post_norm(x, residual, self.mlp.gate_up.scaling)
        return self.mlp(rows, ctx)


class Decoder:
    """A decoder-only transformer for inference; its weights are uninitialised until loaded.

    `tensors` maps the name of a checkpoint tensor to the memory it is copied into. The parts of
    packed weights are row ranges of one matrix, so every target is contiguous. Packed weights that
    `quantised` provides are complete from the start.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        device: torch.device,
        quantised: LinearSource | None = None,
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self.quantised: list[Weight] = []
        self.notes: tuple[str, ...] = ()  # on how the weights are stored, for people
        self._quantised = quantised
        self._projections: dict[tuple[int, str], tuple[LoraLinear, slice]] = {}
        self.embedding = Embedding(geometry.vocab_size, geometry.hidden_size, dtype, device)
        self.tensors["model.embed_tokens.weight"] = self.embedding.weight
        self.rotary = Rotary(geometry.rope, geometry.head_dim, device)
        self.layers = [self._layer(index) for index in range(geometry.num_layers)]
        self.norm = self._norm("model.norm", geometry.hidden_size)
        self.head = self._head()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device, a tied head counted once."""
        dense = sum(tensor.nbytes for tensor in self.tensors.values())
        return dense + sum(weight.nbytes for weight in self.quantised)

    def projection(self, layer: int, module: str) -> tuple[LoraLinear, slice]:
        """The packed projection that holds `module` of a layer, and the rows that are its own."""
        return self._projections[layer, module]

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within it only two layers of every kind are run: they launch every kernel that all do.

        Two, since what is compiled for the first may hold for even multiples of a size only.
        """
        kinds: dict[tuple[object, ...], list[DecoderLayer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        all_layers, self.layers = self.layers, [x for same in kinds.values() for x in same[:2]]
        try:
            yield
        finally:
            self.layers = all_layers

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        """token_ids and positions int64 [T]; returns hidden states [T, hidden] after the last norm.

        K and V of the tokens are written to the pool at ctx.slot_mapping.
        """
        tables = self.rotary.tables(positions)
        x = self.embedding(token_ids, ctx.adapters)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, residual, tables, ctx)
        return self.norm(x, residual).x

    @torch.inference_mode()
    def logits(
        self,
        hidden: torch.Tensor,
        adapters: RowAdapters | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [R, hidden] of the rows that are asked for; returns float32 [R, vocab].

        `adapters` are those of these R rows; None: all of them are the base's. The result is
        written to `out` where it is given.
        """
        return self.head(hidden, adapters, out)

    def _layer(self, index: int) -> DecoderLayer:
        geometry, prefix = self.geometry, f"model.layers.{index}."
        attention, hidden, head_dim = (
            prefix + "self_attn.",
            geometry.hidden_size,
            geometry.head_dim,
        )
        head_norm = None
        if geometry.qk_norm:
            q, k = (self._norm(attention + name, head_dim).weight for name in ("q_norm", "k_norm"))
            head_norm = HeadNorm(q, k, geometry.rms_norm_eps)
        return DecoderLayer(
            self._norm(prefix + "input_layernorm", hidden),
            Attention(
                HeadShape(
                    geometry.num_heads,
                    geometry.num_kv_heads,
                    head_dim,
                    geometry.sliding_windows[index],
                ),
                self._linear(index, "qkv", geometry.qkv_bias),
                self._linear(index, "o", geometry.o_bias),
                head_norm,
            ),
            self._norm(prefix + "post_attention_layernorm", hidden),
            Mlp(
                self._linear(index, "gate_up", geometry.mlp_bias),
                self._linear(index, "down", geometry.mlp_bias),
            ),
        )

    def _norm(self, name: str, size: int) -> RMSNorm:
        norm = RMSNorm(size, self.geometry.rms_norm_eps, self.dtype, self.device)
        self.tensors[name + ".weight"] = norm.weight
        return norm

    def _linear(self, layer: int, group: str, has_bias: bool) -> LoraLinear:
        """The packed projection of `group`, its parts entered into `tensors`."""
        modules = GROUPS[group]
        sizes = [self.geometry.module_shapes[module][1] for module in modules]
        size_in = self.geometry.module_shapes[modules[0]][0]
        weight = self._quantised(layer, group) if self._quantised is not None else None
        dense: DenseWeight | None = None
        if weight is None:
            weight = dense = DenseWeight.empty(sum(sizes), size_in, self.dtype, self.device)
        else:
            self.quantised.append(weight)
        bias = None
        if has_bias:
            bias = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        linear = LoraLinear(weight, layer, group, bias)
        start = 0
        for module, size in zip(modules, sizes, strict=True):
            name = projection_name(layer, module)
            self._projections[layer, module] = (linear, slice(start, start + size))
            if dense is not None:
                self.tensors[name + ".weight"] = dense.tensor[start : start + size]
            if bias is not None:
                self.tensors[name + ".bias"] = bias[start : start + size]
            start += size
        return linear

    def _head(self) -> Head:
        geometry = self.geometry
        if geometry.tie_word_embeddings:
            return Head(self.embedding.weight)
        shape = (geometry.vocab_size, geometry.hidden_size)
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.tensors["lm_head.weight"] = weight
        return Head(weight)

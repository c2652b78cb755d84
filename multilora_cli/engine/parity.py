"""What the answers should be: the model computed plainly, in fp32, with the adapters merged in.

An independent reference for the served path. It knows no pages, no packed weights, no batches and
no LoRA kernels: every sequence is computed whole, and every adapter's matrices are W + s B A
(`MergedAdapter`). Quantised bases are used as their dequantised weights. One projection of one
layer is in memory at a time, and all sequences pass through it before the next: the 16-bit 8B
model takes 1 GiB where loading it would take 32.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.engine.parity_adapter import MergedAdapter
from multilora_cli.layers.rotary import inverse_frequencies
from multilora_cli.models.checkpoint import open_checkpoint
from multilora_cli.models.quantized import QuantisedLinears
from multilora_cli.models.quantized_tensors import find_linears
from multilora_cli.models.tensor_reader import TensorReader
from multilora_cli.progress import Report, silent
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_cli.sizing.quantization import Quantization
from multilora_kernels.layout import GROUPS

_CPU = torch.device("cpu")
_HEAD_ROWS = 8192  # of the vocabulary at a time: 134 MB of an 8B model's head in fp32
_E4M3_MAX = 448.0
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Passage:
    """A sequence to be computed: token ids, and the adapter's index; None: the bare base.

    `rounded`: as exactly as a device with the reference's `Rounding` could compute it.
    """

    tokens: Sequence[int]
    adapter: int | None = None
    rounded: bool = False


@dataclass(frozen=True)
class Rounding:
    """What a device rounds to: every result of an operation and every tensor of an adapter to
    `dtype`, and to e4m3 the rows that meet a quantised matrix, or K and V."""

    dtype: torch.dtype
    fp8_rows: bool = False
    fp8_kv: bool = False

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded once."""
        return x.to(self.dtype).float()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Each row [T, in] with a scale of its own, its largest magnitude to e4m3's."""
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _E4M3_MAX
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def kv(self, x: torch.Tensor) -> torch.Tensor:
        """As they lie in an FP8 KV cache: without a scale."""
        return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


class Reference:
    """Computes passages on the base in `folder` as `quantization` stores it. Use as a context."""

    def __init__(
        self,
        folder: Path,
        geometry: ModelGeometry,
        quantization: Quantization,
        adapters: Sequence[AdapterFile],
        rounding: Rounding | None = None,
    ) -> None:
        self._geometry = geometry
        self._stack = ExitStack()
        self._rounding = rounding
        self._adapters = [MergedAdapter(adapter, geometry) for adapter in adapters]
        storage = None if rounding is None else rounding.dtype
        self._rounded = [MergedAdapter(adapter, geometry, storage) for adapter in adapters]
        checkpoint = open_checkpoint(folder)
        self._entries: Mapping[str, TensorEntry] = {e.name: e for e in checkpoint.entries()}
        self._reader = TensorReader(checkpoint, _CPU, silent)
        dense = replace(quantization, placement="dense")
        stored = find_linears(folder, checkpoint, geometry, dense)
        self._stored = stored
        self._quantised = QuantisedLinears(stored, geometry, torch.float32, self._reader.read)
        self._frequencies = inverse_frequencies(geometry.rope, geometry.head_dim)

    def __enter__(self) -> "Reference":
        with ExitStack() as stack:
            stack.enter_context(self._reader)
            for adapter in (*self._adapters, *self._rounded):
                stack.enter_context(adapter)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @torch.inference_mode()
    def logprobs(self, passages: Sequence[Passage], report: Report) -> list[torch.Tensor]:
        """Log-probabilities fp32 [len(tokens), vocab] of each passage; vocab is its adapter's."""
        batch = _Batch(passages, self._rounding)
        x = batch.result(self._embed(batch))
        for layer in range(self._geometry.num_layers):
            report("reference", layer, self._geometry.num_layers)
            normed = batch.result(self._norm(layer, "input_layernorm", x))
            x = batch.result(x + self._attention(layer, normed, batch))
            normed = batch.result(self._norm(layer, "post_attention_layernorm", x))
            x = batch.result(x + self._mlp(layer, normed, batch))
        hidden = _rms(x, self._tensor("model.norm.weight"), self._geometry.rms_norm_eps)
        hidden = batch.result(hidden)
        logits = self._logits(hidden, batch)
        report("reference", self._geometry.num_layers, self._geometry.num_layers)
        return [rows.log_softmax(-1) for rows in logits]

    def _embed(self, batch: "_Batch") -> torch.Tensor:
        ids = batch.token_ids
        known = ids.clamp(max=self._geometry.vocab_size - 1)
        unique, back = torch.unique(known, return_inverse=True)
        entry = self._entries[_EMBEDDING]
        table = torch.cat([self._read(entry.rows(i, i + 1)) for i in unique.tolist()])
        x = table[back]
        for adapter, rows in self._adapted(batch):
            x[rows] = adapter.embedding(ids[rows], x[rows])
        return x

    def _attention(self, layer: int, x: torch.Tensor, batch: "_Batch") -> torch.Tensor:
        geometry, prefix = self._geometry, f"model.layers.{layer}.self_attn."
        q, k, v = (y.view(len(y), -1, geometry.head_dim) for y in self._all("qkv", layer, x, batch))
        if geometry.qk_norm:
            q = _rms(q, self._tensor(prefix + "q_norm.weight"), geometry.rms_norm_eps)
            k = _rms(k, self._tensor(prefix + "k_norm.weight"), geometry.rms_norm_eps)
        window = geometry.sliding_windows[layer]
        attended = torch.cat(
            [
                self._attend(q[rows], k[rows], v[rows], window, batch.rounding_of(passage))
                for _, passage, rows in batch.items()
            ]
        )
        attended = batch.result(attended)
        (out,) = self._all("o", layer, attended, batch)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        rounding: Rounding | None,
    ) -> torch.Tensor:
        """One sequence from its start: q [T, heads, D], k, v [T, kv_heads, D] -> [T, heads * D]."""
        position = torch.arange(len(q))
        q, k = self._turn(q, position), self._turn(k, position)
        if rounding is not None:
            q, k = rounding.result(q), rounding.result(k)
            if rounding.fp8_kv:
                k, v = rounding.kv(k), rounding.kv(v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self._geometry.head_dim**-0.5
        distance = position[:, None] - position[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def _turn(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Element i and element i + D/2 of a head as one complex number, turned by p f_i."""
        half = x.shape[-1] // 2
        angle = position.float()[:, None, None] * self._frequencies
        factor = torch.polar(torch.full_like(angle, self._geometry.rope.attention_factor), angle)
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * factor
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _mlp(self, layer: int, x: torch.Tensor, batch: "_Batch") -> torch.Tensor:
        gate, up = self._all("gate_up", layer, x, batch)
        product = batch.result(gate * torch.sigmoid(gate) * up)
        (out,) = self._all("down", layer, product, batch)
        return out

    def _all(self, group: str, layer: int, x: torch.Tensor, batch: "_Batch") -> list[torch.Tensor]:
        """Every projection of a group, each passage's rows by its own adapter's weights."""
        results = []
        if self._stored.covers(layer, group):
            x = batch.quantised_rows(x)
        for module, weight, bias in self._projections(layer, group):
            y = x.new_empty(len(x), len(weight))
            y[batch.bare] = _linear(x[batch.bare], weight, bias)
            for adapter, rows in self._adapted(batch):
                y[rows] = _linear(x[rows], *adapter.projection(layer, module, weight, bias))
            results.append(batch.result(y))
        return results

    def _adapted(self, batch: "_Batch") -> Iterator[tuple[MergedAdapter, torch.Tensor]]:
        """Every adapter in use, exact or rounded, and a mask of its rows."""
        for index, rounded, rows in batch.adapted():
            yield (self._rounded if rounded else self._adapters)[index], rows

    def _projections(
        self, layer: int, group: str
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Module, weight fp32 [out, in] and bias; one dense matrix is held at a time."""
        packed, row = self._quantised(layer, group), 0
        whole = None if packed is None else packed.dequantise()
        for module in GROUPS[group]:
            name = projection_name(layer, module)
            if whole is None:
                weight = self._tensor(name + ".weight")
            else:
                size = self._geometry.module_shapes[module][1]
                weight, row = whole[row : row + size], row + size
            has_bias = name + ".bias" in self._entries
            yield module, weight, self._tensor(name + ".bias") if has_bias else None

    def _logits(self, hidden: torch.Tensor, batch: "_Batch") -> list[torch.Tensor]:
        """fp32 [T, vocab] of every passage; the head is read once, a slice at a time."""
        vocab = self._geometry.vocab_size
        tied = self._geometry.tie_word_embeddings or _HEAD not in self._entries
        entry = self._entries[_EMBEDDING if tied else _HEAD]
        logits = [
            hidden.new_empty(
                len(passage.tokens),
                vocab
                if passage.adapter is None
                else self._adapters[passage.adapter].head_rows(vocab),
            )
            for passage in batch.passages
        ]
        most = max(rows.shape[1] for rows in logits)
        for start in range(0, most, _HEAD_ROWS):
            stop = min(start + _HEAD_ROWS, vocab)
            base = (
                self._read(entry.rows(start, stop))
                if start < stop
                else hidden.new_empty(0, hidden.shape[1])
            )
            for index, passage, rows in batch.items():
                end = min(start + _HEAD_ROWS, logits[index].shape[1])
                if start >= end:
                    continue
                weight = base
                if passage.adapter is not None:
                    adapters = self._rounded if passage.rounded else self._adapters
                    weight = adapters[passage.adapter].head(start, end, base)
                logits[index][:, start:end] = hidden[rows] @ weight.T
        return [
            rows if rounding is None else rounding.result(rows)
            for rows, rounding in zip(logits, map(batch.rounding_of, batch.passages), strict=True)
        ]

    def _norm(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensor(f"model.layers.{layer}.{name}.weight")
        return _rms(x, weight, self._geometry.rms_norm_eps)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._read(self._entries[name])

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        return self._reader.read(entry).float()


class _Batch:
    """Where each passage's rows lie, and which of them a device's rounding applies to."""

    def __init__(self, passages: Sequence[Passage], rounding: Rounding | None) -> None:
        self.passages = passages
        self._rounding = rounding
        self._rows, start = [], 0
        for passage in passages:
            self._rows.append(slice(start, start + len(passage.tokens)))
            start += len(passage.tokens)
        self.token_ids = torch.tensor([token for p in passages for token in p.tokens])
        owner = [-1 if p.adapter is None else p.adapter for p in passages for _ in p.tokens]
        self._owner = torch.tensor(owner)
        self._is_rounded = torch.tensor([p.rounded for p in passages for _ in p.tokens])
        self.bare = self._owner == -1

    def rounding_of(self, passage: Passage) -> Rounding | None:
        """What applies to this passage."""
        return self._rounding if passage.rounded else None

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """The result of an operation [T, ...], rounded in the rows that are."""
        if self._rounding is None:
            return x
        return self._where_rounded(self._rounding.result(x), x)

    def quantised_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] that meet a quantised matrix."""
        if self._rounding is None or not self._rounding.fp8_rows:
            return x
        return self._where_rounded(self._rounding.rows(x), x)

    def _where_rounded(self, rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = self._is_rounded.view(-1, *(1 for _ in x.shape[1:]))
        return torch.where(mask, rounded, x)

    def items(self) -> Iterator[tuple[int, Passage, slice]]:
        """Number, passage and rows."""
        for index, (passage, rows) in enumerate(zip(self.passages, self._rows, strict=True)):
            yield index, passage, rows

    def adapted(self) -> Iterator[tuple[int, bool, torch.Tensor]]:
        """Every adapter in use, whether rounded, and a mask of its rows."""
        used = {(p.adapter, p.rounded) for p in self.passages if p.adapter is not None}
        for index, rounded in sorted(used):
            yield index, rounded, (self._owner == index) & (self._is_rounded == rounded)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.T
    return y if bias is None else y + bias


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

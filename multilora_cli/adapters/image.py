"""Builds an adapter's image: its weights in kernel layout and compute dtype, scaling folded in.

y += s * B (A x) becomes y += B' (A x) with B' = s * B, multiplied in float32 and rounded once.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from multilora_cli.adapters.coverage import ModuleWeights
from multilora_cli.adapters.digest import changed
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import (
    OpenFile,
    SafetensorsError,
    TensorEntry,
    open_file,
)
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.vectors import BaseRows, vectors_of
from multilora_cli.errors import AdapterError
from multilora_kernels.layout import Block, ImagePlan, MatrixName, VectorKind

_FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Saved matrices are searched for the value that is not finite a few rows at a time.
_SEARCH_BYTES = 8 * 2**20
# Unsigned integer of the same width, and the exponent bits that are all set in NaN and infinity.
_EXPONENTS = {
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float32: (np.uint32, 0x7F800000),
}
_PIECE_BYTES = 8 * 2**20
_Matrix = tuple[int, str, str]  # layer, module, "a" or "b"


def build_image(
    adapter: AdapterFile,
    plan: ImagePlan,
    dtype: torch.dtype,
    out: torch.Tensor,
    *,
    base: BaseRows | None = None,
    check_values: bool = True,
) -> tuple[str, ...]:
    """Read, convert and place every weight of `adapter`; gives notes for people.

    Args:
        adapter: as read; refused when its files changed since.
        plan: from plan_image(adapter.ranks, ..., adapter.extras) with this dtype's item size.
        dtype: compute dtype: bfloat16, float16 or float32.
        out: uint8 [plan.num_pages, plan.page_bytes], contiguous, on the CPU; wholly overwritten.
        base: the base that it is served on; needed by DoRA and trained biases.
        check_values: refuse NaN, infinity and overflow of `dtype`.

    Raises AdapterError naming tensor and count.
    """
    if out.shape != (plan.num_pages, plan.page_bytes) or out.dtype != torch.uint8:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, the plan needs other pages")
    if (dtype.itemsize, adapter.ranks, adapter.extras) != (
        plan.itemsize,
        plan.ranks,
        plan.extras,
    ):
        raise ValueError("the plan was made for another adapter or dtype")
    _zero_gaps(plan, out)
    blocks = _blocks_by_matrix(plan)
    all_zero = True
    with _Reader(adapter) as reader:
        for layer, module, weights in _in_file_order(adapter):
            _fill_a(reader, weights, blocks[layer, module, "a"], dtype, out)
            lora_b = reader.read(weights.lora_b)
            used = lora_b.any(0) if all_zero else None  # ranks; one module with some is enough
            _place_b(blocks[layer, module, "b"], lora_b, weights.scaling, dtype, out)
            if used is not None and bool(used.any()):
                all_zero = not bool((used & reader.read(weights.lora_a).any(1)).any())
        if plan.matrices:
            all_zero = all_zero and not adapter.edges.saved
            if adapter.edges.token_rows and base is None:
                raise ValueError("rows of single tokens need the base")
            values = _edge_factors(adapter, reader, dtype, base)
            _fill_matrices(adapter, plan, reader, values, dtype, out)
            changed_rows = any(bool(v.any()) for name, v in values.items() if name.endswith(".b"))
            all_zero = all_zero and not changed_rows
        if check_values and not _all_finite(out, dtype):
            raise _not_finite(adapter, reader, dtype)
        if plan.vectors:
            if base is None:
                raise ValueError("DoRA and trained biases need the base")
            _fill_vectors(adapter, plan, reader, base, out)
            return ()
    return ("every product of lora_B and lora_A is zero: answers equal the base's",) * all_zero


class _Reader:
    """Reads tensors of an adapter, in pieces of a few MB that follow one another in its files.

    An adapter has hundreds of tensors of some 100 KB. A read of its own for each is a system call,
    after which the thread has to win the interpreter back from the one that runs the steps: beside
    64 answers on an H200 that made 80 ms of a 27 MB adapter.
    """

    def __init__(self, adapter: AdapterFile) -> None:
        self._adapter = adapter
        self._files: dict[Path, OpenFile] = {}
        self._stack = ExitStack()
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._from: Path | None = None  # the piece's file, and where in it the piece begins
        self._begin = 0

    def __enter__(self) -> "_Reader":
        with self._stack:
            for identity in self._adapter.files[1:]:
                try:
                    file = self._stack.enter_context(open_file(identity.path))
                except SafetensorsError as error:
                    raise AdapterError(error.message, reason=error.reason) from None
                if file.identity.key != identity.key:
                    raise changed(identity)
                self._files[identity.path] = file
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises AdapterError when what was read may mix two versions."""
        for identity, file in zip(self._adapter.files[1:], self._files.values(), strict=True):
            try:
                file.check_unchanged()
            except SafetensorsError:
                raise changed(identity) from None

    def read_bytes(self, entry: TensorEntry, start: int, target: torch.Tensor) -> None:
        """Fill `target`, uint8 [n], with the tensor's bytes from `start` on."""
        target.copy_(self._bytes(entry, start, target.numel()))

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor in its own dtype and shape; valid until the next read, not to be written."""
        dtype, raw = _FILE_DTYPES[entry.dtype], self._bytes(entry, 0, entry.nbytes)
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # a file may place its tensors anywhere
        values = raw.view(dtype).view(entry.shape)
        return values.float() if entry.dtype == "F64" else values

    def _bytes(self, entry: TensorEntry, start: int, size: int) -> torch.Tensor:
        """uint8 [size] of the current piece, or of the one that begins there."""
        at = entry.offset + start
        held = range(self._begin, self._begin + self._piece.numel())
        is_other = self._from is not entry.file and self._from != entry.file
        if is_other or at < held.start or at + size > held.stop:
            self._fetch(entry, at // 8 * 8, at + size)
        offset = at - self._begin
        return self._piece[offset : offset + size]

    def _fetch(self, entry: TensorEntry, begin: int, end: int) -> None:
        """Read the next piece of the entry's file: at least from `begin` to `end`."""
        file = self._files[entry.file]
        size = max(end - begin, min(_PIECE_BYTES, file.identity.size - begin))
        if self._piece.untyped_storage().nbytes() < size:
            self._piece = torch.empty(size, dtype=torch.uint8)
        self._piece = torch.as_strided(self._piece, (size,), (1,), 0)
        self._from, self._begin = None, begin
        try:
            file.read_into(begin, self._piece.numpy().data)
        except SafetensorsError as error:
            raise AdapterError(error.message, reason=error.reason, field=entry.name) from None
        self._from = entry.file

    def read_rows(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Rows of a matrix in its own dtype; valid until the next read."""
        row_bytes = entry.nbytes // entry.shape[0]
        part = entry._replace(
            shape=(stop - start, *entry.shape[1:]),
            offset=entry.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
        )
        return self.read(part)


def _in_file_order(adapter: AdapterFile) -> Iterator[tuple[int, str, ModuleWeights]]:
    """Sequential reads: a cold disk then reads ahead."""
    order = sorted(
        adapter.weights.items(), key=lambda item: (item[1].lora_a.file, item[1].lora_a.offset)
    )
    for (layer, module), weights in order:
        yield layer, module, weights


def _blocks_by_matrix(plan: ImagePlan) -> Mapping[_Matrix, list[Block]]:
    blocks: dict[_Matrix, list[Block]] = {}
    for block in plan.blocks:
        blocks.setdefault((block.layer, block.module, block.matrix), []).append(block)
    return blocks


def _scaled(lora_b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    if lora_b.dtype == dtype:  # a product with a number is computed in float32 and rounded once
        return lora_b.mul(scaling)
    return lora_b.float().mul(scaling).to(dtype)


def _fill_a(
    reader: _Reader,
    weights: ModuleWeights,
    blocks: list[Block],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Straight from the file where its bytes are the image's, else through the scratch buffer."""
    entry = weights.lora_a
    rank, d_in = entry.shape
    whole = all(
        block.length == d_in and block.rank_start + block.rank_width <= rank for block in blocks
    )
    if not whole or _FILE_DTYPES[entry.dtype] != dtype:
        _place_a(blocks, reader.read(entry).to(dtype), rank, out)
        return
    row_bytes = d_in * dtype.itemsize
    for block in blocks:
        target = out[block.page, block.offset : block.offset + block.rank_width * row_bytes]
        reader.read_bytes(entry, block.rank_start * row_bytes, target)


def _place_a(blocks: list[Block], lora_a: torch.Tensor, rank: int, out: torch.Tensor) -> None:
    """Blocks [rank_width][length] from lora_a [rank, d_in]."""
    for block in blocks:
        view = _block_view(block, lora_a.dtype, out).view(block.rank_width, block.length)
        real = min(block.rank_width, rank - block.rank_start)
        rows = lora_a[block.rank_start : block.rank_start + real]
        view[:real] = rows[:, block.start : block.start + block.length]
        if real < block.rank_width:
            view[real:] = 0


def _place_b(
    blocks: list[Block],
    lora_b: torch.Tensor,
    scaling: float,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Blocks [length][rank_width] from scaling * lora_b [d_out, rank]."""
    rank = lora_b.shape[1]
    direct = lora_b.dtype == dtype
    scaled = lora_b if direct else _scaled(lora_b, scaling, dtype)
    for block in blocks:
        view = _block_view(block, dtype, out).view(block.length, block.rank_width)
        real = min(block.rank_width, rank - block.rank_start)
        rows = scaled[block.start : block.start + block.length]
        part = rows[:, block.rank_start : block.rank_start + real]
        if direct:
            torch.mul(part, scaling, out=view[:, :real])
        else:
            view[:, :real] = part
        if real < block.rank_width:
            view[:, real:] = 0


def _edge_factors(
    adapter: AdapterFile, reader: _Reader, dtype: torch.dtype, base: BaseRows | None
) -> dict[MatrixName, torch.Tensor]:
    """The factors on embedding and head as they are served, by name."""
    values: dict[MatrixName, torch.Tensor] = {}
    if (embedding := adapter.edges.lora.get("embed_tokens")) is not None:
        values["embed_tokens.a"] = reader.read(embedding.lora_a).T.to(dtype, copy=True)
        values["embed_tokens.b"] = _scaled(reader.read(embedding.lora_b), embedding.scaling, dtype)
    if (head := adapter.edges.lora.get("lm_head")) is not None:
        values["lm_head.a"] = reader.read(head.lora_a).to(dtype, copy=True)
        values["lm_head.b"] = _scaled(reader.read(head.lora_b), head.scaling, dtype)
    for module, rows in adapter.edges.token_rows.items():
        assert base is not None
        tokens = torch.tensor(rows.tokens)
        change = (reader.read(rows.entry).float() - base.edge_rows(module, tokens)).to(dtype)
        chosen = torch.zeros(adapter.edges.vocab_size, len(tokens), dtype=dtype)
        chosen[tokens, torch.arange(len(tokens))] = 1
        if module == "embed_tokens":
            values["embed_tokens.a"], values["embed_tokens.b"] = chosen, change.T
        else:
            values["lm_head.a"], values["lm_head.b"] = change, chosen
    return values


def _fill_matrices(
    adapter: AdapterFile,
    plan: ImagePlan,
    reader: _Reader,
    values: Mapping[MatrixName, torch.Tensor],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Factors, and whole matrices a few rows at a time."""
    saved = {f"{module}.weight": entry for module, entry in adapter.edges.saved.items()}
    for block in plan.matrices:
        stop = block.start + block.num_rows
        if block.name in values:
            rows = values[block.name][block.start : stop].contiguous()
        else:
            rows = reader.read_rows(saved[block.name], block.start, stop).to(dtype).contiguous()
        out[block.page, block.offset : block.offset + rows.nbytes] = rows.view(-1).view(torch.uint8)


def _fill_vectors(
    adapter: AdapterFile, plan: ImagePlan, reader: _Reader, base: BaseRows, out: torch.Tensor
) -> None:
    """Scales and shifts, after the check of all weights: their bits mean nothing to it."""
    key, values = (-1, ""), dict[VectorKind, torch.Tensor]()
    for block in plan.vectors:
        if key != (block.layer, block.module):
            key = (block.layer, block.module)
            values = vectors_of(adapter, key, reader.read, base)
        part = values[block.kind][block.start : block.start + block.length]
        out[block.page, block.offset : block.offset + part.nbytes] = part.view(torch.uint8)


def _block_view(block: Block, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    nbytes = block.rank_width * block.length * dtype.itemsize
    return out[block.page, block.offset : block.offset + nbytes].view(dtype)


def _zero_gaps(plan: ImagePlan, out: torch.Tensor) -> None:
    """Bytes that hold no weights are zero, never what lay there before; vectors come later."""
    ends = [0] * plan.num_pages
    for block in sorted(plan.blocks, key=lambda b: (b.page, b.offset)):
        if block.offset > ends[block.page]:
            out[block.page, ends[block.page] : block.offset] = 0
        ends[block.page] = block.offset + block.rank_width * block.length * plan.itemsize
    for page, end in enumerate(ends):
        out[page, end:] = 0


def _all_finite(out: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether no exponent in the image is all ones, page by page to stay in the cache."""
    kind, mask = _EXPONENTS[dtype]
    bits = np.array(mask, kind)
    exponents = np.empty(out.shape[1] // dtype.itemsize, kind)
    for page in out.numpy():
        np.bitwise_and(page.view(kind), bits, out=exponents)
        if exponents.max() == bits:
            return False
    return True


def _not_finite(adapter: AdapterFile, reader: _Reader, dtype: torch.dtype) -> AdapterError:
    """Names the first tensor that holds NaN or infinity, or that `dtype` cannot hold."""
    for entry, scaling in _scaled_tensors(adapter):
        rows = max(1, _SEARCH_BYTES // max(entry.nbytes // entry.shape[0], 1))
        for start in range(0, entry.shape[0], rows):
            stop = min(start + rows, entry.shape[0])
            error = _wrong_values(entry, reader.read_rows(entry, start, stop), scaling, dtype)
            if error is not None:
                return error
    return AdapterError(f"{adapter.folder}: changed while it was read", reason="changed")


def _scaled_tensors(adapter: AdapterFile) -> Iterator[tuple[TensorEntry, float]]:
    """Every tensor whose values lie in the image, and what they are multiplied by."""
    for _, _, weights in _in_file_order(adapter):
        yield weights.lora_a, 1.0
        yield weights.lora_b, weights.scaling
    for edge in adapter.edges.lora.values():
        yield edge.lora_a, 1.0
        yield edge.lora_b, edge.scaling
    for entry in adapter.edges.saved.values():
        yield entry, 1.0
    for rows in adapter.edges.token_rows.values():
        yield rows.entry, 1.0


def _wrong_values(
    entry: TensorEntry, values: torch.Tensor, scaling: float, dtype: torch.dtype
) -> AdapterError | None:
    """The refusal of values that are not finite, or not in `dtype`."""
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    where = f"{entry.file}: tensor {quoted(entry.name)}: "
    if nan or inf:
        return AdapterError(
            f"{where}{nan} NaN and {inf} infinite of {values.numel():,} values",
            reason="not_finite",
            field=entry.name,
        )
    over = int((~_scaled(values, scaling, dtype).isfinite()).sum())
    if not over:
        return None
    largest = float(values.abs().max()) * scaling
    return AdapterError(
        f"{where}{over} of {values.numel():,} values overflow {dtype} with scaling"
        f" {scaling:g}; the largest is {largest:.3g}, {dtype} holds"
        f" {torch.finfo(dtype).max:.3g}",
        reason="overflow",
        field=entry.name,
    )

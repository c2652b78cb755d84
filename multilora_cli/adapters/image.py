"""Builds an adapter's image: its weights in kernel layout and compute dtype, scaling folded in.

y += s * B (A x) becomes y += B' (A x) with B' = s * B, multiplied in float32 and rounded once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from multilora_cli.adapters.coverage import ModuleWeights
from multilora_cli.adapters.crew import Crew, Job
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.vectors import BaseRows, vectors_of
from multilora_cli.adapters.weight_reader import FILE_DTYPES, PIECE_BYTES, WeightFiles, WeightReader
from multilora_cli.errors import AdapterError
from multilora_kernels.layout import Block, ImagePlan, MatrixBlock, MatrixName, VectorBlock

# Saved matrices are searched for the value that is not finite a few rows at a time.
_SEARCH_BYTES = 8 * 2**20


def build_image(
    adapter: AdapterFile,
    plan: ImagePlan,
    dtype: torch.dtype,
    out: torch.Tensor,
    *,
    base: BaseRows | None = None,
    check_values: bool = True,
    crew: Crew | None = None,
) -> tuple[str, ...]:
    """Read, convert and place every weight of `adapter`; gives notes for people.

    Args:
        adapter: as read; refused when its files changed since.
        plan: from plan_image(adapter.ranks, ..., adapter.extras) with this dtype's item size.
        dtype: compute dtype: bfloat16, float16 or float32.
        out: uint8 [plan.num_pages, plan.page_bytes], contiguous, on the CPU; wholly overwritten.
        base: the base that it is served on; needed by DoRA and trained biases.
        check_values: refuse NaN, infinity and overflow of `dtype`.
        crew: threads that share the work.

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
    crew = crew or Crew()
    image = out.view(-1).view(dtype)
    with WeightFiles(adapter, crew.buffers) as files, files.reader() as reader:
        seen = _Seen([], []) if check_values else None
        crew.each(_factor_jobs(adapter, files, _Target(plan, image, seen), crew.width))
        all_zero = not _has_products(plan, image)
        if plan.matrices:
            all_zero = all_zero and not adapter.edges.saved
            if adapter.edges.token_rows and base is None:
                raise ValueError("rows of single tokens need the base")
            values = _edge_factors(adapter, reader, dtype, base)
            crew.each(_matrix_jobs(adapter, plan, files, values, dtype, out))
            changed_rows = any(bool(v.any()) for name, v in values.items() if name.endswith(".b"))
            all_zero = all_zero and not changed_rows
        if seen is not None:
            if plan.matrices or seen.unseen:
                crew.each(partial(seen.look, part) for part in image.chunk(crew.width))
            if not seen.is_finite() and not _all_finite(out, dtype):
                raise _not_finite(adapter, reader, dtype)
        if plan.vectors:
            if base is None:
                raise ValueError("DoRA and trained biases need the base")
            crew.each(_vector_jobs(adapter, plan, files, base, out))
            return ()
    return ("every product of lora_B and lora_A is zero: answers equal the base's",) * all_zero


class _Seen(NamedTuple):
    """Sums of the values that were looked at: a NaN or an infinity among them would show.

    Pieces of a file in the compute dtype are looked at while a core has them in its cache. Of
    others it is the rounded values that count, which lie in the image.
    """

    sums: list[torch.Tensor]
    unseen: list[None]  # an entry for every piece that was not

    def look(self, values: torch.Tensor | None) -> None:
        """Take in these values; None: others, which will have to be seen in the image."""
        if values is None:
            self.unseen.append(None)
        else:
            self.sums.append(values.sum())

    def is_finite(self) -> bool:
        """Whether all values are; False: some may not be, or a sum of large ones overflowed."""
        return not self.sums or bool(torch.stack(self.sums).isfinite().all())


class _Factor(NamedTuple):
    """A or B of one module, and where its parts lie in the image."""

    entry: TensorEntry
    blocks: Sequence[Block]
    scaling: float | None  # of B; None for A
    section: int | None  # of the image, where the file has all of it in the same order


def _factors(adapter: AdapterFile, plan: ImagePlan) -> Iterator[_Factor]:
    blocks, sections = plan.blocks_by_matrix, plan.sections.of_matrix
    for (layer, module), weights in adapter.weights.items():
        for entry, matrix, scaling in (
            (weights.lora_a, "a", None),
            (weights.lora_b, "b", weights.scaling),
        ):
            key = (layer, module, matrix)
            section = sections.get(key)
            if section is not None:
                (block,) = blocks[key]
                rank, length = entry.shape if scaling is None else reversed(entry.shape)
                if (block.rank_width, block.length) != (rank, length):
                    section = None
            yield _Factor(entry, blocks[key], scaling, section)


def _factor_jobs(
    adapter: AdapterFile, files: WeightFiles, target: "_Target", width: int
) -> Iterator[Job]:
    """One job for the bytes between factors, and `width` for each file of them, about as long."""
    by_file: dict[Path, list[_Factor]] = {}
    for factor in _factors(adapter, target.plan):
        by_file.setdefault(factor.entry.file, []).append(factor)
    gaps = target.plan.sections.gaps
    if gaps:
        yield partial(torch._foreach_zero_, [target.sections[gap] for gap in gaps])
    for factors in by_file.values():
        factors.sort(key=lambda factor: factor.entry.offset)
        num_bytes = sum(factor.entry.nbytes for factor in factors)
        for share in _shares(factors, max(PIECE_BYTES, -(-num_bytes // width))):
            yield partial(_read_or_place, share, files, target)


def _shares(factors: Sequence[_Factor], num_bytes: int) -> Iterator[Sequence[_Factor]]:
    """Runs of factors of one dtype that follow one another in their file, of about so many bytes
    each."""
    first, begin = 0, factors[0].entry
    for index, factor in enumerate(factors):
        entry = factor.entry
        is_beyond = entry.offset + entry.nbytes - begin.offset > num_bytes
        if index > first and (is_beyond or entry.dtype != begin.dtype):
            yield factors[first:index]
            first, begin = index, entry
    yield factors[first:]


class _Target:
    """Where factors go: the image, flat in the compute dtype, and its parts."""

    def __init__(self, plan: ImagePlan, image: torch.Tensor, seen: _Seen | None) -> None:
        self.plan = plan
        self.image = image
        self.seen = seen
        self.sections = image.split_with_sizes(plan.sections.sizes)
        self._bytes = image.view(torch.uint8).numpy().data
        self._ends = [end * plan.itemsize for end in accumulate(plan.sections.sizes)]

    def parts_of(self, share: Sequence[_Factor]) -> list[memoryview] | None:
        """The bytes of the image that these factors are, where it has all of them as the file has
        them, one after the other; None: they have to be placed."""
        if FILE_DTYPES[share[0].entry.dtype] != self.image.dtype:
            return None
        parts, end = [], share[0].entry.offset
        for factor in share:
            entry, section = factor.entry, factor.section
            if section is None or entry.offset != end:
                return None
            end += entry.nbytes
            stop = self._ends[section]
            parts.append(self._bytes[stop - entry.nbytes : stop])
        return parts


def _read_or_place(share: Sequence[_Factor], files: WeightFiles, target: _Target) -> None:
    """One call of the system fills the parts of the image from the page cache, and B is multiplied
    there: to read them to other memory first took a quarter of the time."""
    parts = target.parts_of(share)
    if parts is None:
        for piece in _shares(share, PIECE_BYTES):
            _place(piece, files, target)
        return
    first = share[0].entry
    files.read_into(first.file, first.offset, *parts)
    scaled = dict[float, list[torch.Tensor]]()
    for factor in share:
        if factor.scaling is not None and factor.section is not None:
            scaled.setdefault(factor.scaling, []).append(target.sections[factor.section])
    _scale_all(scaled)
    if target.seen is not None:
        target.seen.look(None)


def _scale_all(scaled: Mapping[float, list[torch.Tensor]]) -> None:
    """Multiply in place, in float32 and rounded once. A number instead of the tensor would be
    rounded to the dtype."""
    for scaling, tensors in scaled.items():
        torch._foreach_mul_(tensors, torch.tensor(scaling))


def _place(share: Sequence[_Factor], files: WeightFiles, target: _Target) -> None:
    """Read neighbouring factors at once and write them to the image.

    In a few calls: around each one the interpreter is let go and has to be won back, from the steps
    and from the threads that place other pieces. A call for every view alone made threads useless.
    """
    image = target.image
    parts, scaled = _Parts([], [], []), dict[float, list[torch.Tensor]]()
    first, last = share[0].entry, share[-1].entry
    with files.reader() as reader:
        reader.fetch(first.file, first.offset, last.offset + last.nbytes)
        matrices, run = reader.matrices([factor.entry for factor in share])
        for factor, values in zip(share, matrices, strict=True):
            if factor.scaling is None:
                matrix = values
            elif values.dtype in (image.dtype, torch.float32):
                matrix = values
                scaled.setdefault(factor.scaling, []).append(values)
            else:
                matrix = values.float().mul_(factor.scaling)
            if factor.section is not None:
                parts.sources.append(matrix)
                parts.targets.append(target.sections[factor.section])
                continue
            for block in factor.blocks:
                parts.add(factor, block, matrix, image, target.plan)
        _scale_all(scaled)  # where the file is in float32 the copy rounds
        torch._foreach_copy_(parts.targets, parts.sources)
        if parts.spare:
            torch._foreach_zero_(parts.spare)
        if target.seen is not None:
            target.seen.look(run if run is not None and run.dtype == image.dtype else None)


class _Parts(NamedTuple):
    """Views of a piece of the files and of the image that belong together."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    spare: list[torch.Tensor]  # ranks of the image's tiles that the adapter does not have

    def add(
        self,
        factor: _Factor,
        block: Block,
        matrix: torch.Tensor,
        image: torch.Tensor,
        plan: ImagePlan,
    ) -> None:
        """From [rank, d_in] to [rank_width][length], or [d_out, rank] to [length][rank_width]."""
        length, width, columns = block.length, block.rank_width, factor.entry.shape[1]
        at = (block.page * plan.page_bytes + block.offset) // plan.itemsize
        # as_strided counts from where memory begins: images of many adapters share a slab of it.
        begin, placed = matrix.storage_offset(), image.storage_offset() + at
        if factor.scaling is None:
            real = min(width, factor.entry.shape[0] - block.rank_start)
            begin += block.rank_start * columns + block.start
            self.sources.append(matrix.as_strided((real, length), (columns, 1), begin))
            self.targets.append(image.as_strided((real, length), (length, 1), placed))
            if real < width:
                self.spare.append(image[at + real * length : at + width * length])
        else:
            real = min(width, columns - block.rank_start)
            begin += block.start * columns + block.rank_start
            self.sources.append(matrix.as_strided((length, real), (columns, 1), begin))
            self.targets.append(image.as_strided((length, real), (width, 1), placed))
            if real < width:
                shape, stride = (length, width - real), (width, 1)
                self.spare.append(image.as_strided(shape, stride, placed + real))


def _has_products(plan: ImagePlan, image: torch.Tensor) -> bool:
    """Whether any product of B and A, in the compute dtype, has a number other than zero: nearly
    always the first one has."""
    for layer, module in plan.ranks:
        used: dict[tuple[str, int], torch.Tensor] = {}  # ranks, by matrix and tile
        for matrix in "ab":
            for block in plan.blocks_by_matrix[layer, module, matrix]:
                at = (block.page * plan.page_bytes + block.offset) // plan.itemsize
                values = image[at : at + block.rank_width * block.length]
                found = (
                    values.view(block.rank_width, -1).any(1)
                    if matrix == "a"
                    else values.view(-1, block.rank_width).any(0)
                )
                key = (matrix, block.rank_start)
                used[key] = used[key] | found if key in used else found
        if any(bool((used["a", t] & ranks).any()) for (m, t), ranks in used.items() if m == "b"):
            return True
    return False


def _in_file_order(adapter: AdapterFile) -> Iterator[tuple[int, str, ModuleWeights]]:
    """Sequential reads: a cold disk then reads ahead."""
    order = sorted(
        adapter.weights.items(), key=lambda item: (item[1].lora_a.file, item[1].lora_a.offset)
    )
    for (layer, module), weights in order:
        yield layer, module, weights


def _scaled(lora_b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    if lora_b.dtype == dtype:  # a product with a number is computed in float32 and rounded once
        return lora_b.mul(scaling)
    return lora_b.float().mul(scaling).to(dtype)


def _edge_factors(
    adapter: AdapterFile, reader: WeightReader, dtype: torch.dtype, base: BaseRows | None
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


def _matrix_jobs(
    adapter: AdapterFile,
    plan: ImagePlan,
    files: WeightFiles,
    values: Mapping[MatrixName, torch.Tensor],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> Iterator[Job]:
    """Factors, and whole matrices a few rows at a time."""
    saved = {f"{module}.weight": entry for module, entry in adapter.edges.saved.items()}

    def place(block: MatrixBlock) -> None:
        stop = block.start + block.num_rows
        with files.reader() as reader:
            if block.name in values:
                rows = values[block.name][block.start : stop]
            else:
                rows = reader.read_rows(saved[block.name], block.start, stop)
            target = out[block.page, block.offset :].view(dtype)[: rows.numel()]
            target.view(rows.shape).copy_(rows)

    return (partial(place, block) for block in plan.matrices)


def _vector_jobs(
    adapter: AdapterFile,
    plan: ImagePlan,
    files: WeightFiles,
    base: BaseRows,
    out: torch.Tensor,
) -> Iterator[Job]:
    """Scales and shifts, after the check of all weights: their bits mean nothing to it.

    A job for every module: while one waits for its norms, others read.
    """
    by_module: dict[tuple[int, str], list[VectorBlock]] = {}
    for block in plan.vectors:
        by_module.setdefault((block.layer, block.module), []).append(block)

    def place(key: tuple[int, str], blocks: list[VectorBlock]) -> None:
        with files.reader() as reader:
            values = vectors_of(adapter, key, reader.read, base)
        for block in blocks:
            part = values[block.kind][block.start : block.start + block.length]
            out[block.page, block.offset : block.offset + part.nbytes] = part.view(torch.uint8)

    return (partial(place, key, blocks) for key, blocks in by_module.items())


def _all_finite(out: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the image holds no NaN and no infinity: either would be among its extremes."""
    extremes = [value for page in out.view(dtype).unbind() for value in torch.aminmax(page)]
    return bool(torch.stack(extremes).isfinite().all())


def _not_finite(adapter: AdapterFile, reader: WeightReader, dtype: torch.dtype) -> AdapterError:
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

"""Runs a decoder once at every size of step, so that no kernel is compiled while it serves.

Kernels are compiled for classes of sizes: an FP8 multiply for each power of two of rows up to 128,
a 4-bit one for tiles of 128 above that too, attention for decode rows and for chunks, LoRA for
either. Compiling one takes 0.5 to 2 s, which the first prompt and every running answer would wait
for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.models.decoder import Decoder
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.layout import TOKENS_PER_PAGE, plan_image
from multilora_kernels.lora_choice import is_decode
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

_RANK = 16  # sizes launches and compiles nothing anew
_STAND_IN = 1  # a slot
# Rows of which a 4-bit multiply on Hopper has three tiles, and then shares K as it does for neither
# two nor four.
_THREE_TILES = 384


@torch.inference_mode()
def warm_up(
    decoder: Decoder,
    pool: torch.Tensor,
    max_tokens: int,
    adapters: tuple[AdapterTable, Segments] | None = None,
    kv_dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Steps of each of `step_sizes`: a decode row, and a chunk of the others.

    The pool is not written, and no step takes more memory than one that is served.

    With `adapters` (a settled, empty table) their launches are part of each step.
    `progress` is told how many steps are done, and of how many.
    """
    sizes = list(step_sizes(max_tokens))
    with _stand_in(decoder, pool, adapters):
        for index, num_tokens in enumerate(sizes):
            progress(index, len(sizes))
            context = spare_step(pool, num_tokens, adapters, kv_dtype)
            token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=pool.device)
            hidden = decoder.forward(token_ids, context.slot_mapping.clamp(min=0), context)
            decoder.logits(hidden[:1], context.adapters if num_tokens == 1 else None)
    progress(len(sizes), len(sizes))


@contextmanager
def _stand_in(
    decoder: Decoder, pool: torch.Tensor, adapters: tuple[AdapterTable, Segments] | None
) -> Iterator[None]:
    """An adapter in slot 1 whose weights are whatever the scratch page holds: steps of prompts have
    LoRA launches only where a row has an adapter."""
    if adapters is None:
        yield
        return
    table, segments = adapters
    geometry = decoder.geometry
    modules = product(range(geometry.num_layers), geometry.module_shapes)
    ranks = dict.fromkeys(modules, _RANK)
    plan = plan_image(ranks, geometry.module_shapes, pool.shape[1], decoder.dtype.itemsize)
    table.set(_STAND_IN, plan, [0] * plan.num_pages)
    table.flush()
    try:
        yield
    finally:
        table.clear(_STAND_IN)
        table.flush()
        segments.build([0])  # no longer sized for a capture


def step_sizes(max_tokens: int) -> Iterator[int]:
    """Powers of two and `_THREE_TILES` below `max_tokens`, then itself."""
    sizes = {1 << power for power in range(max_tokens.bit_length())} | {_THREE_TILES}
    yield from sorted(size for size in sizes if size < max_tokens)
    yield max_tokens


def spare_step(
    pool: torch.Tensor,
    num_tokens: int,
    adapters: tuple[AdapterTable, Segments] | None = None,
    kv_dtype: torch.dtype | None = None,
    decodes: int = 1,
) -> StepContext:
    """Rows that read the scratch page and write nowhere: `decodes` of one token, then a chunk."""
    device, chunk = pool.device, num_tokens - decodes
    lens = [1] * decodes + ([chunk] if chunk else [])
    starts = [*range(decodes + 1), *([num_tokens] if chunk else [])]
    columns = -(-max(lens) // (16 * TOKENS_PER_PAGE)) * 16  # rounded up as those of real steps
    table, segments = adapters or (None, None)
    if table is not None and segments is not None:
        if is_decode(num_tokens):
            segments.prepare_capture(table, num_tokens, _RANK, extras=True)
        else:
            segments.build([_STAND_IN] * num_tokens)
    return StepContext(
        pool=pool,
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        attention=AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            page_table=torch.zeros(len(lens), columns, dtype=torch.int32, device=device),
            num_decodes=decodes,
            max_query_len=max(1, chunk),
            max_seq_len=max(lens),
        ),
        table=table,
        segments=segments,
        kv_dtype=kv_dtype,
    )

"""Runs a decoder once at every size of step, so that no kernel is compiled while it serves.

Kernels are compiled for classes of sizes: a 4-bit or FP8 multiply for each power of two of rows up
to 128, attention for decode rows and for chunks. Compiling one takes 0.5 to 2 s, which the first
prompt and every running answer would wait for.
"""

from collections.abc import Callable, Iterator

import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.models.decoder import Decoder
from multilora_kernels.layout import TOKENS_PER_PAGE
from multilora_kernels.lora_choice import is_decode
from multilora_kernels.paged_attention import AttentionBatch
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable

_RANK = 16  # sizes launches and compiles nothing anew


@torch.inference_mode()
def warm_up(
    decoder: Decoder,
    pool: torch.Tensor,
    max_tokens: int,
    adapters: tuple[AdapterTable, Segments] | None = None,
    kv_dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Steps of 1, 2, 4 ... `max_tokens` tokens: a decode row, and a chunk of the others.

    The pool is not written, and no step takes more memory than one that is served.

    With `adapters` (a settled table) their launches are part of each step of decode size.
    `progress` is told how many steps are done, and of how many.
    """
    sizes = list(_sizes(max_tokens))
    for index, num_tokens in enumerate(sizes):
        progress(index, len(sizes))
        context = spare_step(pool, num_tokens, adapters, kv_dtype)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=pool.device)
        hidden = decoder.forward(token_ids, context.slot_mapping.clamp(min=0), context)
        decoder.logits(hidden[:1], context.adapters if num_tokens == 1 else None)
    if adapters is not None:
        adapters[1].build([0])  # no longer sized for a capture
    progress(len(sizes), len(sizes))


def _sizes(max_tokens: int) -> Iterator[int]:
    """Powers of two below `max_tokens`, then itself."""
    size = 1
    while size < max_tokens:
        yield size
        size *= 2
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
    with_adapters = adapters is not None and is_decode(num_tokens)
    if adapters is not None and with_adapters:
        adapters[1].prepare_capture(adapters[0], num_tokens, _RANK, extras=True)
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
        table=adapters[0] if adapters is not None and with_adapters else None,
        segments=adapters[1] if adapters is not None and with_adapters else None,
        kv_dtype=kv_dtype,
    )

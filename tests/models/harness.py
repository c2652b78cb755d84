"""Runs a Decoder over prompts as the engine does: pages, chunks, mixed rows, adapters.

The pool is poisoned with NaN and pages are handed out in shuffled order, so that reading a wrong
page, or a token beyond a sequence's end, shows in every number.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from multilora_cli.layers.context import StepContext
from multilora_cli.models.decoder import Decoder
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.layout import TOKENS_PER_PAGE, ImagePlan, page_bytes
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.table import AdapterTable


@dataclass
class Row:
    """One sequence: its tokens, adapter slot, pages, and how many tokens are computed."""

    tokens: list[int]
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.done


Chunker = Callable[[Row], int]
"""How many of a row's remaining tokens the next step takes."""


def whole(row: Row) -> int:
    """Prefill in one piece."""
    return row.left


def one_by_one(row: Row) -> int:
    """Every token a decode step."""
    return 1


def chunks_of(size: int) -> Chunker:
    """Prefill in pieces of `size` tokens."""
    return lambda row: min(size, row.left)


def prefill_then_decode(prefill: int) -> Chunker:
    """The first `prefill` tokens in one piece, then token by token."""
    return lambda row: min(prefill, row.left) if row.done == 0 else 1


def ragged(seed: int, most: int = 23) -> Chunker:
    """Pieces of random size; some rows pause for a step."""
    rng = random.Random(seed)
    return lambda row: min(rng.randrange(most + 1), row.left)


class PagedRunner:
    """A decoder with a pool, a page allocator and an adapter table."""

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int = 256,
        num_slots: int = 9,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        geometry, device = decoder.geometry, decoder.device
        self.decoder = decoder
        self.kv_dtype = kv_dtype or decoder.dtype
        itemsize = self.kv_dtype.itemsize
        size = page_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, itemsize)
        self.pool = torch.full((num_pages, size), 0xFF, dtype=torch.uint8, device=device)
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        self.table = AdapterTable(
            num_slots, geometry.num_layers, geometry.module_shapes, 1 << 16, device
        )

    def load_adapter(self, slot: int, plan: ImagePlan, image: torch.Tensor) -> None:
        """Copy an adapter's image [num_pages, page_bytes] into pages and enter it at `slot`."""
        pages = [self.free.pop() for _ in range(plan.num_pages)]
        self.pool[torch.tensor(pages, device=self.pool.device)] = image.to(self.pool.device)
        self.table.set(slot, plan, pages)
        self.table.flush()

    def step(self, work: Sequence[tuple[Row, int]]) -> list[torch.Tensor]:
        """Compute the next tokens of rows; logits [tokens, vocab] of each, in the order given."""
        order = sorted(range(len(work)), key=lambda i: work[i][1] != 1)
        ordered = [work[i] for i in order]
        tokens, positions, mapping, slots = [], [], [], []
        for row, count in ordered:
            while len(row.pages) * TOKENS_PER_PAGE < row.done + count:
                row.pages.append(self.free.pop())
            for position in range(row.done, row.done + count):
                tokens.append(row.tokens[position])
                positions.append(position)
                page = row.pages[position // TOKENS_PER_PAGE]
                mapping.append(page * TOKENS_PER_PAGE + position % TOKENS_PER_PAGE)
                slots.append(row.slot)
            row.done += count
        device = self.decoder.device
        segments = Segments(len(tokens), device)
        segments.build(slots)
        context = StepContext(
            pool=self.pool,
            slot_mapping=torch.tensor(mapping, device=device),
            attention=_attention(ordered, device),
            table=self.table,
            segments=segments,
            kv_dtype=self.kv_dtype,
        )
        hidden = self.decoder.forward(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), context
        )
        logits = self.decoder.logits(hidden, context.adapters).split(
            [count for _, count in ordered]
        )
        back = dict(zip(order, logits, strict=True))
        return [back[i] for i in range(len(work))]

    def run(self, rows: Sequence[Row], chunker: Chunker = whole) -> list[torch.Tensor]:
        """Compute all rows to their ends, mixed in steps; logits [len(tokens), vocab] of each."""
        pieces: list[list[torch.Tensor]] = [[] for _ in rows]
        while any(row.left for row in rows):
            wanted = [(i, chunker(row)) for i, row in enumerate(rows) if row.left]
            wanted = [(i, count) for i, count in wanted if count]
            if not wanted:
                continue
            for (i, _), logits in zip(
                wanted, self.step([(rows[i], count) for i, count in wanted]), strict=True
            ):
                pieces[i].append(logits)
        for row in rows:
            self.release(row)
        return [torch.cat(parts) for parts in pieces]

    def release(self, row: Row) -> None:
        """Give a row's pages back, poisoned."""
        self.pool[torch.tensor(row.pages, device=self.pool.device)] = 0xFF
        self.free += row.pages
        row.pages = []


class StepBuffers:
    """A step in memory of fixed size, as a captured graph needs it; what is left over is padding.

    `decodes` rows of one token come first, then `chunks` rows of `chunk_tokens` tokens in all.
    """

    def __init__(
        self, runner: PagedRunner, decodes: int, chunks: int = 0, chunk_tokens: int = 0
    ) -> None:
        self.runner, self.decodes, max_pages = runner, decodes, 10
        num_tokens, num_rows, device = decodes + chunk_tokens, decodes + chunks, runner.pool.device
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.segments = Segments(num_tokens, device)
        self.context = StepContext(
            pool=runner.pool,
            slot_mapping=torch.zeros_like(self.token_ids),
            attention=AttentionBatch(
                query_start=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
                seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
                page_table=torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device),
                num_decodes=decodes,
                max_query_len=max(1, chunk_tokens),
                max_seq_len=max_pages * TOKENS_PER_PAGE,
            ),
            table=runner.table,
            segments=self.segments,
            side=SideStream(device) if device.type == "cuda" else None,
        )

    def fill(self, decodes: Sequence[Row], chunks: Sequence[tuple[Row, int]] = ()) -> list[int]:
        """The last token of the `decodes`, the last few of the `chunks`; their pages are there.

        Returns the token row of each one's last token.
        """
        attention, num_tokens = self.context.attention, self.token_ids.shape[0]
        tokens, positions, slots = [0] * num_tokens, [0] * num_tokens, [0] * num_tokens
        mapping, lens = [-1] * num_tokens, [0] * attention.num_sequences
        starts, last = list(range(self.decodes + 1)), []
        places = [*range(len(decodes)), *range(self.decodes, self.decodes + len(chunks))]
        for place, (row, count) in zip(places, [*((r, 1) for r in decodes), *chunks], strict=True):
            begin, end = len(row.tokens) - count, len(row.tokens)
            first = place if place < self.decodes else starts[-1]
            for at, position in enumerate(range(begin, end), first):
                page = row.pages[position // TOKENS_PER_PAGE]
                tokens[at], positions[at], slots[at] = row.tokens[position], position, row.slot
                mapping[at] = page * TOKENS_PER_PAGE + position % TOKENS_PER_PAGE
            if place >= self.decodes:
                starts.append(first + count)
            lens[place] = end
            last.append(first + count - 1)
            table = torch.tensor(row.pages, dtype=torch.int32)
            attention.page_table[place, : len(row.pages)].copy_(table)
        starts += starts[-1:] * (attention.num_sequences + 1 - len(starts))
        for buffer, values in (
            (self.token_ids, tokens),
            (self.positions, positions),
            (self.context.slot_mapping, mapping),
            (attention.query_start, starts),
            (attention.seq_lens, lens),
        ):
            buffer.copy_(torch.tensor(values))
        self.segments.build(slots)
        return last

    def run(self) -> torch.Tensor:
        """Logits [tokens, vocab], those of padding without meaning."""
        decoder = self.runner.decoder
        hidden = decoder.forward(self.token_ids, self.positions, self.context)
        return decoder.logits(hidden, self.context.adapters)


def _attention(work: Sequence[tuple[Row, int]], device: torch.device) -> AttentionBatch:
    counts = [count for _, count in work]
    lens = [row.done for row, _ in work]
    widest = max(len(row.pages) for row, _ in work)
    # Entries past a row's context are never used: an impossible page number proves it.
    table = [row.pages + [2**30] * (widest - len(row.pages)) for row, _ in work]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        page_table=torch.tensor(table, dtype=torch.int32, device=device),
        num_decodes=sum(count == 1 for count in counts),
        max_query_len=max(counts),
        max_seq_len=max(lens),
    )


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def log_probability_gap(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference of log-probabilities between two [T, vocab] logits."""
    ours, theirs = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())

"""Penalties for what a sequence said before, on the few logits that they change.

    c = times the token occurs in the output; seen = in prompt or output
    x / r where x > 0, x * r otherwise       seen        repetition
    x -= f * c                                           frequency
    x -= p                                   c > 0       presence

A history names a token once for each time it was said. The first launch counts into an array as
large as the penalised logits, the second takes every count out again: whoever finds one there is
the first of a token's occurrences and changes its logit, so that each is changed once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import on_host

_BLOCK = 512
_PROGRAMS = 8  # that share a row's history
_FIELDS = 7
_IN_PROMPT = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class Histories:
    """The penalised rows and what they said, one after another.

    `fields` int32 [7, P]: row of the logits; where its tokens, its output and its end lie in
    `tokens`; then as float32 bits repetition, frequency and presence. `tokens` int32 [N]: a token,
    or -1 - i for the one that is `pending[i]`, int64 on the device.
    """

    fields: torch.Tensor
    tokens: torch.Tensor
    pending: torch.Tensor | None

    @property
    def strengths(self) -> torch.Tensor:
        """float32 [3, P]: repetition, frequency, presence."""
        return self.fields[4:].view(torch.float32)


@triton.jit
def _said(tokens_ptr, pending_ptr, at, mask, vocab):
    """The tokens at `at`, and which of them are."""
    token = tl.load(tokens_ptr + at, mask=mask, other=0)
    is_late = mask & (token < 0)
    late = tl.load(pending_ptr + tl.where(is_late, -1 - token, 0), mask=is_late, other=0)
    token = tl.where(is_late, late.to(tl.int32), token)
    return token, mask & (token < vocab)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["tokens_ptr", "pending_ptr"],
)
def count_kernel(counts_ptr, vocab, fields_ptr, rows, tokens_ptr, pending_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    output = tl.load(fields_ptr + 2 * rows + row)
    end = tl.load(fields_ptr + 3 * rows + row)
    first = tl.load(fields_ptr + rows + row) + tl.program_id(1) * BLOCK
    counts_ptr += row.to(tl.int64) * vocab
    for start in range(first, end, BLOCK * tl.num_programs(1)):
        at = start + tl.arange(0, BLOCK)
        token, mask = _said(tokens_ptr, pending_ptr, at, at < end, vocab)
        tl.atomic_add(counts_ptr + token, 1, mask=mask & (at >= output), sem="relaxed")
        tl.atomic_or(counts_ptr + token, _IN_PROMPT, mask=mask & (at < output), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["tokens_ptr", "pending_ptr"],
)
def penalise_kernel(
    logits_ptr,
    stride,
    counts_ptr,
    vocab,
    fields_ptr,
    rows,
    tokens_ptr,
    pending_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    end = tl.load(fields_ptr + 3 * rows + row)
    first = tl.load(fields_ptr + rows + row) + tl.program_id(1) * BLOCK
    repetition = tl.load(fields_ptr + 4 * rows + row).to(tl.float32, bitcast=True)
    frequency = tl.load(fields_ptr + 5 * rows + row).to(tl.float32, bitcast=True)
    presence = tl.load(fields_ptr + 6 * rows + row).to(tl.float32, bitcast=True)
    counts_ptr += row.to(tl.int64) * vocab
    logits_ptr += tl.load(fields_ptr + row).to(tl.int64) * stride
    for start in range(first, end, BLOCK * tl.num_programs(1)):
        at = start + tl.arange(0, BLOCK)
        token, mask = _said(tokens_ptr, pending_ptr, at, at < end, vocab)
        found = tl.atomic_xchg(counts_ptr + token, 0, mask=mask, sem="relaxed")
        mask &= found != 0
        count = found & (_IN_PROMPT - 1)
        x = tl.load(logits_ptr + token, mask=mask, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x -= frequency * count.to(tl.float32)
        x -= tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + token, x, mask=mask)


def penalise(logits: torch.Tensor, histories: Histories) -> None:
    """Penalise in place rows of logits float32 [R, V], each contiguous."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    fields, tokens, pending = histories.fields, histories.tokens, histories.pending
    assert fields.shape[0] == _FIELDS and fields.is_contiguous() and tokens.is_contiguous()
    if on_host(logits.device):
        return penalise_ref(logits, histories)
    rows, vocab = fields.shape[1], logits.shape[1]
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device=logits.device)
    places = tokens if pending is None else pending
    grid = (rows, _PROGRAMS)
    count_kernel[grid](counts, vocab, fields, rows, tokens, places, BLOCK=_BLOCK)
    penalise_kernel[grid](
        logits, logits.stride(0), counts, vocab, fields, rows, tokens, places, BLOCK=_BLOCK
    )


def penalise_ref(logits: torch.Tensor, histories: Histories) -> None:
    """The same in torch, also the path on a CPU."""
    rows, starts, outputs, ends = histories.fields[:4].long()
    tokens = histories.tokens.long()
    if histories.pending is not None:
        late = histories.pending[(-1 - tokens).clamp(min=0)]
        tokens = torch.where(tokens < 0, late, tokens)
    owners = torch.repeat_interleave(ends - starts)
    is_output = torch.arange(len(tokens), device=tokens.device) >= outputs[owners]
    repetition, frequency, presence = histories.strengths[:, :, None]
    x = logits[rows]
    counts = torch.zeros_like(x)
    counts.index_put_((owners, tokens), is_output.float(), accumulate=True)
    seen = torch.zeros_like(x, dtype=torch.bool)
    seen[owners, tokens] = True
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts
    x -= presence * (counts > 0)
    logits[rows] = x

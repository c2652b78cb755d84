"""The step that takes the most memory, run once at the start.

What it takes is known from then on, and the kernels of its sampling are on the device before a
request asks for them.
"""

import torch
from msgspec.structs import replace

from multilora_cli.engine.batch import BatchBuilder
from multilora_cli.engine.messages import SamplingParams
from multilora_cli.layers.sampler import SamplingBatch, SamplingRow, sample
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.warm_up import spare_step

# Everything that keeps an array of logits of its own.
_DEAREST = SamplingParams(
    max_tokens=1, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=1, logprobs=5,
    presence_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 1.0},
)  # fmt: skip
# What else has kernels of its own.
_PLAIN = [SamplingParams(max_tokens=1, temperature=temperature) for temperature in (0.0, 0.9)]


@torch.inference_mode()
def largest_step(decoder: Decoder, builder: BatchBuilder, max_tokens: int, max_seqs: int) -> None:
    """`max_seqs` rows that decode and a chunk that fills the step, all rows of one token sampled
    in the dearest way. Writes no page."""
    device = builder.pool.device
    context = spare_step(builder.pool, max_tokens, kv_dtype=builder.kv_dtype, decodes=max_seqs)
    token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    hidden = decoder.forward(token_ids, context.slot_mapping.clamp(min=0), context)
    logits = decoder.logits(hidden[:max_seqs])
    sample_every_way(logits, builder.sampled)


@torch.inference_mode()
def sample_every_way(
    logits: torch.Tensor, sampled: torch.Tensor, *, logprobs: int | None = _DEAREST.logprobs
) -> None:
    """Sample rows of logits float32 [R, V] in the dearest way, and one in every other that has
    kernels of its own. `sampled` is the builder's.

    `logprobs` None within `compile_only`: torch would look them up at tokens that no launch wrote,
    and a place beyond the vocabulary is the end of a CUDA context.
    """
    count, vocab = logits.shape
    row = SamplingRow(replace(_DEAREST, logprobs=logprobs), (0,), (0,))
    sample(logits, SamplingBatch.build([row] * count, vocab, logits.device, sampled))
    for plain in _PLAIN:
        row = SamplingRow(plain, (), ())
        sample(logits[:1], SamplingBatch.build([row], vocab, logits.device, sampled))

"""What quantisation changes: adapters on the base as served against the same base in 16 bits.

Both are served by engines of this process, one after the other. Of the 16-bit answers the likeliest
tokens of every position are kept and all others as one, so that a fleet's fit into memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from multilora_cli.engine.agreement import NOTHING, Agreement
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.parity_run import Subject, probe_config, waves_of
from multilora_cli.engine.probe import Heard, Probe
from multilora_cli.errors import BadInput
from multilora_cli.progress import Report
from multilora_cli.sizing.geometry import read_geometry

_KEPT = 1024  # tokens of a position; they hold more than 0.999 of the probability


@dataclass(frozen=True)
class Kept:
    """The likeliest tokens of each position: ids int64 and log-probabilities fp32 [T, kept]."""

    ids: torch.Tensor
    logprobs: torch.Tensor


def keep(logprobs: torch.Tensor) -> Kept:
    """Of log-probabilities fp32 [T, vocab]."""
    values, ids = logprobs.topk(min(_KEPT, logprobs.shape[1]))
    return Kept(ids, values)


def drift_of(got: torch.Tensor, kept: Kept) -> Agreement:
    """How far `got` fp32 [T, vocab] is from what was kept: KL over the kept tokens and the rest
    as one, which is at most the whole KL."""
    mine = got.gather(1, kept.ids)
    difference = (mine - kept.logprobs).abs()
    rest, mine_rest = _rest(kept.logprobs), _rest(mine)
    kl = (kept.logprobs.exp() * (kept.logprobs - mine)).sum(-1)
    kl += torch.where(rest > 0, rest * (rest / mine_rest.clamp(min=1e-12)).log(), 0.0)
    same = got.argmax(-1) == kept.ids[:, 0]
    return Agreement(
        len(got), float(difference.max()), float(kl.clamp(min=0).mean()), float(same.float().mean())
    )


def _rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Probability of all other tokens."""
    return (1.0 - logprobs.double().exp().sum(-1)).clamp(min=0.0).float()


def measure_drift(
    served: EngineConfig,
    sixteen_bit: Path,
    subjects: Sequence[Subject],
    prompts: Sequence[Sequence[int]],
    report: Report,
) -> Iterator[tuple[str | None, Agreement]]:
    """Name and drift of the bare base (None), then of every subject. Raises MloraError.

    `sixteen_bit` is the folder of the same model, not quantised; it may be the served one where
    that is quantised at load or only its KV cache is.
    """
    other = msgspec.structs.replace(
        served, model_path=str(sixteen_bit), base_digest="", quantization="none",
        kv_cache_dtype="auto",
    )  # fmt: skip
    _check_same_model(Path(served.model_path), sixteen_bit)
    kept: list[list[Kept]] = []
    for heard in _answers(other, subjects, prompts, report):
        kept.append([keep(said.logprobs) for said in heard])
    for index, heard in enumerate(_answers(served, subjects, prompts, report)):
        total = NOTHING
        for said, before in zip(heard, kept[index], strict=True):
            total += drift_of(said.logprobs, before)
        yield (subjects[index - 1].name if index else None), total


def _answers(
    config: EngineConfig,
    subjects: Sequence[Subject],
    prompts: Sequence[Sequence[int]],
    report: Report,
) -> Iterator[list[Heard]]:
    """What the bare base says to the prompts, then what every subject says."""
    waves = waves_of(subjects, prompts, read_geometry(Path(config.model_path)).vocab_size)
    probe = Probe(probe_config(config, waves, prompts), report)
    try:
        yield probe.ask([(prompt, None) for prompt in prompts])
        done = 0
        for wave in waves:
            heard = probe.ask([(prompt, subject.ref) for subject in wave for prompt in prompts])
            for start in range(0, len(heard), len(prompts)):
                yield heard[start : start + len(prompts)]
            done += len(wave)
            report("answers", done, len(subjects))
    finally:
        probe.close()


def _check_same_model(served: Path, other: Path) -> None:
    ours, theirs = read_geometry(served), read_geometry(other)
    fields = ("family", "num_layers", "module_shapes", "vocab_size", "tie_word_embeddings")
    for field in fields:
        found, expected = getattr(theirs, field), getattr(ours, field)
        if found != expected:
            raise BadInput(
                f"--against {other}: {field}: found {found}, the served base has {expected}",
                hint="name the 16-bit model that the served base was quantised from",
            )

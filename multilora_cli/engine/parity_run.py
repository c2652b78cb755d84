"""Served answers against the reference, and against those of another base."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.engine.agreement import NOTHING, Agreement, compare, largest_of_decoded
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.messages import AdapterRef, Ready
from multilora_cli.engine.parity import Passage, Reference, Rounding
from multilora_cli.engine.probe import ANSWER_TOKENS, Heard, Probe
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.progress import Report
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.pages import kv_page_bytes, pages_for_tokens

_WAVE_BYTES = 2**30  # of log-probabilities held at once: those heard, and the reference's
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.5e-2, "float16": 1.5e-2}
_TOLERANCE_FP8 = 2e-2  # activations rounded to FP8, or K and V
# Rounding grows with a model's depth and with what an adapter does: the reference, rounded as the
# device rounds, says by how much, and the order of sums differs once more.
_NOISE = 3.0


@dataclass(frozen=True)
class Subject:
    """An adapter whose answers are compared; `num_pages` as the plan says."""

    name: str
    adapter: AdapterFile
    digest: str
    num_pages: int

    @property
    def ref(self) -> AdapterRef:
        """As requests name it."""
        return AdapterRef(self.name, self.digest, str(self.adapter.folder), 1)


@dataclass(frozen=True)
class Parity:
    """One adapter's answers beside the reference's.

    `effect` is the largest change of a log-probability that the adapter makes to the base,
    `rounding` the largest that the device's rounding makes to the reference (0: it has none).
    """

    agreement: Agreement
    base: Agreement  # the bare base's own, on the same prompts
    effect: float
    rounding: float
    tolerance: float

    @property
    def is_exact(self) -> bool:
        """Whether the served answers are the reference's within rounding."""
        return self.agreement.largest <= self.tolerance


class ParityCheck:
    """A probe on the served base, and the reference of the same base. Close it at the end."""

    def __init__(
        self,
        config: EngineConfig,
        subjects: Sequence[Subject],
        prompts: Sequence[Sequence[int]],
        report: Report,
    ) -> None:
        self._folder = Path(config.model_path)
        self._geometry = read_geometry(self._folder)
        self._quantization = base_quantization(self._folder, self._geometry, config.quantization)
        self._prompts = prompts
        self._report = report
        self._waves = waves_of(subjects, prompts, self._geometry.vocab_size)
        self._probe = Probe(probe_config(config, self._waves, prompts), report)
        self._tolerance = _TOLERANCE[self._probe.ready.dtype]
        self._rounding = self._device_rounding(config)
        if self._rounding is not None and (self._rounding.fp8_rows or self._rounding.fp8_kv):
            self._tolerance = _TOLERANCE_FP8

    def _device_rounding(self, config: EngineConfig) -> Rounding | None:
        """What the served side rounds to; None where float32 is all there is."""
        ready = self._probe.ready
        dtype: torch.dtype = getattr(torch, ready.dtype)
        lies = placed(self._quantization, torch.device(ready.device), dtype)
        quantised = lies.method == "fp8" and lies.activations != "none"
        rounding = Rounding(
            dtype,
            fp8_rows=quantised and lies.placement == "packed",
            fp8_kv=config.kv_cache_dtype == "fp8",
        )
        return None if rounding == Rounding(torch.float32) else rounding

    def __enter__(self) -> "ParityCheck":
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.close()

    @property
    def ready(self) -> Ready:
        """What the engine runs on."""
        return self._probe.ready

    def results(self) -> Iterator[tuple[str, Parity]]:
        """Name and result of every subject. Each wave of adapters shares the served batches, and
        passes once through the base's layers. Raises MloraError."""
        for wave in self._waves:
            refs = [None, *(subject.ref for subject in wave)]
            heard = self._probe.ask([(prompt, ref) for prompt in self._prompts for ref in refs])
            yield from self._judge(wave, heard)

    def _judge(
        self, wave: Sequence[Subject], heard: Sequence[Heard]
    ) -> Iterator[tuple[str, Parity]]:
        """`heard` has, for every prompt, the bare base and then every adapter of the wave."""
        owners = [None, *range(len(wave))]
        passages = [
            Passage([*said.prompt, *said.tokens[:-1]], owner)
            for said, owner in zip(heard, owners * len(self._prompts), strict=True)
        ]
        twins = [] if self._rounding is None else [replace(p, rounded=True) for p in passages]
        with Reference(
            self._folder,
            self._geometry,
            self._quantization,
            [subject.adapter for subject in wave],
            self._rounding,
        ) as reference:
            computed = reference.logprobs([*passages, *twins], self._report)
        expected, rounded = computed[: len(passages)], computed[len(passages) :]
        step = len(owners)
        base = _agreement(heard[::step], expected[::step])
        for index, subject in enumerate(wave, 1):
            mine = expected[index::step]
            off = max(
                (compare(*pair).largest for pair in zip(rounded[index::step], mine, strict=False)),
                default=0.0,
            )
            parity = Parity(
                agreement=_agreement(heard[index::step], mine),
                base=base,
                effect=_effect(mine, expected[::step], self._prompts),
                rounding=off,
                tolerance=max(self._tolerance, _NOISE * off),
            )
            yield subject.name, parity


def waves_of(
    subjects: Sequence[Subject], prompts: Sequence[Sequence[int]], vocab: int
) -> list[Sequence[Subject]]:
    """Subjects in groups whose log-probabilities fit into memory together."""
    rows = sum(len(prompt) + ANSWER_TOKENS for prompt in prompts)
    size = max(1, _WAVE_BYTES // (3 * rows * vocab * 4) - 1)
    return [subjects[start : start + size] for start in range(0, len(subjects), size)]


def probe_config(
    config: EngineConfig, waves: Sequence[Sequence[Subject]], prompts: Sequence[Sequence[int]]
) -> EngineConfig:
    """`config` with a pool that holds one wave and its sequences, and without prefix caching."""
    most = max((len(wave) for wave in waves), default=0) + 1
    adapters = max((sum(s.num_pages for s in wave) for wave in waves), default=0)
    longest = max(len(prompt) for prompt in prompts) + ANSWER_TOKENS
    pages = adapters + most * len(prompts) * pages_for_tokens(longest) + 2
    geometry = read_geometry(Path(config.model_path))
    itemsize = 4  # of K and V at most: which device it will be is not known yet
    return msgspec.structs.replace(
        config,
        pool_bytes=pages * kv_page_bytes(geometry, itemsize),
        kv_reserve=0.0,
        prefix_caching=False,
        num_slots=most + 1,
        max_loras=None,
        max_num_seqs=min(config.max_num_seqs, 64),
        max_queue=max(config.max_queue, most * len(prompts)),
        max_num_batched_tokens=max(longest, min(config.max_num_batched_tokens, 1024)),
        max_model_len=None,
    )


def _agreement(heard: Sequence[Heard], expected: Sequence[torch.Tensor]) -> Agreement:
    """Over all positions of prompts; what was decoded counts for the largest difference."""
    total = NOTHING
    for said, rows in zip(heard, expected, strict=True):
        size = len(said.prompt)
        found = compare(said.logprobs, rows[: size - 1]) if size > 1 else NOTHING
        decoded = largest_of_decoded(said.decoded, rows[size - 1 :])
        total += replace(found, largest=max(found.largest, decoded))
    return total


def _effect(
    changed: Sequence[torch.Tensor],
    bare: Sequence[torch.Tensor],
    prompts: Sequence[Sequence[int]],
) -> float:
    """The largest difference that an adapter makes on the prompts; answers may have parted."""
    return max(
        compare(mine[:size, :vocab], base[:size, :vocab]).largest
        for mine, base, prompt in zip(changed, bare, prompts, strict=True)
        for size, vocab in [(len(prompt), min(mine.shape[1], base.shape[1]))]
    )

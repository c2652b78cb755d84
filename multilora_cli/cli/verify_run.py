"""What `mlora verify` finds out, before anything of it is shown."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.adapters.vectors import UnknownBase
from multilora_cli.cli.base import fetch_base
from multilora_cli.cli.fleet_adapters import read_fleet_adapters
from multilora_cli.cli.startup import engine_config
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.agreement import Agreement
from multilora_cli.engine.device_memory import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
)
from multilora_cli.engine.drift import measure_drift
from multilora_cli.engine.examine import Examined, examine
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.parity_run import Parity, ParityCheck, Subject
from multilora_cli.engine.probe import ANSWER_TOKENS
from multilora_cli.errors import BadInput, MloraError, Refused, reason_of
from multilora_cli.fleet.declared import declared_patterns
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.models.checkpoint import base_digest
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.progress import Report
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.host_memory import free_host_bytes
from multilora_cli.sizing.pages import kv_page_bytes
from multilora_cli.units import format_size

SCHEMA = "mlora.verify/1"
Verdict = Literal["exact", "checked", "warning", "refused"]
MAX_PROMPTS = 256
_PROMPT_TOKENS = 256
_PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Dear customer, thank you for your message of 12 March. We have looked into it and",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Water boils at 100 degrees Celsius at sea level; on a high mountain it",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Summary: the parties agree that the lease ends on the last day of",
    "Patient is a 54-year-old with a history of",
    "SELECT name, price FROM products WHERE",
)
_PARITY_PROMPTS = 3  # of those shipped; all of a file


@dataclass
class AdapterReport:
    """One adapter's verdict and what it rests on."""

    name: str
    source: str
    verdict: Verdict = "checked"
    reason: str = ""  # why it is refused
    hint: str | None = None
    warnings: list[str] = field(default_factory=list)
    examined: Examined | None = None
    parity: Parity | None = None
    drift: Agreement | None = None

    def refuse(self, reason: str, hint: str | None = None) -> None:
        """Set the verdict that no other replaces."""
        self.verdict, self.reason, self.hint = "refused", reason, hint


@dataclass
class VerifyReport:
    """A base and its adapters; `base_drift` is that of the bare base."""

    model: str
    revision: str | None
    folder: str
    digest: str
    storage: str
    device: str
    dtype: str
    adapters: list[AdapterReport]
    notes: tuple[str, ...] = ()  # of the fleet, not of one adapter
    base_drift: Agreement | None = None
    max_drift: float | None = None

    @property
    def refused(self) -> int:
        """How many adapters are refused."""
        return sum(adapter.verdict == "refused" for adapter in self.adapters)

    @property
    def drifts(self) -> bool:
        """Whether the bare base itself drifts by more than the fleet allows."""
        base, limit = self.base_drift, self.max_drift
        return base is not None and limit is not None and not base.mean_kl <= limit


class Verification:
    """One run over a fleet. Raises MloraError for what is wrong with fleet or base."""

    def __init__(self, loaded: LoadedFleet, report: Report) -> None:
        self._loaded = loaded
        self._report = report
        self._folder = fetch_base(loaded, report)
        self._geometry = read_geometry(self._folder)
        fleet, digest = loaded.fleet, base_digest(self._folder)
        self._config = engine_config(loaded, self._folder, len(fleet.adapters), digest)
        self._device = choose_device(fleet.memory.device)
        self._dtype = choose_dtype(fleet.base.dtype, self._device)
        stored = base_quantization(self._folder, self._geometry, fleet.base.quantization)
        self._quantization = placed(stored, self._device, self._dtype)
        self.result = VerifyReport(
            model=fleet.base.model,
            revision=fleet.base.revision,
            folder=str(self._folder),
            digest=digest,
            storage=self._quantization.describe(),
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            adapters=[],
            notes=tuple(
                f"pattern {pattern.pattern}: its adapters are not known before they are asked for,"
                " and not verified; name one with --base"
                for pattern in declared_patterns(loaded)
            ),
        )
        self._subjects: list[Subject] = []

    def examine(self, only: Collection[str] = ()) -> None:
        """Headers, coverage, values and effect of every adapter, or of some."""
        reader = self._reader()
        limit = self._loaded.fleet.limits.max_lora_rank

        def read(folder: Path) -> AdapterFile:
            return read_adapter(folder, self._geometry, max_rank=limit, base_folder=self._folder)

        found = read_fleet_adapters(self._loaded, self._geometry, read, only)
        for count, (entry, file) in enumerate(found):
            self._report("adapters", count, max(len(self._loaded.fleet.adapters), count + 1))
            report = AdapterReport(entry.name, entry.source)
            self.result.adapters.append(report)
            try:
                if isinstance(file, MloraError):
                    raise file
                self._examine(file, report, reader)
            except MloraError as error:
                report.refuse(error.message, error.hint)

    def _examine(self, file: AdapterFile, report: AdapterReport, reader: AdapterReader) -> None:
        base = self._loaded.fleet.base
        examined = examine(file, report.name, self._geometry, reader, (base.model, base.revision))
        report.examined = examined
        report.warnings += examined.warnings
        self._subjects.append(Subject(report.name, file, examined.digest, examined.num_pages))

    def check_parity(self, prompts: Sequence[Sequence[int]]) -> None:
        """Served answers against the reference, on the device that would serve."""
        if not self._subjects:
            return
        self._check_memory()
        by_name = {adapter.name: adapter for adapter in self.result.adapters}
        with ParityCheck(self._config, self._subjects, prompts, self._report) as check:
            for name, parity in check.results():
                by_name[name].parity = parity
                _judge(by_name[name], parity)

    def measure_drift(self, prompts: Sequence[Sequence[int]], against: str | None) -> None:
        """Answers on the base as served against those on its 16-bit form."""
        self._check_memory()
        limit = self.result.max_drift = self._loaded.fleet.verify.max_drift
        by_name = {adapter.name: adapter for adapter in self.result.adapters}
        for name, drift in measure_drift(
            self._config, self._sixteen_bit(against), self._subjects, prompts, self._report
        ):
            if name is None:
                self.result.base_drift = drift
                continue
            by_name[name].drift = drift
            if not drift.mean_kl <= limit:
                by_name[name].refuse(
                    f"drifts by {drift.mean_kl:.4f} nats from the 16-bit base; verify.max_drift is"
                    f" {limit:g}"
                )

    def settle(self) -> None:
        """Verdicts of those that nothing refuses."""
        for adapter in self.result.adapters:
            if adapter.verdict != "refused":
                adapter.verdict = "exact" if adapter.parity is not None else "checked"
                adapter.verdict = "warning" if adapter.warnings else adapter.verdict

    def prompts(self, file: Path | None, *, all_shipped: bool) -> list[list[int]]:
        """Token ids of a file's lines, or of the prompts that come with the package."""
        from multilora_cli.text.tokenizer import load_tokenizer

        if file is None and not (self._folder / "tokenizer.json").is_file():
            return _random_prompts(self._geometry)
        texts = _lines(file) if file is not None else list(_PROMPTS)
        if file is None and not all_shipped:
            texts = texts[:_PARITY_PROMPTS]
        tokenizer = load_tokenizer(self._folder)
        most = min(_PROMPT_TOKENS, self._geometry.max_position - ANSWER_TOKENS)
        found = [tokenizer.encode(text)[:most] for text in texts]
        ids = [[token for token in row if token < self._geometry.vocab_size] for row in found]
        return [row for row in ids if len(row) > 1] or _random_prompts(self._geometry)

    def _reader(self) -> AdapterReader:
        kv = choose_kv_dtype(self._config.kv_cache_dtype, self._dtype)
        page = kv_page_bytes(self._geometry, kv.itemsize)
        base = UnknownBase(self._geometry)  # nothing is served from these images
        return AdapterReader(self._config, self._geometry, page, base, self._dtype, Failpoints({}))

    def _check_memory(self) -> None:
        """Loading the base must not be what ends this process."""
        need = base_bytes(self._geometry, self._dtype.itemsize, self._quantization).total
        free = free_host_bytes()
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        if need > free:
            raise Refused(
                f"the served base takes {format_size(need)} and {format_size(free)} are free on"
                f" {self._device}",
                hint="run this where the base is served; --no-parity checks all that needs no base",
            )

    def _sixteen_bit(self, against: str | None) -> Path:
        """The folder of the base that is not quantised. Raises BadInput where there is none."""
        if against is not None:
            base = self._loaded.fleet.base.model_copy(update={"model": against, "revision": None})
            fleet = self._loaded.fleet.model_copy(update={"base": base})
            return fetch_base(self._loaded._replace(fleet=fleet), self._report)
        if self._geometry.quantization is not None:
            method = self._quantization.describe()
            raise BadInput(
                f"--drift: {self._folder} is stored as {method}; the 16-bit model is needed too",
                hint="name the model that it was quantised from: --against MODEL",
            )
        if self._quantization.method == "none" and self._config.kv_cache_dtype == "auto":
            raise BadInput(
                "--drift: the base is served as it is stored, in 16 bits: nothing can drift",
                hint="set base.quantization or base.kv_cache_dtype, or name --against MODEL",
            )
        return self._folder


def _judge(report: AdapterReport, parity: Parity) -> None:
    found = parity.agreement
    if not parity.is_exact:
        report.refuse(
            f"served answers differ from the reference by {found.largest:.3g} in log-probability"
            f" (tolerance {parity.tolerance:.3g}); rounding explains {parity.rounding:.2g}, the"
            f" bare base differs by {parity.base.largest:.2g}, the adapter changes"
            f" {parity.effect:.3g}",
            "this is a fault of the server, not of the adapter: please report it",
        )
    elif parity.tolerance > parity.effect / 2:
        report.warnings.append(
            f"the adapter changes log-probabilities by {parity.effect:.2g} on these prompts, which"
            f" the tolerance {parity.tolerance:.2g} does not tell from nothing: name --prompts"
            " that it was trained for"
        )


def _lines(file: Path) -> list[str]:
    """The prompts of a text file, one a line."""
    try:
        texts = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"--prompts {file}: not readable as UTF-8 text: {reason_of(error)}"
        ) from None
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise BadInput(
            f"--prompts {file}: {len(texts)} prompts, expected 1 to {MAX_PROMPTS}, one a line"
        )
    return texts


def _random_prompts(geometry: ModelGeometry) -> list[list[int]]:
    """For a base without a tokenizer: ids that repeat from run to run."""
    rng = random.Random(0)
    return [[rng.randrange(geometry.vocab_size) for _ in range(16)] for _ in range(_PARITY_PROMPTS)]

"""AWQ checkpoints by the libraries that make them: auto-round, or AutoAWQ on a CUDA device.

Both write AutoAWQ's GEMM layout, which `models/quantized` reads without either of them.
"""

import contextlib
import importlib
import io
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from multilora_cli.engine.quantize import (
    Quantised,
    copy_small_files,
    finished,
    new_folder,
    sixteen_bit,
)
from multilora_cli.errors import BadInput, ModelError
from multilora_cli.models.checkpoint import open_checkpoint
from multilora_cli.progress import Report
from multilora_cli.sizing.geometry import ModelGeometry

Method = Literal["auto-round", "autoawq"]
_GROUPS = (128, 64, 32)
_BAR = re.compile(r"^(?:Quantizing|AWQ)\b.*?(\d+)/(\d+) \[")  # a line of tqdm's
_EXTRAS = {"auto_round": "quantize", "awq": "awq", "transformers": "quantize"}


@dataclass(frozen=True)
class AwqSettings:
    """How weights are rounded to 4 bits."""

    windows: list[list[int]]  # token ids to calibrate on, all of one length
    method: Method = "auto-round"
    group_size: int | None = None  # None: the largest of 128, 64, 32 that divides every input
    iterations: int = 20  # auto-round's steps a layer; 0: plain rounding


def quantise_awq(source: Path, output: Path, how: AwqSettings, report: Report) -> Quantised:
    """Write the 16-bit base in `source` as AWQ to the new folder `output`. Raises MloraError."""
    geometry = sixteen_bit(source)
    group = _group_size(geometry, how.group_size)
    run = {"auto-round": _auto_round, "autoawq": _autoawq}[how.method]
    if how.method == "autoawq" and not torch.cuda.is_available():
        raise BadInput(
            "--method autoawq: it needs a CUDA device: on a CPU its search works on the weights"
            " themselves where it means a copy, and every trial spoils what the next one measures",
            hint="use --method auto-round, which runs on CPUs too",
        )
    checkpoint = open_checkpoint(source)
    with new_folder(output) as folder:
        with _listening(how.method, report):
            run(source, folder, group, how)
        copy_small_files(source, folder)
        return finished(checkpoint, geometry, folder, output)


def _auto_round(source: Path, folder: Path, group: int, how: AwqSettings) -> None:
    library, transformers = _extra("auto_round"), _extra("transformers")
    # Without steps it would still search for ranges; what remains is round to nearest.
    plain = {"disable_opt_rtn": True} if how.iterations == 0 else {}
    job = library.AutoRound(
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto"),
        transformers.AutoTokenizer.from_pretrained(source),
        bits=4,
        group_size=group,
        sym=False,
        iters=how.iterations,
        dataset=[torch.tensor([window]) for window in how.windows],
        nsamples=len(how.windows),
        seqlen=len(how.windows[0]),
        enable_torch_compile=False,  # it would need a C++ compiler on a CPU
        **plain,
    )
    job.quantize()
    job.save_quantized(output_dir=str(folder), format="auto_awq", inplace=True)


def _autoawq(source: Path, folder: Path, group: int, how: AwqSettings) -> None:
    library, transformers = _extra("awq"), _extra("transformers")
    model = library.AutoAWQForCausalLM.from_pretrained(str(source), trust_remote_code=False)
    model.quantize(
        transformers.AutoTokenizer.from_pretrained(source),
        quant_config={"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMM"},
        calib_data=how.windows,
        max_calib_samples=len(how.windows),
        max_calib_seq_len=len(how.windows[0]),
    )
    model.save_quantized(str(folder))


def _group_size(geometry: ModelGeometry, asked: int | None) -> int:
    inputs = sorted({d_in for d_in, _ in geometry.module_shapes.values()})
    for group in _GROUPS if asked is None else (asked,):
        if group in _GROUPS and not any(d_in % group for d_in in inputs):
            return group
    raise BadInput(
        f"--group-size: found {asked or 'none that fits'}, expected 128, 64 or 32 that divides"
        f" every input of this model ({', '.join(map(str, inputs))})"
    )


def _extra(name: str) -> Any:
    """A module of an extra. Raises BadInput where it is not installed, or does not import."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = _EXTRAS[name]
        raise BadInput(
            f"--to awq needs the extra {extra}: {error}", hint=f"pip install -e '.[{extra}]'"
        ) from None


class _Listener(io.TextIOBase):
    """Stands in for a library's terminal: its bar becomes our progress, its last lines are kept."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.lines: deque[str] = deque(maxlen=5)

    def write(self, text: str) -> int:
        """Take what was printed."""
        for line in re.split(r"[\r\n]+", text):
            bar = _BAR.match(line)
            if bar is not None:
                self._report("layers", int(bar[1]), int(bar[2]))
            elif line.strip():
                self.lines.append(line.strip())
        return len(text)


@contextlib.contextmanager
def _listening(method: str, report: Report) -> Iterator[None]:
    """Nothing of the library's reaches the terminal; its failure is one line. Raises ModelError."""
    listener = _Listener(report)
    redirected: Callable[[Any], Any] = contextlib.redirect_stderr
    with redirected(listener), contextlib.redirect_stdout(listener):
        try:
            yield
        except (BadInput, ModelError):
            raise
        except (Exception, SystemExit) as error:
            said = listener.lines[-1] if isinstance(error, SystemExit) and listener.lines else error
            raise ModelError(f"{method} failed: {type(error).__name__}: {said}") from error

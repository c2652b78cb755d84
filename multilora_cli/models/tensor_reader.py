"""Tensors from safetensors files to a device, read by position.

On a CPU a file is read into the tensor's own memory; for a GPU through two page-locked buffers in
turn, so that reading overlaps copying and the host never holds more than the buffers. Several
threads read a buffer: one alone copies from the page cache slower than a GPU takes the bytes.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from multilora_cli.adapters.safetensors_header import OpenFile, TensorEntry, open_file
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError
from multilora_cli.models.checkpoint import Checkpoint, model_errors
from multilora_cli.progress import Report

FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPES = FLOAT_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I64": torch.int64,
}
_BUFFER_BYTES = 32 * 2**20
_NUM_THREADS = 4
_SLICE_BYTES = 2 * 2**20  # what one thread reads at least


class TensorReader:
    """The open files of a checkpoint. Use as a context: leaving it, files must be unchanged."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, report: Report) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._report = report
        self._done, self._total = 0, checkpoint.nbytes
        self._stack = ExitStack()
        self._threads = self._stack.enter_context(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weights")
        )
        self._files: dict[Path, OpenFile] = {}
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        self._extremes: list[tuple[TensorEntry, torch.Tensor]] = []

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack, model_errors():
            if error is None:
                for file in self._files.values():
                    file.check_unchanged()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor as it is stored, on the device."""
        dtype = _DTYPES[entry.dtype]
        target = torch.empty(entry.shape, dtype=dtype, device=self._device)
        for _ in self._fill(entry, target.view(-1), dtype):
            pass
        return target

    def copy(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """Fill `target`, contiguous, with a float tensor, converted to its dtype."""
        for part in self._fill(entry, target.view(-1), FLOAT_DTYPES[entry.dtype]):
            self._extremes.append((entry, torch.stack(torch.aminmax(part))))

    def skip(self, entry: TensorEntry) -> None:
        """Count a tensor that is not needed."""
        self._done += entry.nbytes
        self._report("weights", self._done, self._total)

    def check_finite(self) -> None:
        """Raise ModelError naming the first copied tensor that holds NaN or infinity."""
        if not self._extremes:
            return
        finite = torch.stack([pair for _, pair in self._extremes]).isfinite().all(-1)
        if not bool(finite.all()):
            entry, pair = self._extremes[int((~finite).nonzero()[0, 0])]
            dtype = str(pair.dtype).removeprefix("torch.")
            raise ModelError(
                f"{entry.file}: tensor {quoted(entry.name)}: not finite in {dtype} (stored as"
                f" {entry.dtype})",
                hint="serve it as bfloat16" if pair.dtype == torch.float16 else None,
            )

    def _fill(
        self, entry: TensorEntry, flat: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Fill `flat` part by part from a file that stores `dtype`; each part once it is there."""
        file = self._file(entry.file)
        for start, stop in _chunks(flat.numel(), _BUFFER_BYTES // dtype.itemsize):
            part = flat[start:stop]
            offset = entry.offset + start * dtype.itemsize
            with model_errors():
                if self._device.type == "cpu" and dtype == flat.dtype:
                    self._read(file, offset, part.view(torch.uint8).numpy().data)
                else:
                    self._copy_through_buffer(file, offset, part, dtype)
            yield part
        self.skip(entry)

    def _file(self, path: Path) -> OpenFile:
        if path not in self._files:
            with model_errors():
                file = self._stack.enter_context(open_file(path, follow_symlinks=True))
            if file.identity.key != self._checkpoint.headers[path].identity.key:
                raise ModelError(f"{path}: changed while it was read")
            self._files[path] = file
        return self._files[path]

    def _copy_through_buffer(
        self, file: OpenFile, offset: int, part: torch.Tensor, dtype: torch.dtype
    ) -> None:
        buffer = self._next_buffer()[: part.numel() * dtype.itemsize]
        self._read(file, offset, buffer.numpy().data)
        if self._device.type == "cpu":
            part.copy_(buffer.view(dtype))
            return
        if dtype == part.dtype:
            part.copy_(buffer.view(dtype), non_blocking=True)
        else:  # converted on the device: from the host, copy_ would convert before it copies
            part.copy_(buffer.view(dtype).to(self._device, non_blocking=True))
        self._events[self._turn].record(torch.cuda.current_stream(self._device))

    def _read(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the file, a large one by several threads."""
        share = max(-(-len(buffer) // _NUM_THREADS), _SLICE_BYTES)
        if len(buffer) <= share:
            file.read_into(offset, buffer)
            return
        reads = [
            self._threads.submit(file.read_into, offset + start, buffer[start:stop])
            for start, stop in _chunks(len(buffer), share)
        ]
        wait(reads)  # all of them, so that none writes to the buffer after an error
        for read in reads:
            read.result()

    def _next_buffer(self) -> torch.Tensor:
        """A host buffer whose last copy is over."""
        if self._device.type == "cpu":
            if not self._buffers:
                self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8)]
            return self._buffers[0]
        if not self._buffers:
            self._buffers = [
                torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 1 - self._turn
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield start, min(start + size, count)

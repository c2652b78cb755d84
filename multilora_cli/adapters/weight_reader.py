"""Reads the tensors of an adapter from its files, in pieces that follow one another there.

An adapter has hundreds of tensors of some 100 KB. A read of its own for each is a system call,
after which the thread has to win the interpreter back from the one that runs the steps: beside 64
answers on an H200 that made 80 ms of a 27 MB adapter.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from multilora_cli.adapters.digest import changed
from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.safetensors_header import (
    OpenFile,
    SafetensorsError,
    TensorEntry,
    open_file,
)
from multilora_cli.errors import AdapterError

FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
PIECE_BYTES = 2 * 2**20  # stays in a core's own cache between the read and the use of it
_BUFFER_BYTES = PIECE_BYTES + 8


class WeightFiles:
    """The weight files of an adapter, held open. Raises AdapterError where one was replaced."""

    def __init__(self, adapter: AdapterFile, buffers: deque[torch.Tensor] | None = None) -> None:
        """Args:
        buffers: memory of earlier readers, which is used again: to touch a page for the first
            time takes longer than to fill it from the page cache.
        """
        self._identities = adapter.files[1:]
        self._files: dict[Path, OpenFile] = {}
        self._stack = ExitStack()
        self._buffers = deque() if buffers is None else buffers

    def __enter__(self) -> "WeightFiles":
        with self._stack:
            for identity in self._identities:
                try:
                    file = self._stack.enter_context(open_file(identity.path))
                except SafetensorsError as error:
                    raise AdapterError(error.message, reason=error.reason) from None
                if file.identity.key != identity.key:
                    raise changed(identity)
                self._files[identity.path] = file
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self.check_unchanged()

    @contextmanager
    def reader(self) -> Iterator["WeightReader"]:
        """A reader for the calling thread."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        try:
            yield WeightReader(self, buffer)
        finally:
            self._buffers.append(buffer)

    def check_unchanged(self) -> None:
        """Raises AdapterError when what was read may mix two versions."""
        for identity, file in zip(self._identities, self._files.values(), strict=True):
            try:
                file.check_unchanged()
            except SafetensorsError:
                raise changed(identity) from None

    def size(self, path: Path) -> int:
        """Bytes of one of the files."""
        return self._files[path].identity.size

    def read_into(self, path: Path, begin: int, *targets: memoryview) -> None:
        """Fill `targets` one after the other with the file's bytes from `begin` on."""
        try:
            self._files[path].read_into(begin, *targets)
        except SafetensorsError as error:
            raise AdapterError(error.message, reason=error.reason) from None


class WeightReader:
    """Tensors of an adapter, for one thread: what it gives is valid until the next call."""

    def __init__(self, files: WeightFiles, buffer: torch.Tensor) -> None:
        """Args:
        buffer: uint8, for pieces; larger ones get memory of their own.
        """
        self._files = files
        self._memory = buffer
        self._from: Path | None = None  # the piece's file, and its range in it
        self._begin = self._end = 0
        self._views: dict[str, torch.Tensor] = {}  # the piece, by dtype as files call it

    def fetch(self, path: Path, begin: int, end: int) -> None:
        """Make these bytes of a file the current piece: tensors within are read from it."""
        begin = begin // 8 * 8
        self._from, self._views = None, {}
        if self._memory.numel() < end - begin:
            self._memory = torch.empty(-(-(end - begin) // 8) * 8, dtype=torch.uint8)
        self._files.read_into(path, begin, self._memory[: end - begin].numpy().data)
        self._from, self._begin, self._end = path, begin, end

    def flat(self, entry: TensorEntry) -> tuple[torch.Tensor, int]:
        """A one-dimensional tensor of the entry's dtype, not to be written to, and the place in it
        of the entry's first element."""
        begin, end = entry.offset, entry.offset + entry.nbytes
        is_other = self._from is not entry.file and self._from != entry.file
        if is_other or begin < self._begin or end > self._end:
            size = self._files.size(entry.file)
            self.fetch(entry.file, begin, max(end, min(begin + PIECE_BYTES, size)))
        at = begin - self._begin
        dtype = FILE_DTYPES[entry.dtype]
        if at % dtype.itemsize:  # a file may place its tensors anywhere
            return self._memory[at : at + entry.nbytes].clone().view(dtype), 0
        view = self._views.get(entry.dtype)
        if view is None:
            whole = self._memory[: self._memory.numel() // 8 * 8]
            view = self._views[entry.dtype] = whole.view(dtype)
        return view, at // dtype.itemsize

    def matrices(
        self, entries: Sequence[TensorEntry]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Tensors of one dtype, in the order of their file and within the current piece, each flat.
        They may be changed. One call cuts them all, where none shares bytes with another one.

        Beside them the run of memory that they are, where nothing lies between them.
        """
        size = FILE_DTYPES[entries[0].dtype].itemsize
        places, sizes, end = [], list[int](), self._begin
        for entry in entries:
            if entry.offset < end or (entry.offset - end) % size:
                flats = [(self.flat(entry), entry.nbytes // size) for entry in entries]
                return [flat[at : at + count] for (flat, at), count in flats], None
            if entry.offset > end:
                sizes.append((entry.offset - end) // size)
            places.append(len(sizes))
            sizes.append(entry.nbytes // size)
            end = entry.offset + entry.nbytes
        whole = self._memory[: end - self._begin].view(FILE_DTYPES[entries[0].dtype])
        parts = whole.split_with_sizes(sizes)
        between = len(sizes) - len(places) - (places[0] > 0)  # a piece may begin before them
        run = whole[sum(sizes[: places[0]]) :] if not between else None
        return [parts[place] for place in places], run

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor in its shape and dtype, float32 for float64; not to be written to."""
        values, at = self.flat(entry)
        tensor = values[at : at + entry.nbytes // values.itemsize].view(entry.shape)
        return tensor.float() if entry.dtype == "F64" else tensor

    def read_rows(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Rows of a matrix, like `read`."""
        return self.read(entry.rows(start, stop))

"""What adapters need to know of the base's weights when their images are built."""

import threading
from collections import deque

import torch

from multilora_cli.adapters.tensor_names import EdgeModule
from multilora_cli.layers.linear import DenseWeight, LoraLinear
from multilora_cli.models.decoder import Decoder

# Rows of a weight that are held in float32 at a time: 64 MiB where a row has 16,384 elements.
_ROWS = 1024
_RANK = 16  # of most adapters; libraries may have other kernels for others
# A loop that has not come by for so long has ended, or runs a very long step.
_ABSENT_S = 0.05


class BaseRows:
    """Norms and biases of a decoder's projections, for DoRA and trained biases.

    Called by loader threads beside the running steps. The norms of an 8B are 4,000 launches. Made
    by a loader thread, each of them has to win the interpreter back from the thread that runs the
    steps, which keeps it for its switch interval: beside a loop without a pause that was a minute.
    So where a loop calls `advance`, its thread launches them, so many weights between two steps,
    and loader threads wait for it. They run between the steps on the device too, on its stream,
    where libraries have their memory already. A quantised weight is dequantised whole for as long
    as its norms take.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._jobs: deque[_Norms] = deque()
        self._working = threading.Lock()
        self._is_attended = False  # a loop has come by since a loader thread last looked
        self._stream: torch.cuda.Stream | None = None
        if decoder.device.type == "cuda":
            self._stream = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def row_norms(
        self, layer: int, module: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """||W + scaling * B A|| of every output row of a projection, float32 [d_out] on the CPU.

        W as it is served, dequantised where it is stored quantised.

        Args:
            lora_a: A, float32 [r, d_in].
            lora_b: B, float32 [d_out, r].
        """
        device = self._decoder.device
        linear, rows = self._decoder.projection(layer, module)
        with torch.cuda.stream(self._stream):
            job = _Norms(linear, rows, lora_a.to(device), lora_b.to(device), scaling)
        self._jobs.append(job)
        while not job.launched.is_set():
            if self._is_attended:
                self._is_attended = False
                job.launched.wait(_ABSENT_S)
            else:
                with self._working:
                    self._work(1)
        with torch.cuda.stream(self._stream):
            return job.take()

    def advance(self, most: int) -> None:
        """Launch work that loader threads wait for, on about `most` weights.

        From the thread that runs the steps, between two of them. Never waits.
        """
        self._is_attended = True
        if self._jobs and self._working.acquire(blocking=False):
            try:
                self._work(most)
            finally:
                self._working.release()

    @torch.inference_mode()
    def _work(self, most: int) -> None:
        while self._jobs and most > 0:
            job = self._jobs[0]
            most -= job.advance()
            if job.launched.is_set():
                self._jobs.popleft()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launch what norms of every module launch, once: libraries bring a kernel to the device at
        its first use, for which everything stood still for 0.1 s. Of zeros, a piece of each: no
        more memory than a load takes of a base that is not quantised."""
        decoder = self._decoder
        for d_in, d_out in set(decoder.geometry.module_shapes.values()):
            count = min(d_out, _ROWS)
            weight = torch.zeros(count, d_in, dtype=decoder.dtype, device=decoder.device)
            a = torch.zeros(_RANK, d_in, device=decoder.device)
            b = torch.zeros(count, _RANK, device=decoder.device)
            _norms_of(weight, a, b, 1.0, torch.empty(count, device=decoder.device))

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        """The base's own bias of a projection, float32 [d_out] on the CPU; None: it has none."""
        linear, rows = self._decoder.projection(layer, module)
        if linear.bias is None:
            return None
        with torch.cuda.stream(self._stream):
            return linear.bias[rows].float().cpu()

    def edge_rows(self, module: EdgeModule, tokens: torch.Tensor) -> torch.Tensor:
        """Rows `tokens` int64 [N] of the embedding or the head, float32 [N, hidden] on the CPU."""
        decoder = self._decoder
        weight = decoder.head.weight if module == "lm_head" else decoder.embedding.weight
        with torch.cuda.stream(self._stream):
            return weight[tokens.to(weight.device)].float().cpu()


class _Norms:
    """The norms of one projection, some rows at a time. What fails is raised to who waits."""

    def __init__(
        self,
        linear: LoraLinear,
        rows: slice,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scaling: float,
    ) -> None:
        self._linear = linear
        self._rows = rows
        self._a, self._b, self._scaling = lora_a, lora_b, scaling
        self._norms = torch.empty(len(lora_b), dtype=torch.float32, device=lora_b.device)
        self._weight: torch.Tensor | None = None  # [d_out, d_in], until all is launched
        self._start = 0
        self._done: torch.cuda.Event | None = None  # None on a CPU
        self._error: Exception | None = None
        self.launched = threading.Event()

    def advance(self) -> int:
        """Launch the next piece, on the current stream; the weights that it walks."""
        try:
            return self._advance()
        except Exception as error:
            self._error, self._weight = error, None
            self.launched.set()
            return 1

    def _advance(self) -> int:
        if self._weight is None:
            self._weight = self._linear.weight.dequantise()[self._rows]
            if not isinstance(self._linear.weight, DenseWeight):
                return self._weight.numel()
        part = slice(self._start, self._start + _ROWS)
        weight = self._weight[part]
        _norms_of(weight, self._a, self._b[part], self._scaling, self._norms[part])
        self._start += _ROWS
        if self._start >= len(self._norms):
            self._weight = None
            if self._norms.is_cuda:
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(torch.cuda.current_stream(self._norms.device))
            self.launched.set()
        return weight.numel()

    def take(self) -> torch.Tensor:
        """Wait for the norms: float32 [d_out] on the CPU."""
        if self._error is not None:
            raise self._error
        if self._done is not None:
            self._done.synchronize()  # lets other threads run meanwhile
        return self._norms.cpu()


def _norms_of(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    """||weight + scaling * b a|| of every row: `out`, float32 [rows]."""
    adapted = torch.addmm(weight.float(), b, a, alpha=scaling)
    torch.linalg.vector_norm(adapted, dim=1, out=out)

"""What adapters need to know of the base's weights when their images are built."""

import threading

import torch

from multilora_cli.adapters.tensor_names import EdgeModule
from multilora_cli.models.decoder import Decoder

# Rows of a weight that are held in float32 at a time: 64 MiB where a row has 16,384 elements.
_ROWS = 1024


class BaseRows:
    """Norms and biases of a decoder's projections, for DoRA and trained biases.

    Called by loader threads beside the running steps: one weight at a time, and on CUDA on a stream
    of its own. A quantised weight is dequantised whole for as long as its norms take.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._lock = threading.Lock()
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
        with self._lock, torch.cuda.stream(self._stream):
            weight = linear.weight.dequantise()[rows]
            a, b = lora_a.to(device), lora_b.to(device)
            norms = torch.empty(len(weight), dtype=torch.float32, device=device)
            for start in range(0, len(weight), _ROWS):
                part = slice(start, start + _ROWS)
                adapted = torch.addmm(weight[part].float(), b[part], a, alpha=scaling)
                torch.linalg.vector_norm(adapted, dim=1, out=norms[part])
            return norms.cpu()

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

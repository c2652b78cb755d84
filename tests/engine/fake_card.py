"""A decoder on a card that is not there: fake tensors, and kernels that are not launched.

Everything but the kernels runs as on the card whose chip is asked for: the same wrappers with the
same choices take the same tensors in the same order. `Trace` keeps torch's books.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multilora_cli.engine.batch import BatchBuilder
from multilora_cli.layers.fp8 import Fp8Linear
from multilora_cli.layers.linear import QuantisedWeight, Weight
from multilora_cli.models.decoder import Decoder, LinearSource
from multilora_cli.sizing.allocator import Allocator, Block
from multilora_cli.sizing.budget import max_blocks
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_cli.sizing.pages import kv_page_bytes
from multilora_kernels import paged_decode
from multilora_kernels.awq_gemm import AwqWeight
from multilora_kernels.fp8_gemm import Fp8Weight
from multilora_kernels.launch import Chip, force_chip
from multilora_kernels.layout import GROUPS
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.staging import Staging
from multilora_kernels.table import AdapterTable

CARD = torch.device("cuda", 0)
_LIBRARY = ("aten.mm", "aten.linear", "aten.addmm", "aten._scaled_mm")


class _Operators(TorchFunctionMode):
    """What torch without CUDA refuses for tensors that are said to be there, by other means."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            torch.ops.aten.copy_(_indexed(target, index), value)
            return None
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*args)
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **(kwargs or {}))


def _indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    aten, dim = torch.ops.aten, 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        elif part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, torch.Tensor):
            x = aten.index(x, [None] * dim + [part])
        else:
            x = aten.select(x, dim, part)
            continue
        dim += 1
    return x


class Trace(TorchDispatchMode):
    """Every tensor on the card that is made within it, put into `memory` and taken out again.

    `library` bytes are taken at the first multiply of torch's own, and kept.
    """

    def __init__(self, library: int) -> None:
        super().__init__()
        self.memory = Allocator()
        self._library = library
        self._known: dict[int, torch.UntypedStorage] = {}  # made before
        self._live: dict[int, Block | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._live:
                self._known[storage._cdata] = storage
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            key = storage._cdata
            if key not in self._live and key not in self._known:
                self._live[key] = self.memory.take(storage.nbytes())
                weakref.finalize(storage, self._drop, key)
        if self._library and str(func).startswith(_LIBRARY):
            self.memory.take(self._library)
            self._library = 0
        return out

    def _drop(self, key: int) -> None:
        self.memory.give(self._live.pop(key))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
            yield leaf.untyped_storage()


@contextmanager
def fake_card(chip: Chip) -> Iterator[None]:
    """Tensors may be made on a CUDA device, whose kernels are chosen for `chip`."""
    patch = pytest.MonkeyPatch()
    patch.setattr(triton.runtime.jit.JITFunction, "run", lambda *args, **kwargs: None)
    patch.setattr(Staging, "upload", lambda *args: None)
    patch.setattr(SideStream, "__init__", lambda *args: None)
    patch.setattr(SideStream, "beside", lambda _, main, side, *args: (main(), side()))
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    force_chip(chip)
    paged_decode._counters.cache_clear()
    try:
        with FakeTensorMode(), _Operators(), torch.inference_mode():
            paged_decode._counters(CARD)
            yield
    finally:
        paged_decode._counters.cache_clear()
        force_chip(None)
        patch.undo()


def fake_engine(
    geometry: ModelGeometry, storage: str, max_tokens: int, max_seqs: int, num_layers: int = 3
) -> tuple[Decoder, BatchBuilder]:
    """Decoder and builder in bfloat16; `num_layers` of the model's are enough for its memory."""
    windows = geometry.sliding_windows[:num_layers]
    cut = replace(geometry, num_layers=num_layers, sliding_windows=windows)
    decoder = Decoder(cut, torch.bfloat16, CARD, stored(storage, geometry, CARD))
    page, pages = kv_page_bytes(cut, 2), 64
    pool = torch.empty(pages, page, dtype=torch.uint8, device=CARD)
    table = AdapterTable(
        9, num_layers, cut.module_shapes, max_blocks(cut, 2, pages * page, page), CARD
    )
    table.settle(page, 2)
    segments = Segments(max_tokens, CARD, max_rank=64)
    segments.reserve(table)
    sampled = torch.zeros(max_seqs, dtype=torch.int64, device=CARD)
    return decoder, BatchBuilder(pool, table, segments, sampled, torch.bfloat16)


def _shape(geometry: ModelGeometry, group: str) -> tuple[int, int]:
    shapes: Sequence[tuple[int, int]] = [geometry.module_shapes[name] for name in GROUPS[group]]
    return sum(d_out for _, d_out in shapes), shapes[0][0]


def _plain(geometry: ModelGeometry, device: torch.device) -> None:
    return None


def _fp8(geometry: ModelGeometry, device: torch.device, *, by_block: bool = False) -> LinearSource:
    def weight(layer: int, group: str) -> Weight:
        n, k = _shape(geometry, group)
        scales = (-(-n // 128), -(-k // 128)) if by_block else (n,)
        return Fp8Linear(
            Fp8Weight(
                q=torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device),
                scale=torch.empty(scales, device=device),
                counters=torch.zeros(-(-n // 64), dtype=torch.int32, device=device),
                unit=torch.ones(1, device=device),
            ),
            torch.bfloat16,
        )

    return weight


def _awq(geometry: ModelGeometry, device: torch.device) -> LinearSource:
    def weight(layer: int, group: str) -> Weight:
        n, k = _shape(geometry, group)
        padded = -(-n // 128) * 128
        packed = AwqWeight(
            words=torch.empty(k // 128, padded, 32, dtype=torch.int16, device=device),
            meta=torch.empty(k // 128, 1, padded, dtype=torch.int32, device=device),
            counters=torch.zeros(padded // 64, dtype=torch.int32, device=device),
            out_features=n,
            in_features=k,
            scale_dtype=torch.float16,
        )
        return QuantisedWeight(packed, torch.bfloat16)

    return weight


_SOURCES: dict[str, Callable[[ModelGeometry, torch.device], LinearSource | None]] = {
    "none": _plain, "fp8": _fp8,
    "fp8 by block": partial(_fp8, by_block=True), "awq": _awq,
}  # fmt: skip


def stored(storage: str, geometry: ModelGeometry, device: torch.device) -> LinearSource | None:
    """Uninitialised weights as "fp8" and "awq" are packed; None for "none"."""
    return _SOURCES[storage](geometry, device)

"""Triton's interpreter as strict as a card is where it punishes nothing.

The interpreter reads and writes any memory of the process, gives zeros where a load is masked, and
runs the programs of a launch one after the other in their order. A card that is asked to read
beyond a tensor gives whatever lies there, or ends the process; what is masked is undefined without
`other`; and programs run in any order. So here

    a load, store or atomic beyond the memory of the launch's tensors raises,
    a pointer that is no multiple of its element's size raises, and so does `multiple_of` of a
    number that is none,
    what is masked without `other` is NaN, or a number that is an index of nothing,
    programs run in an order of their own, which is the same every time.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_undefined_bf16 = 0x7FC0  # NaN; the interpreter holds bf16 as its bits


class _Launch:
    """The memory that the present launch may touch, and the order of its programs."""

    begins = np.empty(0, dtype=np.uint64)
    ends = np.empty(0, dtype=np.uint64)
    kernel = ""
    shape = (1, 1, 1)
    order: Sequence[int] = ()


def check_launches() -> None:
    """Check every launch of this process from now on."""
    for name, replaced in (
        ("create_masked_load", _checked_load),
        ("create_masked_store", _checked_store),
        ("create_atomic_rmw", _checked_atomic),
        ("set_grid_dim", _shuffled),
        ("set_grid_idx", _placed),
    ):
        setattr(_Builder, name, replaced(getattr(_Builder, name)))
    executor = interpreter.GridExecutor
    executor._init_args_hst = _noted(executor._init_args_hst)
    interpreter._patch_lang_core = _promising(interpreter._patch_lang_core)


def _noted(arguments: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        found = arguments(self, args, kwargs)
        memory: dict[int, int] = {}
        for value in (*found[0], *found[1].values()):
            if hasattr(value, "data_ptr"):
                storage = interpreter._unwrap_tensor(value).untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
        _Launch.begins = np.array(sorted(memory), dtype=np.uint64)
        sizes = np.array([memory[int(begin)] for begin in _Launch.begins], dtype=np.uint64)
        _Launch.ends = _Launch.begins + sizes
        _Launch.kernel = self.fn.__name__
        return found

    return noted


def _check(pointers: Any, mask: Any, what: str) -> None:
    size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
    at = np.broadcast_to(pointers.data, np.broadcast(pointers.data, mask.data).shape)
    at = at[np.broadcast_to(mask.data.astype(bool), at.shape)].astype(np.uint64)
    if not at.size:
        return
    owner = np.searchsorted(_Launch.begins, at, side="right").astype(np.int64) - 1
    is_beyond = (owner < 0) | (at + np.uint64(size) > _Launch.ends[np.maximum(owner, 0)])
    if is_beyond.any():
        raise IndexError(f"{_Launch.kernel}: a {what} of {int(is_beyond.sum())} places beyond")
    if (at % np.uint64(size)).any():
        raise IndexError(f"{_Launch.kernel}: a {what} at no multiple of {size} bytes")


def _checked_load(load: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, pointers: Any, mask: Any, other: Any, *how: Any) -> Any:
        _check(pointers, mask, "load")
        found = load(self, pointers, mask, other, *how)
        is_masked = ~np.broadcast_to(mask.data.astype(bool), found.data.shape)
        # Of a single element the interpreter takes an `other` of zero for none.
        if other is not None or not is_masked.any() or is_masked.size == 1:
            return found
        values = found.data.copy()
        if np.issubdtype(values.dtype, np.floating):
            values[is_masked] = np.nan
        elif pointers.get_element_ty() == tl.bfloat16:
            values[is_masked] = _undefined_bf16
        else:
            values[is_masked] = np.iinfo(values.dtype).max // 3
        return interpreter.TensorHandle(values, pointers.get_element_ty())

    return checked


def _checked_store(store: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        _check(pointers, mask, "store")
        return store(self, pointers, value, mask, *how)

    return checked


def _checked_atomic(atomic: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, *how: Any) -> Any:
        _check(pointer, mask, "atomic")
        return atomic(self, kind, pointer, value, mask, *how)

    return checked


def _shuffled(set_shape: Callable[..., Any]) -> Callable[..., Any]:
    def shuffled(self: Any, *shape: int) -> None:
        set_shape(self, *shape)
        _Launch.shape = shape
        order = list(range(shape[0] * shape[1] * shape[2]))
        random.Random(len(order)).shuffle(order)
        _Launch.order = order

    return shuffled


def _placed(set_place: Callable[..., Any]) -> Callable[..., Any]:
    def placed(self: Any, x: int, y: int, z: int) -> None:
        _, rows, columns = _Launch.shape
        number = _Launch.order[(x * rows + y) * columns + z]
        set_place(self, number // (rows * columns), number // columns % rows, number % columns)

    return placed


def _promising(patch: Callable[..., Any]) -> Callable[..., Any]:
    def promising(language: Any, scope: Any) -> None:
        patch(language, scope)
        scope.set_attr(language, "multiple_of", _multiple_of)

    return promising


def _multiple_of(value: Any, number: Any) -> Any:
    divisor = int(getattr(number, "value", number))
    if (np.asarray(value.handle.data).astype(np.int64) % divisor).any():
        raise ValueError(f"{_Launch.kernel}: not a multiple of {divisor}")
    return value


def poison_memory() -> None:
    """What `torch.empty` gives is NaN, or the largest integer, instead of what was there before."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True

"""A device on a CPU that does what it was told as late as it may.

Everything that a launch does to tensors is recorded, undone and done for good only when somebody
waits for it: when a flight's results are asked for, or a pinned buffer is to be filled again. So a
host buffer that is overwritten too early, a page that was given away too early and a token that is
read in the wrong order all show, as they would on a busy device. Copies of adapters are done at
once, as on a copy stream that overtakes every step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from multilora_cli.engine.batch_plan import RowResult, ScheduledBatch
from multilora_cli.engine.engine import Flight
from multilora_kernels import staging
from tests.engine.engine_kit import Rig


class LateEvent:
    """A point of the stream."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self._number = 0

    def record(self, stream: object) -> None:
        """The point is here."""
        self._number = self._device.told

    def synchronize(self) -> None:
        """Do all that comes before it."""
        self._device.run_to(self._number)


class LateFlight:
    """A launched step that has not been done."""

    def __init__(self, device: "LateDevice", flight: Flight) -> None:
        self._device = device
        self._flight = flight
        self._number = device.told

    def results(self) -> tuple[RowResult, ...]:
        """Do it now."""
        self._device.run_to(self._number)
        return self._flight.results()


class LateDevice(TorchDispatchMode):
    """Stands between an engine and its runner."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._queue: deque[Callable[[], None]] = deque()
        self.told = 0
        self.done = 0
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        runner = rig.engine.parts.runner
        self._launch = runner.launch
        monkeypatch.setattr(runner, "launch", self.launch)
        monkeypatch.setattr(staging, "torch", _TorchOfStaging(self))
        owners = (runner._builder, runner._builder.segments, runner._builder._head_segments)
        for owner in (*owners, runner._graphs, runner._prompt_graphs):
            if owner is not None:
                owner._staging._is_cuda = True
        pool = rig.engine.parts.pool
        poison = pool._poison
        assert poison is not None
        # In stream order, and done when the step before it is: the engine waits for it.
        self._poisons: set[int] = set()

        def poison_late(pages: Sequence[int]) -> None:
            self._tell(lambda: poison(pages))
            self._poisons.add(self.told)

        monkeypatch.setattr(pool, "_poison", poison_late)

    def launch(self, batch: ScheduledBatch) -> LateFlight:
        """Record a step."""
        with self:
            flight = self._launch(batch)
        self._undo()
        return LateFlight(self, flight)

    def run_to(self, number: int) -> None:
        """Do for good what was told up to `number`."""
        with _disable_current_modes(), torch.inference_mode():
            self._undo()
            while self.done < number or self.done + 1 in self._poisons:
                self._queue.popleft()()
                self.done += 1

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory: written by the host at once."""
        with _disable_current_modes():
            buffer = torch.empty(size, dtype=torch.uint8)
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if any(t.untyped_storage().data_ptr() in self._pinned for t in written):
            return func(*args, **kwargs)
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = (storage, storage.clone())
        result = func(*args, **kwargs)
        outputs = [] if written else _tensors(result)

        def again() -> None:
            found = func(*args, **kwargs)
            for old, new in zip(outputs, [] if written else _tensors(found), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view
                    old.copy_(new)

        if written or outputs:
            self._tell(again)
        return result

    def _tell(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.told += 1

    def _undo(self) -> None:
        """What was recorded has not happened."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


class _TorchOfStaging:
    """What multilora_kernels.staging asks of torch, on the late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, **options: object) -> torch.Tensor:
        """A pinned buffer."""
        return self._device.pinned(size)

    def Event(self) -> LateEvent:
        """As torch.cuda.Event."""
        return LateEvent(self._device)

    def current_stream(self, device: object) -> None:
        """There is one."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator changes in place."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []

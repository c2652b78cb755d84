"""A device on a CPU that does what it was told as late as it may.

Everything that a launch does to tensors is recorded, undone and done for good only when somebody
waits for it: when a flight's results are asked for, or a pinned buffer is to be filled again. So a
host buffer that is overwritten too early, a page that was given away too early and a token that is
read in the wrong order all show, as they would on a busy device. Copies of adapters are done at
once, as on a copy stream that overtakes every step; or, by a LateCopier, only when a step that was
launched behind one runs, and an image that leaves host memory before is lost.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from multilora_cli.adapters.host_arena import Extent
from multilora_cli.adapters.hot_tier import Image
from multilora_cli.engine.batch_plan import RowResult, ScheduledBatch
from multilora_cli.engine.engine import Flight
from multilora_kernels import staging
from tests.engine.engine_kit import Rig

_PATIENCE = 40  # times that a copy is asked about before it ends without a step


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


class LateCopy:
    """A copy of an adapter that was started, and is done as late as it may."""

    def __init__(self, copier: "LateCopier", work: Callable[[], object]) -> None:
        self._copier = copier
        self.work = work
        self.is_over = False
        self._asked = 0

    def done(self) -> bool:
        """Once somebody has asked often: where no step waits for it, it ends by itself."""
        self._asked += 1
        if self._asked > _PATIENCE:
            self._copier.run_to(self)
        return self.is_over

    def order(self) -> bool:
        """The steps launched from now on come after it."""
        self._copier.device._tell(lambda: self._copier.run_to(self))
        self._copier.ordered += 1
        return True


class LateCopier:
    """Takes the place of the engine's copier. What an image gives back of host memory is
    overwritten at once, as by the next one.
    """

    def __init__(self, rig: Rig, device: "LateDevice", monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.ordered = 0  # times that steps were to begin behind a copy
        self._copies: deque[LateCopy] = deque()
        residency = rig.engine.parts.residency
        self._start = residency._hot._copier.start
        monkeypatch.setattr(residency._hot, "_copier", self)
        arena = residency._warm._arena
        release = arena.release

        def overwrite(extent: Extent) -> None:
            arena.view(extent).fill_(0xFF)
            release(extent)

        monkeypatch.setattr(arena, "release", overwrite)

    def start(self, image: Image, pages: Sequence[int]) -> LateCopy:
        """Start the copy of an image's pages behind those before."""
        copy = LateCopy(self, lambda: self._start(image, pages))
        self._copies.append(copy)
        return copy

    def run_to(self, copy: LateCopy) -> None:
        """Do everything up to `copy`, in order."""
        while not copy.is_over:
            first = self._copies.popleft()
            with _disable_current_modes():
                first.work()
            first.is_over = True


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

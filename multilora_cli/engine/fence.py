"""Whether the device has come past a point of a stream."""

from typing import Protocol

import torch


class Fence(Protocol):
    """A point in the work that was given to the device."""

    def done(self) -> bool:
        """Whether everything before it has ended."""
        ...

    def wait(self) -> None:
        """Return once everything before it has ended."""
        ...

    def order(self) -> bool:
        """Let what is launched on the current stream from now on come after it. True."""
        ...


class Passed:
    """A point that was reached when the call returned: on a CPU, every point."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """At once."""

    def order(self) -> bool:
        """It does."""
        return True


class StreamFence:
    """The point that a CUDA stream has reached now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._device = stream.device

    def done(self) -> bool:
        """Whether the stream has come past it; never waits."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the stream has come past it; other threads run meanwhile."""
        self._event.synchronize()

    def order(self) -> bool:
        """The device lets the current stream wait, the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True


def fence_of(device: torch.device) -> Fence:
    """The point behind all that was launched on the current stream of `device`."""
    if device.type == "cpu":
        return Passed()
    return StreamFence(torch.cuda.current_stream(device))

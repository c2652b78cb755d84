"""Every error a user can cause.

MloraError                  one line for people, an optional hint, an exit code
├── Refused                 exit 1: the answer is no (does not fit, verification failed)
├── BadInput                exit 2: a file, a flag or a value is wrong
│   ├── FleetError          the fleet file, with line and column
│   ├── ModelError          the base model's files
│   ├── AdapterError        an adapter's files
│   └── RequestError        one request, with the field it concerns
├── Unreachable             exit 3: a server or a source does not answer
│   └── AdapterUnavailable  an adapter that is known but cannot be had now
└── AddressInUse            exit 4: the port is taken
"""

import os
from collections.abc import Mapping
from typing import ClassVar


class MloraError(Exception):
    """An error that ends a command with one line, or a request with one error object."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def about(self, adapter: str) -> str:
        """The message without the adapter's name before it, for a sentence that begins with it."""
        return self.message.removeprefix(f"adapter {adapter}: ")

    def of_adapter(self, adapter: str) -> str:
        """The message with the adapter's name before it, once."""
        return f"adapter {adapter}: {self.about(adapter)}"


class Refused(MloraError):
    """The question was understood and the answer is no."""

    exit_code = 1


class BadInput(MloraError):
    """What the user gave is wrong."""

    exit_code = 2


class FleetError(BadInput):
    """A mistake in a fleet file; the message starts with `file:line:column: key.path:`."""


class ModelError(BadInput):
    """A base model folder that cannot be served: names file or tensor, found and expected."""


class AdapterError(BadInput):
    """An adapter that is refused: names file, field or tensor, found and expected.

    `field` is the config field or tensor name; `reason` is a short machine-readable word.
    """

    def __init__(
        self, message: str, *, reason: str = "invalid", field: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.field = field


class RequestError(BadInput):
    """A request that cannot be served; `param` names the field, `code` the kind."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.headers: Mapping[str, str] = {}  # more that the reply is to have


class Unreachable(MloraError):
    """A server or a source does not answer."""

    exit_code = 3


class AdapterUnavailable(Unreachable):
    """A registered adapter that cannot be had now: its source is gone, or its load failed."""

    def __init__(self, message: str, *, retry_at_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_at_s = retry_at_s


class AddressInUse(MloraError):
    """The address to listen on is taken."""

    exit_code = 4


def reason_of(error: BaseException) -> str:
    """The system's words beneath a client library's error (`Connection refused`), else its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__

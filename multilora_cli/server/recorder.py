"""Records the load of a server: when, which adapter, how many tokens; never what was said.

JSON lines as `mlora plan --trace` and `mlora bench --trace` read them:
`{"time": seconds since the epoch, "adapter": name or null, "input": tokens, "output": tokens}`.
"""

import json
import logging
import os
import stat
from pathlib import Path

from multilora_cli.errors import BadInput
from multilora_cli.sizing.trace import MAX_BYTES

_log = logging.getLogger(__name__)


class TraceRecorder:
    """Appends a line for every request that ended, until the file is as large as can be read."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Open `path`, made if missing, for its owner only. Raises BadInput."""
        self._path = path
        self._max_bytes = max_bytes
        try:
            # A pipe that nobody reads would hold the whole server.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise BadInput(f"--record {path}: {error.strerror or error}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadInput(f"--record {path}: is no regular file")
        self._file = os.fdopen(descriptor, "ab", buffering=0)  # whole lines, whatever ends us

    def ended(
        self, time_s: float, adapter: str | None, input_tokens: int, output_tokens: int
    ) -> None:
        """One request ended; `time_s` is when it came. A full disk ends the recording, no more."""
        if self._file.closed:
            return
        row = {
            "time": round(time_s, 3), "adapter": adapter, "input": input_tokens,
            "output": output_tokens,
        }  # fmt: skip
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            if self._file.tell() > self._max_bytes - 4096:
                raise OSError(f"{self._max_bytes} bytes, the most that is read again")
        except OSError as error:
            _log.warning("recording to %s has ended: %s", self._path, error)
            self._file.close()

    def close(self) -> None:
        """Record nothing more."""
        self._file.close()

"""A small file replaced as a whole: whoever looks sees the old or the new."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int) -> os.stat_result:
    """Write `data` to `path` with permissions `mode`; what the new file is. Raises OSError.

    Its bytes have reached the medium before its name does, which `sync_folder` waits for.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return status


def sync_folder(path: Path) -> None:
    """The names in a folder reach the medium. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

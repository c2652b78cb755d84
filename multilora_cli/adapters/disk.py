"""The few file operations the disk store is made of, so that tests can make any of them fail."""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multilora_cli.errors import BadInput
from multilora_cli.fleet.replace_file import sync_folder

_LOCK_POLL_S = 0.02


class Disk:
    """Writes that are on the medium when they return; everything is for the owner alone."""

    def create(self, path: Path) -> int:
        """A descriptor of the new file at `path`, which must not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def write(self, descriptor: int, part: memoryview) -> None:
        """All of `part`."""
        while part:
            part = part[os.write(descriptor, part) :]

    def sync(self, descriptor: int) -> None:
        """The file's bytes reach the medium."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """The end of a descriptor."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """A new folder."""
        path.mkdir(mode=0o700)

    def rename(self, source: Path, target: Path) -> None:
        """Both lie in one file system: whoever looks sees the one or the other."""
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        """The names in a folder reach the medium."""
        sync_folder(path)

    def remove(self, path: Path) -> None:
        """A file or a folder with all that is in it; nothing is said where it is gone already."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """What the file system of `path` has left for us."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def write_file(self, path: Path, data: bytes) -> None:
        """`data` as the new file `path`, on the medium when this returns."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, memoryview(data))
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def replace_file(self, path: Path, temporary: Path, data: bytes) -> None:
        """`path` holds its old bytes or `data`, whenever the power fails."""
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync_folder(path.parent)


def private_folder(path: Path) -> Path:
    """`path` as a real folder of this user that nobody else may enter; made if missing.

    Raises BadInput.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise BadInput(f"cache folder {path}: {error.strerror or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise BadInput(f"cache folder {path}: is a link or a file, expected a folder")
    if status.st_uid != os.geteuid():
        raise BadInput(
            f"cache folder {path}: belongs to user {status.st_uid}, expected {os.geteuid()}",
            hint="set XDG_CACHE_HOME to a folder of your own",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise BadInput(
            f"cache folder {path}: mode {mode:04o} lets other users in, expected 0700",
            hint=f"make sure that its content is yours, then: chmod 700 {path}",
        )
    return path


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive lock of `path`; None while somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock_within(path: Path, wait_s: float) -> int | None:
    """`try_lock`, again and again for at most `wait_s`."""
    until = time.monotonic() + wait_s
    descriptor = try_lock(path)
    while descriptor is None and time.monotonic() < until:
        time.sleep(_LOCK_POLL_S)
        descriptor = try_lock(path)
    return descriptor


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Hold the lock of `path` against other threads and processes; False: not had in `wait_s`.

    The kernel drops the lock of a process that dies.
    """
    descriptor = lock_within(path, wait_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)

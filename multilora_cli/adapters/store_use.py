"""Which entries of a disk store are in use, by which of the processes that share it."""

import os
import secrets
import threading
from pathlib import Path

from multilora_cli.adapters.disk import lock_within, try_lock
from multilora_cli.errors import BadInput

_LOCK_S = 5.0  # another process may look at the new file for a moment


class StoreUse:
    """This process's list of digests in `folder`, and how to read those of others.

    Each process keeps one file there and its lock; the kernel drops the lock when it dies. A line
    is a sign and a digest: taken into use, or given back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self.user = f"{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = lock_within(folder / self.user, _LOCK_S)
        if descriptor is None:
            raise BadInput(f"cache folder {folder}: locks do not work in this file system")
        self._descriptor = descriptor

    def close(self) -> None:
        """Give everything back."""
        if self._descriptor >= 0:
            (self._folder / self.user).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def add(self, digest: str) -> None:
        """This process uses the entry. The caller holds the lock of the digest."""
        with self._lock:
            if digest not in self._used:
                self._used.add(digest)
                self._append(f"+{digest}\n")

    def discard(self, digest: str) -> None:
        """It no longer does."""
        with self._lock:
            if digest in self._used:
                self._used.discard(digest)
                self._append(f"-{digest}\n")

    def all(self) -> set[str]:
        """Digests in use by this process or another one that lives."""
        with self._lock:
            used = set(self._used)
        for user in self.live() - {self.user}:
            try:
                lines = (self._folder / user).read_text("ascii", "replace").splitlines()
            except FileNotFoundError:
                continue
            theirs: set[str] = set()
            for line in lines:
                (theirs.add if line.startswith("+") else theirs.discard)(line[1:])
            used |= theirs
        return used

    def live(self) -> set[str]:
        """The users that have not died."""
        return live_users(self._folder)

    def _append(self, line: str) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        os.write(self._descriptor, line.encode())


def live_users(folder: Path) -> set[str]:
    """The files in `folder` whose lock is held."""
    live = set()
    for path in folder.iterdir():
        descriptor = try_lock(path)
        if descriptor is None:
            live.add(path.name)
        else:
            os.close(descriptor)
    return live

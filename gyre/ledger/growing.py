"""A file that one process appends to, in a folder of the ledger.

Owns the appending. Invariants: what was appended is with the operating system, whole, before the call returns, and on
the disk after `sync`; after a failure nothing is appended any more, since a torn tail would hide it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gyre.ledger.files import fsync_folder, write_error


class GrowingFile:
    """Base of the writers of shards. Safe to use from several threads. Every failure raises LedgerWriteError, and so
    does each write after it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1
        self._broken: OSError | None = None
        self._lock = threading.Lock()

    def _start(self, path: Path, start: bytes) -> None:
        """Makes the file, which must not be there, with its first bytes; both are durable. Raises OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        write_whole(self._fd, start)
        os.fsync(self._fd)
        fsync_folder(self._folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            if self._broken is not None:
                raise write_error(self._folder, self._broken)
            if self._fd < 0:
                raise ValueError(f"the shards in {self._folder} are closed")
            try:
                yield
            except OSError as error:
                self._broken = error
                raise write_error(self._folder, error) from error

    def sync(self) -> None:
        """Puts everything appended so far on the disk."""
        with self._writing():
            os.fsync(self._fd)

    def close(self) -> None:
        """Ends the file. A second call does nothing."""
        with self._lock:
            if self._fd < 0:
                return
            if self._broken is not None:
                GrowingFile._end(self)
                return
            try:
                self._end()
            except OSError as error:
                raise write_error(self._folder, error) from error

    def _end(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def write_whole(fd: int, data: bytes) -> None:
    """Raises OSError, also when only a part was written: the file system is full."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

"""Writing a journal: one file an incarnation, one line an event.

Owns the bytes of `<writer>.index` and `<writer>.<incarnation>.jsonl`. A line is
`{"n":0,"t":1.5,"e":{...},"c":"<crc32 of the bytes before ,\"c\">"}`: n is consecutive from 0, t is for display only.
Invariants: a file has one writer, which only appends; a file named in the index exists; a line that was
acknowledged as durable is on the disk; after a write that failed nothing follows in that file.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from gyre.errors import UserError
from gyre.ledger.files import fsync_folder, ledger_writes, write_error
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import create_counter

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def create_index(run: RunFolder, writer: str) -> None:
    """Makes the empty index of a writer, and its liveness counter at 0, at submission (or at a join).

    From then on nobody polls an absent name: NFS remembers absent names for a long time.
    """
    path = run.index_path(writer)
    with ledger_writes(path):
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        os.fsync(fd)
        os.close(fd)
        create_counter(run.alive_path(writer))
        fsync_folder(path.parent)


def index_pattern(writer: str) -> re.Pattern[bytes]:
    """A whole line of the writer's index, without its end; group 1 is the incarnation."""
    return re.compile(rb"%s\.([1-9][0-9]*)\.jsonl" % re.escape(writer.encode()))


def encode_line(n: int, t: float, event: bytes) -> bytes:
    """The bytes of one line, its end included; `event` is JSON."""
    body = b'{"n":%d,"t":%.3f,"e":%b' % (n, t, event)
    return b'%b,"c":"%08x"}\n' % (body, crc32(body))


class Journal:
    """The open journal of one incarnation. Safe to append to from several threads."""

    def __init__(
        self,
        path: Path,
        writer: str,
        incarnation: int,
        fd: int,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.writer = writer
        self.incarnation = incarnation
        self._fd = fd
        self._clock = clock
        self._n = 0
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._broken: OSError | None = None

    @classmethod
    def open(cls, run: RunFolder, writer: str, clock: Callable[[], float]) -> Journal:
        """Opens the writer's next incarnation. The index must exist (`create_index`), else UserError.

        The file is made first and named in the index last. An incarnation that died between the two has a file
        that no index names: nothing was written to it, and its number is skipped.
        """
        index = run.index_path(writer)
        try:
            lines = index.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{index} does not exist: {writer} is not a process of this run") from None
        with ledger_writes(index):
            incarnation = lines.count(b"\n") + 1
            while (fd := _create(run.journal_path(writer, incarnation))) is None:
                incarnation += 1
            fsync_folder(run.journal)
            path = run.journal_path(writer, incarnation)
            # A predecessor that died in the middle of its index line left no end of line: give it one.
            torn = bool(lines) and not lines.endswith(b"\n")
            _append_name(index, (b"\n" if torn else b"") + path.name.encode() + b"\n")
        return cls(path, writer, incarnation, fd, clock)

    def append(self, event: Any, durable: bool = True) -> int:
        """Writes one line and returns its n; with `durable` it, and all lines before it, are on the disk.

        Raises LedgerWriteError when that failed, and at each append after: the process exits then, and its next
        incarnation opens a file of its own.
        """
        with self._lock:
            self._check()
            n = self._n
            line = encode_line(n, self._clock(), self._encoder.encode(event))
            try:
                written = os.write(self._fd, line)
                if written != len(line):
                    # The rest cannot follow safely; the reason of a short write is a full file system.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if durable:
                    os.fsync(self._fd)
            except OSError as error:
                self._broken = error
                raise write_error(self.path, error) from error
            self._n += 1
            return n

    def sync(self) -> None:
        """Puts the lines that were appended with durable=False on the disk."""
        with self._lock:
            self._check()
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._broken = error
                raise write_error(self.path, error) from error

    def close(self) -> None:
        """Ends the journal. Lines that are not durable yet are made so when the file system lets us."""
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            try:
                if self._broken is None:
                    os.fsync(fd)
            except OSError as error:
                raise write_error(self.path, error) from error
            finally:
                os.close(fd)

    def _check(self) -> None:
        if self._broken is not None:
            raise write_error(self.path, self._broken)
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")


def _create(path: Path) -> int | None:
    """A descriptor of the new file, durable as an empty file; None when the name is taken."""
    try:
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    os.fsync(fd)
    return fd


def _append_name(index: Path, line: bytes) -> None:
    fd = os.open(index, _FLAGS)
    try:
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)

"""Whole files of the run folder: written aside and renamed, read back as typed values.

Owns atomic replacement, the one error for a file system that refuses a write, and the lock of what is built once.
Invariant: a reader sees an old file or a new one, whole; what was acknowledged is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gyre.errors import UserError

T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class LedgerWriteError(UserError):
    """The file system refused a write that the ledger needs. The process stops; `gyre resume` goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=1)


def run_of(path: Path) -> Path:
    """The run folder that `path` lies in: the nearest ancestor with a journal, else the file's own folder."""
    for parent in path.absolute().parents:
        if (parent / "journal").is_dir():
            return parent
    return path.absolute().parent


def errno_of(error: OSError) -> int | None:
    """The error's number. `shutil` gives the errors of a whole tree as texts: a full file system is among them, or the
    first counts."""
    if not isinstance(error, shutil.Error):
        return error.errno
    numbers = [int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))]
    return next((number for number in numbers if number in FULL), numbers[0] if numbers else None)


def write_error(path: Path, error: OSError) -> LedgerWriteError:
    """The one line for a write to `path` that failed with `error`."""
    run, number = run_of(path), errno_of(error)
    if number in FULL:
        return LedgerWriteError(f"the file system of {run} is full: free space, then gyre resume {run.name}")
    reason = os.strerror(number) if number else str(error)
    return LedgerWriteError(f"cannot write {path} ({reason}): mend that, then gyre resume {run.name}")


@contextmanager
def ledger_writes(path: Path) -> Iterator[None]:
    """Turns a full or read-only file system, met inside the block, into a LedgerWriteError; lets others pass."""
    try:
        yield
    except OSError as error:
        if errno_of(error) in FULL | REFUSED:
            raise write_error(path, error) from error
        raise


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits until nobody else, in any process that reaches the file `lock`, is in such a block; its end lets go."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def fsync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def written_aside(path: Path, mode: int = 0o600, parents: bool = False) -> Iterator[Path]:
    """Yields an empty file in the folder of `path`; after the block it is fsynced and renamed to `path`.

    With `parents`, an absent folder of `path` is made (0700, durable) first.

    When the block fails, `path` is as before and the file aside is gone. A killed writer leaves a dot-file,
    which no reader looks at. Raises LedgerWriteError when the file system refuses.
    """
    with ledger_writes(path):
        if parents and not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fsync_folder(path.parent.parent)
        with renamed_over(path, mode) as aside:
            yield aside


@contextmanager
def renamed_over(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """`written_aside` for a file of no run: raises OSError as it comes."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".aside")
    aside = Path(name)
    try:
        os.fchmod(fd, mode)
        yield aside
        os.fsync(fd)
        os.rename(aside, path)
        fsync_folder(path.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.unlink()
        raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of `data`, or raises OSError: a short write that does not continue is ENOSPC's way to begin."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces `path` by `data`, durably. Raises LedgerWriteError when the file system is full or read-only."""
    with written_aside(path, mode) as aside:
        fd = os.open(aside, os.O_WRONLY)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)


def write_new(path: Path, data: bytes) -> None:
    """Creates `path` with all of `data`, durably, or raises FileExistsError; nobody ever sees half of it.

    Of several that try at once, on any machines that share the file system, one succeeds: a hard link is exclusive.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.aside")
    write_atomic(aside, data)
    try:
        with ledger_writes(path):
            os.link(aside, path)
            fsync_folder(path.parent)
    finally:
        aside.unlink()


def read_json(path: Path, type: type[T]) -> T:
    """Decodes the JSON file `path` as `type`. Raises UserError that names the file when absent or malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except msgspec.DecodeError as error:  # ValidationError is one of these
        raise UserError(f"{path}: {error}", code=1) from error

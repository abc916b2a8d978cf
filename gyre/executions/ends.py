"""Ends of processes and bytes of pipes, seen from the event loop without threads.

Owns `ProcessEnd` (a pidfd and the event that it fired) and `CappedLog` (a pipe copied to a file up to a
number of bytes). Invariant: whoever writes into a `CappedLog` is never blocked for good and never fills the
disk.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

CHUNK = 256 * 1024
TAIL = 8 * 1024
DRAIN_PAUSE = 0.005
"""Seconds between reads once the cap is reached:

a flood then costs the writer its pace, not the host its core.
"""


async def readable(fd: int, timeout: float) -> bool:
    """Wait until `fd` can be read; False after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await asyncio.wait_for(event.wait(), timeout)
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even if the caller is cancelled; the cancellation goes on after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class ProcessEnd:
    """A process by its pidfd: cannot be confused with a later process of the same number."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when the process is gone already."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fired)

    def _fired(self) -> None:
        self._ended.set()
        self._loop.remove_reader(self._fd)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if not self._ended.is_set():
            try:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def wait(self) -> None:
        await self._ended.wait()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def last_words(log: Path, most: int = 200) -> str:
    """The last line that a command printed into `log`, at most `most` characters of it; "" when there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    printable = ("".join(each if each.isprintable() else " " for each in line).strip() for line in reversed(lines))
    return next(filter(None, printable), "")[:most]


class CappedLog:
    """A pipe whose first `cap` bytes go to `path`; what comes after is read, counted and dropped."""

    def __init__(self, path: Path, cap: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._left = cap
        self.dropped = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._copy)
        self._resume: asyncio.TimerHandle | None = None

    def close_write_end(self) -> None:
        """To be called once the child has its copy."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _take(self) -> bool:
        """Move one chunk; False when there is none for now, or none any more."""
        try:
            data = os.read(self._read, CHUNK)
        except BlockingIOError:
            return False
        kept = data[: self._left]
        if kept:
            os.write(self._file, kept)
        self._left -= len(kept)
        self.dropped += len(data) - len(kept)
        return bool(data)

    def _copy(self) -> None:
        if not self._take():
            self._loop.remove_reader(self._read)
        elif self.dropped:
            self._loop.remove_reader(self._read)
            self._resume = self._loop.call_later(DRAIN_PAUSE, self._loop.add_reader, self._read, self._copy)

    def finish(self) -> None:
        """Take what is left in the pipe and close. The writers must have ended, or are cut off."""
        if self._read < 0:
            return
        self.close_write_end()
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._read)
        while self._take():
            pass
        if self.dropped:
            os.write(self._file, f"\n[gyre: {self.dropped} more bytes of output were dropped]\n".encode())
        os.close(self._read)
        os.close(self._file)
        self._read = -1

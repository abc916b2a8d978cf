"""Liveness: a counter that its process overwrites, and the judgement of those who watch it.

Owns the files of `alive/`. Invariant: a process is judged by the watcher's own monotonic clock alone; no time of
another machine is ever compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gyre.ledger.files import ledger_writes

_WIDTH = 20


def create_counter(path: Path) -> None:
    """Makes the liveness file of a process that has not started: it reads 0."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size == 0:
            os.pwrite(fd, b"%0*d\n" % (_WIDTH, 0), 0)
    finally:
        os.close(fd)


def read_counter(path: Path) -> int | None:
    """The counter in a liveness file; None when there is none to read (absent, or half written)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None  # absent, or stale on NFS: the same as no news, and the watcher's deadline decides
    text = data[:_WIDTH]
    return int(text) if len(text) == _WIDTH and text.isdigit() else None


class Heartbeat:
    """The process's own side. It goes on from its predecessor's counter, so a restart is a change too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counter = read_counter(path) or 0

    def beat(self) -> None:
        """Overwrites the counter in place. Opened and closed each time: NFS shows a file's news at its close."""
        self.counter += 1
        with ledger_writes(self.path):
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, b"%0*d\n" % (_WIDTH, self.counter), 0)
            finally:
                os.close(fd)


class LivenessWatch:
    """Judges processes by when their counters last changed, seen from here.

    `clock` is monotonic, in seconds; `deadline` in seconds is several times the visibility delay of the file system.
    Observe before you ask: a watcher that was itself held up then sees the news first.
    """

    def __init__(self, clock: Callable[[], float], deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline
        self._last: dict[str, tuple[int, float]] = {}

    def observe(self, name: str, counter: int | None) -> None:
        """Takes in what `read_counter` gave. 0 (never beaten) and None (nothing to read) are no news."""
        if counter and (name not in self._last or self._last[name][0] != counter):
            self._last[name] = (counter, self._clock())

    def seen(self, name: str) -> bool:
        return name in self._last

    def silence(self, name: str) -> float | None:
        """Seconds since the counter last changed; None before the first beat."""
        return self._clock() - self._last[name][1] if name in self._last else None

    def dead(self, name: str) -> bool:
        """Whether a process that has beaten has been silent for longer than the deadline."""
        silence = self.silence(name)
        return silence is not None and silence > self._deadline

    def forget(self, name: str) -> None:
        """Starts afresh, when another incarnation is expected."""
        self._last.pop(name, None)

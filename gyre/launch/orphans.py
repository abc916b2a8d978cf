"""Orphans: processes whose parent, a process of ours, was killed before it could end them.

Owns this process's role as the reaper of its descendants. Invariant: after `end_orphans` nothing that descends from us
runs, whatever session it is in; orphans that end in the meantime do not stay behind as zombies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on descendants without a parent become our children, not init's."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children_of(parent: int) -> list[int]:
    """The processes whose parent is `parent`, zombies too."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.name))
    return found


def bury(known: Collection[int]) -> None:
    """Take the status of orphans that have ended; `known` are children that somebody else waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return  # the next time is soon enough for those behind it
        _bury(ended.si_pid)


def _bury(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def end_orphans(known: Collection[int], seconds: float) -> list[int]:
    """Kill and bury all orphans, and those that they leave in turn; the ones that are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = [pid for pid in children_of(os.getpid()) if pid not in known and not _bury(pid)]
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # our child, not waited for: the number is still its own
        time.sleep(0.01)

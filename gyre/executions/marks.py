"""Finds the processes that carry a mark in their environment, by looks at /proc that several askers share.

Owns those looks. Invariant: an answer comes from a look that began after the question; whoever asks while one is under
way shares the next one, so a wave of sandboxes that end together costs one look and not one each.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field


class Look(Struct, frozen=True):
    """`marked`: process ids by mark. `doubtful`: some process showed no environment, as one does while it execs or once
    it has ended."""

    marked: dict[str, list[int]] = field(default_factory=dict)
    doubtful: bool = False


class Looks:
    """One look at a time. `take` is the look itself, run in a thread."""

    def __init__(self, take: Callable[[], Look]) -> None:
        self._take = take
        self._next: asyncio.Task[Look] | None = None
        self._current: asyncio.Task[Look] | None = None

    async def look(self) -> Look:
        """One that begins from now on."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._current))
        return await asyncio.shield(self._next)

    async def _after(self, current: asyncio.Task[Look] | None) -> Look:
        if current is not None:
            await asyncio.wait({current})
        self._current, self._next = self._next, None
        return await asyncio.to_thread(self._take)


def look_for(variable: str) -> Look:
    """All processes whose environment sets `variable`, by its value. Processes of other users show none.

    A marked process that lived when the look began is found, or has ended since and is doubtful: then it may have left
    children that the list of processes does not have yet.
    """
    start = f"{variable}=".encode()
    marked: dict[str, list[int]] = {}
    doubtful = False
    for name in filter(str.isdigit, os.listdir("/proc")):
        environment = environment_of(int(name))
        if environment == b"":
            doubtful = doubtful or _may_have_had_one(name)
        for entry in environment.split(b"\0") if start in environment else ():
            if entry.startswith(start):
                marked.setdefault(entry[len(start) :].decode(errors="replace"), []).append(int(name))
    return Look(marked, doubtful)


def environment_of(pid: int) -> bytes:
    """b"" when it has none or has ended; another user's looks like one without the variable."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return b"\0"
    except OSError:
        return b""


def _may_have_had_one(name: str) -> bool:
    """It has ended, or has a program; a thread of the kernel has none."""
    try:
        os.readlink(f"/proc/{name}/exe")
    except OSError:
        try:
            return Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True
    return True

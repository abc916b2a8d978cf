"""Bounds on what one execution may use, and the watchdog that holds them.

Owns `Limits`, `Usage` and the reading of a process tree. `exceeded` is a pure decision; the watchdog is the
thin shell around it. Address space is not limited (garbage-collected run times reserve far more than they
use): resident memory, the number of processes and the bytes on disk are watched instead, and the kernel's own
limits hold per process.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gyre.recipe import schema

MIB = 1024 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes in bytes.

    `memory`, `processes` and `disk` count the whole sandbox, the rest one process or one mount.
    """

    memory: int = 4096 * MIB
    processes: int = 512
    disk: int = 4096 * MIB
    files: int = 1_000_000
    """Files and folders in the sandbox's upper folder."""
    open_files: int = 4096
    log: int = 16 * MIB
    """Bytes kept of the output; the rest is read and dropped."""
    shared_memory: int = 256 * MIB
    """Size of the tmpfs at /dev/shm, and a sixteenth of it for /run."""

    def narrowed(self, memory: int, disk: int) -> Limits:
        """These limits, with a task's own smaller `memory` and `disk` (0: not set)."""
        return Limits(
            memory=min(self.memory, memory or self.memory),
            processes=self.processes,
            disk=min(self.disk, disk or self.disk),
            files=self.files,
            open_files=self.open_files,
            log=self.log,
            shared_memory=self.shared_memory,
        )


def recipe_limits(settings: schema.Sandbox) -> Limits:
    """The limits that a recipe's `[sandbox]` sets."""
    return Limits(
        memory=settings.memory_mb * MIB,
        processes=settings.processes,
        disk=settings.disk_mb * MIB,
        open_files=settings.open_files,
    )


class Usage(Struct, frozen=True, kw_only=True):
    """What a sandbox uses at one moment.

    `memory` is resident and private (shared pages would count once a process).
    """

    memory: int = 0
    processes: int = 0
    disk: int = 0
    files: int = 0


def exceeded(usage: Usage, limits: Limits) -> str:
    """The name of the first limit that `usage` is over, or "" (pure)."""
    for name in ("memory", "processes", "disk", "files"):
        if getattr(usage, name) > getattr(limits, name):
            return name
    return ""


def tree_usage(root: int, most: int) -> Usage:
    """Memory and processes of `root` and all its descendants, from /proc. A process that ends meanwhile
    counts 0.

    Stops counting after `most` + 1 processes: a fork bomb must not make its watchdog slow.
    """
    memory = processes = 0
    pending = [root]
    while pending and processes <= most:
        pid = pending.pop()
        try:
            with open(f"/proc/{pid}/statm") as file:
                fields = file.read().split()
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        memory += (int(fields[1]) - int(fields[2])) * PAGE
        processes += 1
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    pending.extend(map(int, file.read().split()))
            except OSError:
                continue
    return Usage(memory=memory, processes=processes)


def disk_usage(folder: Path, limits: Limits) -> Usage:
    """Allocated bytes and files below `folder`, links not followed. Stops counting once a limit is passed.

    Folders too deep to be named (PATH_MAX) count as too many files: nothing may hide in them.
    """
    size = files = 0
    pending = [str(folder)]
    while pending and size <= limits.disk and files <= limits.files:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                files = limits.files + 1
    return Usage(disk=size, files=files)


async def watch(
    root: int,
    upper: Path | None,
    limits: Limits,
    stop: Callable[[str], None],
    interval: float = 0.25,
    scans_per_disk_scan: int = 8,
) -> None:
    """Call `stop(limit)` once when the tree under process `root`, or the folder `upper`, is over a limit;
    then end.
    """
    scans = 0
    while True:
        await asyncio.sleep(interval)
        scans += 1
        over = exceeded(tree_usage(root, limits.processes), limits)
        if not over and upper is not None and scans % scans_per_disk_scan == 0:
            over = exceeded(await asyncio.to_thread(disk_usage, upper, limits), limits)
        if over:
            stop(over)
            return

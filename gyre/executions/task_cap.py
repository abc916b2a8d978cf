"""The kernel's cap on a sandbox's tasks where its rlimit does not bind: for the machine's root.

Owns `TaskCap`, a cgroup of the pids controller for one sandbox. RLIMIT_NPROC never binds the machine's root, and the
watchdog looks four times a second: in between a fork bomb makes thousands of processes, which then take minutes to
kill. The cap is wider than the limit that the watchdog holds, so that the watchdog still decides and names it; it only
keeps what the watchdog has to count and kill small. Invariant: a sandbox for which no such cgroup can be had runs as
before, with the watchdog alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

WIDER = 4
"""Tasks (threads count) allowed for each process that the limit allows."""
PREFIX = "gyre-"


def own_cgroup(memberships: str, mounts: str) -> Path | None:
    """The folder of this process's own cgroup that has a pids controller (pure).

    `memberships` is the text of /proc/self/cgroup, `mounts` that of /proc/self/mounts. A controller of its own
    (cgroup v1) comes before the unified tree. None: there is neither.
    """
    paths = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    places: dict[str, str] = {}
    for fields in map(str.split, mounts.splitlines()):
        if fields[2] == "cgroup" and "pids" in fields[3].split(","):
            places["pids"] = fields[1]
        elif fields[2] == "cgroup2":
            places[""] = fields[1]
    for controller in ("pids", ""):
        if controller in paths and controller in places:
            return Path(places[controller] + paths[controller].rstrip("/"))
    return None


def tasks_of(root: int) -> list[int]:
    """`root` and its children, which at a sandbox's start is all of it."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text()
    return [root, *map(int, children.split())]


class TaskCap:
    """A cgroup that holds one sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def around(cls, root: int, processes: int) -> TaskCap | None:
        """Put the process `root` and its children, which wait, under a cap of `WIDER` times `processes` tasks.

        None where that cannot be: for an ordinary user (whom the rlimit binds), without the controller, or where
        the tree is somebody else's.
        """
        if os.geteuid() != 0:
            return None
        try:
            own = own_cgroup(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mounts").read_text())
            if own is None:
                return None
            _sweep(own)
            cap = cls(own / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
            cap.folder.mkdir()
        except OSError:
            return None
        try:
            (cap.folder / "pids.max").write_text(str(WIDER * processes))
            for task in tasks_of(root):
                (cap.folder / "cgroup.procs").write_text(str(task))
        except OSError:  # no pids controller here, or it may not be given to children
            cap.remove()
            return None
        return cap

    def remove(self) -> None:
        """Once its last process has ended; one that is still there keeps it, for the next sweep."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _sweep(own: Path) -> None:
    """Remove what killed workers left: the kernel lets only an empty one go."""
    for left in own.glob(f"{PREFIX}*"):
        if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
            TaskCap(left).remove()

"""What /proc says of a run: its processes, by path and by parent, and the sockets on which they listen."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


def pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, ProcessLookupError):
        return ""  # it has ended, or is a kernel thread


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(PROC / str(pid) / name)
    except (OSError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Does it run? A zombie does not."""
    stat = _read(pid, "stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] not in "ZX"


def parent(pid: int) -> int:
    stat = _read(pid, "stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else 0


def command(pid: int) -> str:
    return _read(pid, "cmdline").strip()


def child_of(pid: int, *words: str) -> int:
    """The child of `pid` whose command line has all of `words` in it; 0 when there is none."""
    found = [other for other in pids() if parent(other) == pid and all(word in command(other) for word in words)]
    return found[0] if found else 0


def belonging(folder: Path) -> dict[int, str]:
    """Processes of a run: its folder is in their command line, is their working directory or holds their overlay."""
    text, me = str(folder), os.getpid()
    found = {}
    for pid in pids():
        if pid == me or not alive(pid):
            continue
        if text in command(pid) or _link(pid, "cwd").startswith(text) or _overlay(pid).startswith(text):
            found[pid] = command(pid)
    return found


def _overlay(pid: int) -> str:
    """The upper folder of the sandbox that a process is in, as bubblewrap mounted it; "" outside."""
    match = re.search(r" / / .*upperdir=/oldroot(/[^,]*)", _read(pid, "mountinfo"))
    return match[1] if match else ""


def sandboxes(folder: Path, execution: str = "") -> list[int]:
    """Processes inside the sandboxes of a run's harnesses, of one execution if it is given."""
    pattern = re.compile(rf"{re.escape(str(folder))}/.*/{re.escape(execution) or '[^/]*'}[.][0-9]+/upper")
    return [pid for pid in pids() if pattern.fullmatch(_overlay(pid))]


def listening(inodes: set[str]) -> set[str]:
    """Those of `inodes` that are sockets which listen."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in (PROC / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.add(fields[9])
    return found


def sockets(processes: list[int]) -> set[str]:
    """Inodes of all sockets that these processes hold."""
    found = set()
    for pid in processes:
        try:
            names = os.listdir(PROC / str(pid) / "fd")
        except OSError:
            continue  # it has ended
        for name in names:
            match = re.fullmatch(r"socket:\[(\d+)\]", _link(pid, f"fd/{name}"))
            if match:
                found.add(match[1])
    return found


def freeze(*processes: int) -> bool:
    """Stop processes without ending them; only SIGCONT and SIGKILL reach them from now on. False: one had ended."""
    try:
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        return True
    except ProcessLookupError:
        thaw(*processes)
        return False


def thaw(*processes: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

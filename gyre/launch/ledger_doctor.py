"""`gyre doctor ledger`: is this file system fit for run folders?

Owns a scratch folder below the runs' home, and an echo: a second process (under Slurm on a compute node) that answers
each line appended to one file by a line in another, as processes of a run talk. Invariant: nothing of it stays behind;
no clocks of two machines are compared: what is measured is the way there and back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gyre.launch.findings import Finding, failure, ok, warning

ROUNDS = 20
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.002
FREE_BYTES = 10 << 30
SLOW_SECONDS = 2.0


def examine(home: Path, srun: list[str]) -> Iterator[Finding]:
    """Findings about the file system of `home`; the echo is started behind `srun` (empty: on this machine)."""
    home.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".gyre-doctor-", dir=home))
    try:
        yield exclusive(folder)
        yield rename(folder)
        yield room(folder)
        yield echo(folder, srun)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def exclusive(folder: Path) -> Finding:
    path = folder / "exclusive"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return ok("exclusive creation; locks are not needed")
    return failure(
        "a file that exists can be created again", "this file system cannot hold runs: set GYRE_RUNS to another"
    )


def rename(folder: Path) -> Finding:
    old, new = folder / "new", folder / "old"
    new.write_text("old")
    with open(old, "w") as file:
        file.write("new")
        file.flush()
        os.fsync(file.fileno())
    old.replace(new)
    if new.read_text() == "new" and not old.exists():
        return ok("rename replaces a file whole")
    return failure("rename does not replace a file", "this file system cannot hold runs: set GYRE_RUNS to another")


def room(folder: Path) -> Finding:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    text = f"{free / (1 << 30):.0f} GiB free"
    if free < FREE_BYTES:
        return warning(text, "checkpoints of a small model fit, those of a large one do not")
    return ok(text)


def echo(folder: Path, srun: list[str]) -> Finding:
    """Lines appended here, seen there, answered, seen here: half of the way there and back."""
    calls, answers = folder / "calls", folder / "answers"
    calls.touch()
    answers.touch()
    where = "a compute node" if srun else "another process of this machine"
    other = subprocess.Popen(
        [*srun, sys.executable, "-m", "gyre.launch.ledger_doctor", str(folder)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        append(calls, "0")
        if not seen(answers, 1, PATIENCE_SECONDS, other):
            words = (
                other.stderr.read().decode().strip().splitlines() if other.poll() is not None and other.stderr else []
            )
            return failure(f"{where} does not see this folder", words[-1] if words else "set GYRE_RUNS to a shared one")
        delays = []
        for number in range(1, ROUNDS + 1):
            began = time.monotonic()
            append(calls, str(number))
            if not seen(answers, number + 1, PATIENCE_SECONDS, other):
                return failure(f"an appended line did not reach {where}", "set GYRE_RUNS to another file system")
            delays.append((time.monotonic() - began) / 2)
    finally:
        if other.stdin is not None:
            other.stdin.close()
        other.wait()
        if other.stderr is not None:
            other.stderr.close()
    delays.sort()
    middle, worst = statistics.median(delays), delays[-1]
    text = f"an appended line is seen by {where} after {1000 * middle:.1f} ms (median of {ROUNDS})"
    text += f", {1000 * worst:.1f} ms at worst"
    if worst > SLOW_SECONDS:
        return warning(text, "set local.liveness to several times the worst")
    return ok(text)


def append(path: Path, line: str) -> None:
    """As a journal is written."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, line.encode() + b"\n")
    os.fsync(fd)
    os.close(fd)


def seen(path: Path, lines: int, seconds: float, other: subprocess.Popen[bytes] | None = None) -> bool:
    """Re-opens the file at each look: what a close wrote is seen at the next open, on NFS too."""
    deadline = time.monotonic() + seconds
    while path.read_bytes().count(b"\n") < lines:
        if time.monotonic() > deadline or (other is not None and other.poll() is not None):
            return False
        time.sleep(POLL_SECONDS)
    return True


def answer(folder: Path) -> None:
    """The other side of `echo`."""
    for number in range(ROUNDS + 1):
        if not seen(folder / "calls", number + 1, PATIENCE_SECONDS):
            return
        append(folder / "answers", str(number))


def main() -> None:
    parser = argparse.ArgumentParser(description="the echo of gyre doctor ledger")
    parser.add_argument("folder", type=Path)
    answer(parser.parse_args().folder)


if __name__ == "__main__":
    main()

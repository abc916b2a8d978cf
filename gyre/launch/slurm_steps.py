"""The command lines of a job's steps, and the words of its batch script.

Pure, but for `say`. Invariant: a step shares all that its node has with the job's other steps, and its end ends nothing
else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from gyre.launch.local import MODULES

SRUN = ("--overlap", "--kill-on-bad-exit=0", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0", "--unbuffered")


def srun(name: str, node: str, guard: list[str], group: int | None = None) -> list[str]:
    """A step of one task on `node`; `group` is the component in a heterogeneous job."""
    where = [f"--het-group={group}"] if group is not None else []
    return ["srun", *SRUN, *where, f"--nodelist={node}", f"--job-name={name}", *guard]


def guard(
    container: Iterable[str],
    run: Path,
    name: str,
    log: Path,
    peers: Iterable[str],
    argv: list[str],
    rescue: int = -1,
) -> list[str]:
    """What runs on the node: gyre.launch.slurm_step, which starts `argv` in the same container."""
    return [
        *(*container, sys.executable, "-m", "gyre.launch.slurm_step"),
        *("--run", str(run), "--name", name, "--log", str(log)),
        *("--peers", ",".join(peers), "--rescue", str(rescue), "--", *argv),
    ]


def program(run: Path, name: str) -> list[str]:
    """The program of a process of the run."""
    module = MODULES[name.partition("-")[0]]
    return [sys.executable, "-m", f"gyre.processes.{module}", "--run", str(run), "--name", name]


def say(text: str) -> None:
    """A line in the job's log."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)

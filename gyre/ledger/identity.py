"""Which process a journal means: a pid and the time it started.

Invariant: a pid alone names nobody, for it is used again; with its start time it names one process of this machine for
good.
"""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int | str = "self") -> float:
    """Start time in clock ticks since boot. Raises FileNotFoundError or ProcessLookupError when the process is gone."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return float(text.rpartition(")")[2].split()[19])


def still_runs(pid: int, start: float) -> bool:
    """Is the process that had this pid and start time still there?"""
    try:
        return process_start(pid) == start
    except (FileNotFoundError, ProcessLookupError):
        return False

"""Pieces of the worker that need no run: which workspaces a new incarnation removes, and room on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre.ledger import events as ev
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import Attempt, Execution, RunState
from gyre.processes.worker import check_room, lost_workspaces


def test_a_new_worker_removes_what_lost_attempts_left_and_keeps_what_was_kept(tmp_path: Path) -> None:
    done = ev.Finished(execution="g00000-00", attempt=1, outcome="graded")
    state = RunState(
        executions={
            "g00000-00": Execution(attempts={1: Attempt(finished=done)}),
            "g00000-01": Execution(attempts={1: Attempt(finished=None), 2: Attempt(finished=None)}),
        }
    )
    for name in ("g00000-00.1", "g00000-01.1", "g00000-01.2", "g00009-00.1", "stray"):
        (tmp_path / name).mkdir()
    lost = {path.name for path in lost_workspaces(tmp_path, state)}
    assert lost == {"g00000-01.1", "g00000-01.2", "g00009-00.1", "stray"}
    assert lost_workspaces(tmp_path / "absent", state) == []


def test_an_execution_that_ends_on_a_full_disk_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "mine").create()
    check_room(run.workspaces)
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 1000, 500, 500, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(LedgerWriteError, match="is full: free space, then gyre resume mine"):
        check_room(run.workspaces)
    no_inodes = os.statvfs_result((4096, 4096, 10**6, 10**6, 10**6, 1000, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: no_inodes)
    with pytest.raises(LedgerWriteError):
        check_room(run.workspaces)
